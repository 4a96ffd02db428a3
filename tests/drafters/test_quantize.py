"""Drafters that are opened as published: what they are quantized to, by target and machine."""

from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from assistants import golden_folder, golden_target
from block_twin import DFLASH2, published, tiny_dflash2
from checkpoints import CONFIG, as_midlayer, eagle3_tensors, write_config, write_safetensors
from documents import ROOT
from golden import frozen
from helpers import PROMPT, plain, speculative, tiny_llama
from mlx.utils import tree_flatten
from mtp_checkpoints import FAMILIES, write_checkpoint
from test_assistant import LEARNED

import mlx_eagle
from mlx_eagle import draft_models
from mlx_eagle.commands.flags import quantized_bits
from mlx_eagle.convert import convert
from mlx_eagle.drafters import quantize
from mlx_eagle.drafters.kind import LoadOptions
from mlx_eagle.drafters.kinds import load_drafter
from mlx_eagle.drafters.mtp import load_mtp
from mlx_eagle.drafters.quantize import Quantization, packing_words, usual_quantization
from mlx_eagle.system.device import Machine

MAC = Machine("Apple M4", "metal", "M4")
CPU = Machine("some CPU", "cpu", "unknown")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A Mac as the machine, and a cache of its own."""
    monkeypatch.setattr(quantize, "this_machine", lambda: MAC)
    monkeypatch.setattr(draft_models, "user_cache", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "heads"


def packed_target(bits: int | None, **sizes) -> nn.Module:
    model = tiny_llama(**sizes)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    return model


@pytest.mark.parametrize(
    "bits, machine, expected",
    [
        (4, MAC, Quantization()),
        (3, MAC, Quantization()),
        (5, MAC, Quantization(8)),
        (8, MAC, Quantization(8)),
        (None, MAC, None),
        (4, CPU, None),
        (4, Machine("H100", "cuda", "sm_90"), Quantization()),
    ],
)
def test_the_rule(bits, machine, expected):
    assert usual_quantization(packed_target(bits), machine) == expected


def test_most_of_the_targets_weights_count():
    """Embedding and output in 8 bits, the rest in 4, as some are published."""
    model = tiny_llama(num_hidden_layers=6)
    eight = {"group_size": 32, "bits": 8}
    four = eight | {"bits": 4}
    nn.quantize(
        model, class_predicate=lambda path, layer: hasattr(layer, "to_quantized")
        and (four if "layers" in path else eight)
    )  # fmt: skip
    assert usual_quantization(model) == Quantization()


@pytest.fixture
def mtp(tmp_path):
    """A target in 4 bits and a folder of its checkpoint, with layers that choose experts."""
    part = FAMILIES["qwen3.5 moe, tied"]()
    folder = write_checkpoint(tmp_path / "target", part)
    return part.target, str(folder)


def bits_by_path(head: nn.Module) -> dict[str, int]:
    return {path: m.bits for path, m in head.named_modules() if "scales" in m}


def test_layers_of_the_targets_own(mtp):
    target, folder = mtp
    dense = mlx_eagle.open_drafter("mtp", target, target=folder)
    assert bits_by_path(dense.head) == {}
    nn.quantize(target, group_size=32, bits=4)
    found = bits_by_path(mlx_eagle.open_drafter("mtp", target, target=folder).head)
    assert found.pop("fc") in (5, 6) and set(found.values()) == {4}
    assert not any(path.endswith("mlp.gate") for path in found)
    kept = mlx_eagle.open_drafter("mtp", target, target=folder, quantize_bits=0)
    assert bits_by_path(kept.head) == {}
    three = mlx_eagle.open_drafter("mtp", target, target=folder, quantize_bits=3)
    assert set(bits_by_path(three.head).values()) == {3}
    drafter = mlx_eagle.open_drafter("mtp", target, target=folder)
    text, _ = speculative(target, drafter, PROMPT, 20, num_draft_tokens=2)
    assert text == plain(target, PROMPT, 20)


def opened(target: nn.Module, source: Path, cache: Path, **options) -> tuple[str, nn.Module]:
    """The name of the folder that a checkpoint is converted into, and the head."""
    before = set(cache.glob("*"))
    head = mlx_eagle.open_drafter(str(source), target, **options).head
    (made,) = set(cache.glob("*")) - before
    return made.name.split("-")[-2], head


def test_heads_that_are_converted_when_they_are_opened(tmp_path, cache):
    source = write_safetensors(tmp_path / "source", CONFIG, as_midlayer(eagle3_tensors()))
    sizes = {"vocab_size": 128, "num_hidden_layers": 6}
    name, head = opened(tiny_llama(**sizes), source, cache)
    assert name == "dense" and bits_by_path(head) == {}
    name, head = opened(packed_target(4, **sizes), source, cache)
    assert name == "mixed" and {4, 6} <= set(bits_by_path(head).values())
    name, head = opened(packed_target(8, **sizes), source, cache)
    assert name == "8bit" and set(bits_by_path(head).values()) == {8}
    mlx_eagle.open_drafter(str(source), packed_target(8, **sizes), quantize_bits=0)
    assert len(list(cache.iterdir())) == 3  # it is the dense one
    said = "\n".join(draft_models.head_lines())
    assert "not quantized" in said and "quantized to 8 bits" in said


@pytest.mark.parametrize("bits", [None, 8])
def test_what_mlx_has_packed_stays_so(tmp_path, cache, bits):
    source = published(tmp_path / "source", tiny_dflash2(tiny_llama(num_hidden_layers=6)), DFLASH2)
    weights = dict(mx.load(str(source / "model.safetensors")))
    name = "layers.0.self_attn.o_proj.weight"
    parts = mx.quantize(weights[name], 32, 4)
    path = name.removesuffix(".weight")
    weights |= zip((name, f"{path}.scales", f"{path}.biases"), parts, strict=True)
    mx.save_safetensors(str(source / "model.safetensors"), weights)
    config = DFLASH2 | {"quantization": {"group_size": 32, "bits": 4}}
    write_config(source, config)
    target = packed_target(bits, num_hidden_layers=6)
    _, head = opened(target, source, cache)
    layer = head.layers[0].self_attn.o_proj
    assert layer.bits == 4 and mx.array_equal(layer.weight, parts[0])


def test_a_wider_dtype_beside_a_packed_target_in_float16(tmp_path, cache):
    source = published(tmp_path / "source", tiny_dflash2(tiny_llama(num_hidden_layers=6)), DFLASH2)
    target = tiny_llama(num_hidden_layers=6)
    target.set_dtype(mx.float16)
    nn.quantize(target, group_size=32, bits=4)
    drafter = mlx_eagle.open_drafter(str(source), target)
    floats = {
        array.dtype
        for _, array in tree_flatten(drafter.head.parameters())
        if mx.issubdtype(array.dtype, mx.floating)
    }
    assert bits_by_path(drafter.head) and floats == {mx.bfloat16}
    _, stats = speculative(target, drafter, PROMPT, 12, num_draft_tokens=4)
    assert stats.num_drafted > 0


def acceptance(target: nn.Module, drafter, prompt: list[int]) -> float:
    _, stats = speculative(target, drafter, prompt, 45, num_draft_tokens=3)
    return stats.acceptance_rate


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark", "eagle3", "assistant", "mtp"])
@pytest.mark.parametrize("bits", [4, 8])
def test_acceptance_is_that_of_the_unquantized(tmp_path, kind, bits):
    """Heads that know a text by heart: within two points, when they are quantized like this."""
    if kind == "mtp":
        path = ROOT / "tests" / "support" / "golden" / "mtp-by-heart.safetensors"
        target = FAMILIES["qwen3.5"]().target
        weights = mx.load(str(path))
        dense = load_mtp(weights, target, LoadOptions(0))
        now = usual_quantization(packed_target(bits))
        packed = load_mtp(weights, target, LoadOptions(0))
        quantize.quantize_now(packed.head, None, now, kept="mlp.gate")
    else:
        target = tiny_llama(num_hidden_layers=6)
        source = str(Path(frozen.FOLDER) / f"learned-{kind}")
        if kind == "assistant":
            target = golden_target("learned")
            source = str(golden_folder("learned"))
        convert(source, str(tmp_path / "dense"), quantize=False)
        q_bits = usual_quantization(packed_target(bits)).bits
        convert(source, str(tmp_path / "packed"), q_bits=q_bits)
        dense, packed = (load_drafter(tmp_path / name, target) for name in ("dense", "packed"))
    assert packing_words([packed.head]).startswith("quantized to")
    assert packing_words([dense.head]) == "not quantized"
    prompt = LEARNED[0] if kind == "assistant" else PROMPT
    assert acceptance(target, packed, prompt) >= acceptance(target, dense, prompt) - 0.02


def test_the_flag():
    assert quantized_bits("none") == 0 and quantized_bits("8") == 8
    for text in ("0", "7", "four"):
        with pytest.raises(Exception, match=r"give 2, 3, 4, 5, 6, 8 or none|whole number"):
            quantized_bits(text)


def test_options():
    model = SimpleNamespace()
    assert LoadOptions().quantization() is None and LoadOptions(0).quantization(model) is None
    assert LoadOptions(4, 32).quantization() == Quantization(4, 32)
