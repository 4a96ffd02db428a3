"""The model card: what it says, and that it goes to the hub with the head."""

from pathlib import Path

import pytest
from checkpoints import CONFIG, eagle3_tensors, write_safetensors
from huggingface_hub import ModelCard
from test_convert_hub import hub, run  # noqa: F401, fixtures

from mlx_eagle.convert.publish import make_card, source_license

CONVERTED = {"kind": "eagle3", "quantization": {"bits": 4, "group_size": 64}}
MEASURED = "tokens per pass of the target, in 6 texts\nas resolved 1.50 61.2%"


def card(
    config: dict = CONVERTED,
    source="some/head",
    target="some/target",
    license=None,
    measured: str | None = None,
) -> str:
    return make_card(config, "me/converted", source, target, "SpecForge", license or {}, measured)


def test_the_front_matter_is_the_hubs():
    data = ModelCard(card(license={"license": "apache-2.0"})).data
    assert data.base_model == "some/target" and data.library_name == "mlx"
    assert data.license == "apache-2.0"
    assert "mlx" in data.tags and "speculative-decoding" in data.tags


def test_what_the_card_says():
    text = card(license={"license": "mit"}, measured=MEASURED)
    assert "# converted" in text and "SpecForge" in text and "| mit |" in text
    assert "[some/head](https://huggingface.co/some/head)" in text
    assert "4 bits, groups of 64" in text
    mixed = {"group_size": 64, "bits": 5, "lm_head": {"group_size": 64, "bits": 6}, "fc": False}
    assert "| 5 to 6 bits, groups of 64 |" in card(CONVERTED | {"quantization": mixed})
    assert f"```\n{MEASURED}\n```" in text
    assert "mlx_eagle.generate --model some/target --draft-model me/converted" in text
    code = text.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    assert 'mlx_eagle.load_drafter("me/converted", model)' in code
    assert "Measured" not in card() and "not quantized" in card({"kind": "eagle3"})
    assert "https://huggingface.co/some/head)" in card(source="some/head/model-f16.gguf")


def test_a_missing_licence_is_unknown():
    text = card()
    assert "unknown: see the source" in text
    assert ModelCard(text).data.license == "unknown"


def test_no_path_of_this_machine(tmp_path):
    source, target = tmp_path / "my head", tmp_path / "my target"
    source.mkdir(), target.mkdir()
    text = card(source=str(source), target=str(target))
    assert str(tmp_path) not in text and "my head" in text and "my target" in text
    assert ModelCard(text).data.base_model is None


@pytest.mark.parametrize(
    ("readme", "config", "expected"),
    [
        ("---\nlicense: apache-2.0\ntags:\n- x\n---\nhello", {}, {"license": "apache-2.0"}),
        (
            "---\nlicense: other\nlicense_name: 'llama3.1'\nlicense_link: LICENSE\n---\n",
            {},
            {"license": "other", "license_name": "llama3.1", "license_link": "LICENSE"},
        ),
        ("license: mit", {}, {}),
        ("---\nlicense:\n- mit\n---\n", {"license": "bsd"}, {"license": "bsd"}),
        (None, {"license": "mit"}, {"license": "mit"}),
        (None, {}, {}),
    ],
)
def test_the_licence_of_the_source(tmp_path, readme, config, expected):
    if readme is not None:
        (tmp_path / "README.md").write_text(readme)
    assert source_license(str(tmp_path), config) == expected


def test_the_card_is_uploaded(run, hub, tmp_path):  # noqa: F811
    folder = hub.root / "some" / "head"
    write_safetensors(folder, CONFIG, eagle3_tensors())
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A head\n")
    out = tmp_path / "out"
    args = ("--hf-path", "some/head", "--mlx-path", out, "--upload-repo", "me/converted")
    code, _, err = run(hub.address, *args)
    assert code == 0, err
    text = (out / "README.md").read_bytes()
    assert hub.uploads["README.md"] == text
    data = ModelCard(text.decode()).data
    assert data.license == "apache-2.0" and data.base_model == "some/head"


def test_without_upload_no_card(run, tmp_path):  # noqa: F811
    source = write_safetensors(tmp_path / "source", CONFIG, eagle3_tensors())
    out = Path(tmp_path / "out")
    code, _, _ = run("http://127.0.0.1:9", "--hf-path", source, "--mlx-path", out)
    assert code == 0 and not (out / "README.md").exists()
