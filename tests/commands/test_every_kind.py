"""Every kind of drafter by the commands, from the files that its makers publish.

Converted, opened by its folder's name, counted, measured beside others and held against a target.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, partial
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from assistants import golden_folder, golden_target
from block_twin import published, tiny_dflash
from checkpoints import write_config
from golden import frozen
from grids import thorough
from helpers import PROMPT, byte_tokenizer, plain, tiny_llama
from mlx.utils import tree_flatten
from mtp_checkpoints import FAMILIES, full_config
from serving import ours

from mlx_eagle.bench import __main__ as bench
from mlx_eagle.commands import generate
from mlx_eagle.convert import convert, pipeline
from mlx_eagle.convert.check import measure_acceptance
from mlx_eagle.doctor import __main__ as doctor
from mlx_eagle.drafters.kinds import KINDS
from mlx_eagle.drafters.pairs import pairs_for

TOKENIZER = byte_tokenizer()
LEARNED = ("eagle3", "dflash", "dflash2", "dspark", "liquid", "muse")
GEMMAS = [7, 9, 11, 30, 8]  # what the assistant has learnt starts so
TITLES = {"liquid": "a DSpark head", "muse": "a DFlash head"}
TURNED = "neighbouring channels turned"
READINGS = {
    "dflash": {"slot 0 drafts first", TURNED},
    "dflash2": {"slot 0 drafts first", TURNED},
    "dspark": {"slot 1 drafts first", TURNED},
    "liquid": {"slot 1 drafts first", "half channels turned"},
    "muse": {"slot 0 drafts first", TURNED},
    "assistant": set(),
    "mtp": {"state before embedding"},
}
KNOWN = {"mtp": "an MTP layer of the target's own"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of a target of each name, and the drafter's of each kind, made once."""
    root = tmp_path_factory.mktemp("kinds")

    @cache
    def target(name: str) -> Path:
        model, config = {"llama": llama, "gemma": gemma, "qwen": qwen}[name]()
        folder = root / name
        folder.mkdir()
        mx.save_safetensors(
            str(folder / "model.safetensors"), dict(tree_flatten(model.parameters()))
        )
        write_config(folder, config)
        TOKENIZER.save_pretrained(str(folder))
        if name == "qwen":
            add_mtp(folder)
        return folder

    @cache
    def drafter(kind: str) -> tuple[Path, str]:
        if kind == "mtp":
            return target("qwen"), "mtp"
        own = target("gemma" if kind == "assistant" else "llama")
        convert(source_of(kind, own), str(root / kind), quantize=False, dtype="float32")
        return own, str(root / kind)

    return target, drafter


def source_of(kind: str, target: Path) -> str:
    """What is converted."""
    if kind == "mtp":
        return str(target)
    is_assistant = kind == "assistant"
    return str(golden_folder("learned") if is_assistant else frozen.FOLDER / f"learned-{kind}")


def llama():
    model = tiny_llama(num_hidden_layers=6)
    return model, {key: value for key, value in vars(model.args).items() if value is not None}


def gemma():
    values = json.loads((golden_folder("learned") / "target.json").read_text())
    return golden_target("learned"), values | {"model_type": "gemma4_text"}


@lru_cache
def qwen_part():
    return FAMILIES["qwen3.5"]()


def qwen():
    return qwen_part().target, full_config(qwen_part())


def add_mtp(folder: Path) -> None:
    """The layer as published, in a file of its own that the index names."""
    trunk = mx.load(str(folder / "model.safetensors"))
    layer = mx.load(str(frozen.FOLDER / "mtp-by-heart.safetensors"))
    mx.save_safetensors(str(folder / "mtp.safetensors"), layer)
    places = dict.fromkeys(trunk, "model.safetensors") | dict.fromkeys(layer, "mtp.safetensors")
    index = {"weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def called(monkeypatch, capsys, program, *flags: str) -> str:
    monkeypatch.setattr(sys, "argv", [program.__name__, *map(str, flags)])
    program.main()
    return capsys.readouterr().out


ALL = [*LEARNED, "assistant", "mtp"]


@pytest.mark.parametrize("kind", thorough(ALL, "dspark", "mtp"))
def test_text_counts_and_memory(folders, monkeypatch, capsys, kind):
    """The text is mlx-lm's, and most of it was drafted: each knows it by heart."""
    target, name = folders[1](kind)
    flags = ("--model", target, "--draft-model", name, "--ignore-chat-template", "-m", 22)
    flags = (*flags, "--num-draft-tokens", 3, "--memory", "--stats-json", "-", "--extra-eos-token")
    tokens = GEMMAS if kind == "assistant" else PROMPT
    prompt = TOKENIZER.decode(tokens)
    out = called(monkeypatch, capsys, generate, *flags, "<end>", "-p", prompt)
    model, tokenizer = mlx_lm.load(str(target))
    assert tokenizer.encode(prompt) == tokens
    text = tokenizer.decode(plain(model, tokens, 22))
    assert text.rstrip("�") in out
    assert "Drafting adds" in out and "Rounds: " in out
    counts = json.loads(out.splitlines()[-1])
    assert counts["tau"] > 0.8 * 4
    assert counts["num_drafted"] == counts["num_accepted"] + counts["num_rejected"]
    once = kind not in ("eagle3", "assistant", "mtp")
    assert counts["num_head_forwards"] == counts["num_rounds" if once else "num_drafted"]
    assert counts["head_weight_bytes"] == 4 * counts["head_parameters"] > 20_000
    assert counts["head_cache_bytes"] > 0


class Asker:
    """A tokenizer to whom each question is the same."""

    has_chat_template, eos_token_ids = False, ()

    def __init__(self, tokens: list[int]):
        self.tokens = tokens

    def encode(self, text: str) -> list[int]:
        return self.tokens


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [kind for kind in ALL if kind != "eagle3"])
def test_check_measures_it_and_its_other_readings(folders, monkeypatch, tmp_path, kind):
    """What it has learnt is accepted as the config has it, and as it has it only."""
    target, tokens = folders[1](kind)[0], GEMMAS if kind == "assistant" else PROMPT
    short = partial(measure_acceptance, questions=("1",), num_tokens=20)
    monkeypatch.setattr(pipeline, "measure_acceptance", short)
    model, _ = mlx_lm.load(str(target))
    monkeypatch.setattr(pipeline, "load_model", lambda *_: (model, Asker(tokens)))
    options = {"target": str(target), "check": True, "quantize": False, "dtype": "float32"}
    found = convert(source_of(kind, target), str(tmp_path / "head"), **options)["check"]
    assert found["winner"] == "as resolved" and found["tau"] > 3
    bad = {name for name, row in found["alternatives"].items() if row["tau"] < 3}
    assert READINGS[kind] <= bad


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ALL)
def test_the_server_answers_with_it(folders, kind):
    """One request alone, and two in shared rounds."""
    target, name = folders[1](kind)
    tokens = GEMMAS if kind == "assistant" else PROMPT
    prompts = [TOKENIZER.decode(tokens), TOKENIZER.decode(tokens[:4])]
    model, tokenizer = mlx_lm.load(str(target))
    texts = [tokenizer.decode(plain(model, tokenizer.encode(p), 22)) for p in prompts]
    with ours("--model", target, "--draft-model", name, "--usage-stats") as asked:

        def answer(prompt: str) -> str:
            made = asked.complete(prompt=prompt, max_tokens=22)
            assert made.usage.model_extra["drafted_tokens"] > 0
            return made.choices[0].text

        assert answer(prompts[0]) == texts[0]
        with ThreadPoolExecutor() as pool:
            assert [*pool.map(answer, prompts)] == texts


@pytest.mark.parametrize("kind", thorough(["mtp", "dspark", "eagle3"], "mtp"))
def test_with_a_draft_vocabulary(folders, monkeypatch, capsys, kind):
    """By the command and the server: the texts stay, and fewer drafts are right."""
    target, name = folders[1](kind)
    prompt = TOKENIZER.decode(PROMPT)
    flags = ("--model", target, "--draft-model", name, "--draft-vocab")
    more = ("--ignore-chat-template", "-m", 22, "--num-draft-tokens", 3, "--stats-json", "-", "-p")
    outs = [called(monkeypatch, capsys, generate, *flags, n, *more, prompt) for n in ("full", 20)]
    texts = [out.split("==========")[1] for out in outs]
    rates = [json.loads(out.splitlines()[-1])["acceptance_rate"] for out in outs]
    assert texts[0] == texts[1] and rates[0] > rates[1] > 0
    model, tokenizer = mlx_lm.load(str(target))
    text = tokenizer.decode(plain(model, PROMPT, 22))
    with ours(*map(str, flags), "20", "--usage-stats") as asked:
        made = asked.complete(prompt=prompt, max_tokens=22)
    assert made.choices[0].text == text and made.usage.model_extra["drafted_tokens"] > 0


@pytest.mark.parametrize("kind", thorough(ALL, "liquid"))
def test_the_doctor_says_what_it_is_and_that_it_fits(folders, capsys, kind):
    target, name = folders[1](kind)
    doctor.main(["--model", str(target), "--draft-model", name])
    title = TITLES.get(kind) or KINDS[kind].title
    out = " ".join(capsys.readouterr().out.split())
    assert KNOWN.get(kind, f"{kind}, {title} of ") in out
    assert kind == "mtp" or "MB, fits the target" in out


def test_the_doctor_says_what_auto_takes(folders, capsys, tmp_path):
    (tmp_path / "Qwen3-8B").symlink_to(folders[0]("llama"))
    doctor.main(["--model", str(tmp_path / "Qwen3-8B")])
    pair = pairs_for("Qwen3-8B")[0]
    said = f"{pair.head} ({pair.kind}, {pair.size}, licence: {pair.licence}) is what"
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.exhaustive
def test_several_kinds_side_by_side(folders, monkeypatch, capsys, tmp_path):
    """Two heads of one target by their folders, and its own layer by its name."""
    target, names = folders[0]("qwen"), []
    for kind, num_layers in (("dflash", 1), ("dflash", 2)):
        drafter = tiny_dflash(qwen_part().target, num_layers=num_layers, taps=(0, 3))
        config = json.loads((frozen.FOLDER / f"learned-{kind}" / "config.json").read_text())
        inside = {**config["dflash_config"], "target_layer_ids": [0, 2]}
        config |= {"num_hidden_layers": num_layers, "dflash_config": inside}
        source = published(tmp_path / f"source{num_layers}", drafter, config)
        names.append(str(tmp_path / f"head{num_layers}"))
        convert(str(source), names[-1], quantize=False)
    flags = ("--model", target, "--draft-model", ",".join([*names, "mtp"]), "--repeats", 1)
    flags = (*flags, "--prompts", "gsm8k", "--limit", 1, "--max-tokens", 8)
    flags = (*flags, "--num-draft-tokens", "2", "--out", tmp_path / "out")
    called(monkeypatch, capsys, bench, *flags)
    found = json.loads((tmp_path / "out" / "results.json").read_text())["scenarios"][0]
    rows = {row["drafter"]: row for row in found["side_by_side"]}
    assert sorted(rows) == ["head1", "head2", "mtp"]
    assert all(row["identical"] == row["num_prompts"] == 1 for row in rows.values())
    assert rows["head1"]["weight_bytes"] < rows["head2"]["weight_bytes"]
    assert rows["mtp"]["weight_bytes"] > 0
    assert all(row["mean_acceptance_length"] >= 1 for row in rows.values())
