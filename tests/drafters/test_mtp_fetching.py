"""Fetching of MTP layers: which files, how many bytes, from which model, and what is said."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from checkpoints import write_config
from hub import Hub, running_hub, use_hub
from huggingface_hub import constants
from mtp_checkpoints import FAMILIES, Published, check_layers, write_checkpoint

import mlx_eagle
from mlx_eagle.drafters import target_parts
from mlx_eagle.drafters.target_parts import HEADER_BYTES

QWEN = FAMILIES["qwen3.5"]()
GLM = FAMILIES["glm-4.5"]()
CARD = "---\nlibrary_name: mlx\nbase_model: {}\ntags:\n- mlx\n---\n# A copy\n"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    with running_hub(tmp_path / "hub") as server:
        use_hub(monkeypatch, server.address, tmp_path / "home")
        yield server


def fetched(hub: Hub) -> list[str]:
    """The files of weights that were asked for, without their owners, each once."""
    names = [path.rsplit("/", 1)[1] for path in hub.requests if path.endswith(".safetensors")]
    return sorted(set(names))


def test_a_repository_fetches_the_shard_that_holds_them(hub):
    write_checkpoint(hub.root / "some" / "target", GLM)
    check_layers(mlx_eagle.open_drafter("mtp", GLM.target, target="some/target"), GLM)
    assert fetched(hub) == ["model-00003-of-00003.safetensors"]


def test_a_repository_of_one_file(hub):
    folder = hub.root / "some" / "target"
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), QWEN.arrays())
    write_config(folder, {"model_type": "qwen3_5"})
    check_layers(mlx_eagle.open_drafter("mtp", QWEN.target, target="some/target"), QWEN)


@pytest.mark.parametrize("is_local", [True, False])
def test_a_conversion_sends_to_its_original(hub, tmp_path, is_local):
    write_checkpoint(hub.root / "maker" / "original", QWEN)
    copy = (tmp_path if is_local else hub.root / "some") / "copy-4bit"
    copy.mkdir(parents=True)
    mx.save_safetensors(str(copy / "model.safetensors"), {"model.norm.weight": mx.ones(4)})
    write_config(copy, {"model_type": "qwen3_5", "quantization": {"bits": 4, "group_size": 64}})
    (copy / "README.md").write_text(CARD.format("maker/original"))
    target = str(copy) if is_local else "some/copy-4bit"
    check_layers(mlx_eagle.open_drafter("mtp", QWEN.target, target=target), QWEN)
    assert "model-00001-of-00003.safetensors" not in fetched(hub)


def write_copy(folder: Path, card: str = "", **config) -> None:
    """A model without MTP layers."""
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), {"model.norm.weight": mx.ones(4)})
    write_config(folder, {"model_type": "qwen3_5", **config})
    (folder / "README.md").write_text(card)


def test_a_conversion_of_a_tuned_model(hub):
    """A chain of two; that the layers are those of the tuned model's base is said."""
    write_checkpoint(hub.root / "maker" / "original", QWEN)
    write_copy(hub.root / "some" / "tuned", _name_or_path="maker/original")
    write_copy(hub.root / "some" / "tuned-4bit", CARD.format("some/tuned"))
    with pytest.warns(UserWarning, match=r"those of maker/original, for some/tuned, which was"):
        drafter = mlx_eagle.open_drafter("mtp", QWEN.target, target="some/tuned-4bit")
    check_layers(drafter, QWEN)


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ("", r"^some/4bit and some/tuned hold no MTP layers, and some/tuned names no other model"),
        (
            "some/4bit",
            r"hold no MTP layers, and some/tuned names no other model that",
        ),
        ("no/such", r"^some/tuned was made from no/such, and no/such is neither a folder here"),
        ("maker/gated", r"^some/tuned was made from maker/gated, and maker/gated asks for its"),
    ],
)
def test_where_a_chain_ends(hub, card, message):
    hub.refusals["maker/gated"] = 403, "GatedRepo"
    write_copy(hub.root / "some" / "tuned", f"---\nbase_model: {card}\n---\n" if card else "")
    write_copy(hub.root / "some" / "4bit", CARD.format("some/tuned"))
    with pytest.raises(ValueError, match=message) as error:
        mlx_eagle.open_drafter("mtp", QWEN.target, target="some/4bit")
    assert "\n" not in str(error.value)


BESIDE = 400_000
SHARD = (
    "some/target/resolve/0123456789abcdef0123456789abcdef01234567/model-00003-of-00003.safetensors"
)


def num_bytes(part: Published) -> int:
    return sum(array.nbytes for array in part.tensors.values())


@pytest.fixture
def mixed(hub) -> Hub:
    """Of a shard with other tensors a smaller part is wanted."""
    write_checkpoint(hub.root / "some" / "target", QWEN, beside=BESIDE)
    return hub


def test_only_the_bytes_of_the_layers_are_fetched(mixed, monkeypatch):
    """Beside the beginning of the shard, which has the header."""
    monkeypatch.setattr(target_parts, "PART_BYTES", 10_000)
    check_layers(mlx_eagle.open_drafter("mtp", QWEN.target, target="some/target"), QWEN)
    size = (mixed.root / "some" / "target" / "model-00003-of-00003.safetensors").stat().st_size
    assert mixed.sent[SHARD] == HEADER_BYTES + num_bytes(QWEN) < size / 2
    weights = [path for path in mixed.sent if path.endswith(".safetensors")]
    assert weights == [SHARD]
    # What was fetched is there without the hub.
    mixed.shutdown()
    mixed.server_close()
    check_layers(mlx_eagle.open_drafter("mtp", QWEN.target, target="some/target"), QWEN)


def test_a_broken_connection_goes_on_where_it_broke(mixed, monkeypatch):
    monkeypatch.setattr(target_parts, "PART_BYTES", 10_000)
    mixed.breaks_after = HEADER_BYTES + 35_000
    with pytest.raises(ValueError, match="the hub could not be reached for some/target") as error:
        mlx_eagle.open_drafter("mtp", QWEN.target, target="some/target")
    assert "\n" not in str(error.value)
    mixed.breaks_after = None
    check_layers(mlx_eagle.open_drafter("mtp", QWEN.target, target="some/target"), QWEN)
    again = mixed.sent[SHARD] - HEADER_BYTES - num_bytes(QWEN)
    assert 0 < again < 10_000  # the piece that was cut


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, "GatedRepo", "some/target asks for its terms to be accepted: do so on its hub page"),
        (403, "GatedRepo", "some/target asks for its terms to be accepted: do so on its hub page"),
        (401, "RepoNotFound", "some/target is neither a folder here nor a repository on the hub"),
        (403, "", r"the hub does not let you read some/target \(403\): ask for access"),
        (500, "", "the hub could not be reached for some/target"),
    ],
)
@pytest.mark.parametrize("is_begun", [False, True], ids=["at once", "at the weights"])
def test_refusals_of_the_hub(mixed, status, code, message, is_begun):
    if is_begun:
        target_parts.fetch("some/target", ("*.json",))
    mixed.refusals["some/target"] = status, code
    with pytest.raises(ValueError, match=message) as error:
        mlx_eagle.open_drafter("mtp", QWEN.target, target="some/target")
    assert "\n" not in str(error.value)


def test_offline(mixed, monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(
            ValueError, match="could not be reached for some/target, and it is not"
        ):
            mlx_eagle.open_drafter("mtp", QWEN.target, target="some/target")
    assert not mixed.requests


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no/such", "no/such is neither a folder here nor a repository on the hub"),
        ("not a name", "not a name does not exist, and it is not a repository id either"),
        (None, "nobody says where that is: give its folder or repository as `target`"),
    ],
)
def test_places_that_are_none(hub, target, message):
    with pytest.raises(ValueError, match=message) as error:
        mlx_eagle.open_drafter("mtp", QWEN.target, target=target)
    assert "\n" not in str(error.value)


def test_a_missing_shard(hub, tmp_path):
    folder = write_checkpoint(hub.root / "some" / "target", QWEN)
    (folder / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has model-00003-of-00003.safetensors in its index"):
        mlx_eagle.open_drafter("mtp", QWEN.target, target="some/target")
    folder.rename(tmp_path / "here")
    with pytest.raises(ValueError, match=r"in its index, but the file is missing: fetch it again"):
        mlx_eagle.open_drafter("mtp", QWEN.target, target=tmp_path / "here")
