"""Caches on disk belong to one model: another one never gets them, however alike it is."""

import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers import tiny_llama
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load
from serving import ENDLESS, ours

from mlx_eagle.server.cache_files import CacheFolder
from mlx_eagle.server.identity import module_digest


def reversed_rows(model: nn.Module) -> None:
    inner = model.model.layers[0].mlp.up_proj
    inner.weight = inner.weight[::-1]


def swapped_layers(model: nn.Module) -> None:
    model.model.layers[:2] = model.model.layers[1::-1]


def other_eps(model: nn.Module) -> None:
    model.model.norm.eps = 0.1


def other_rope(model: nn.Module) -> None:
    model.model.layers[1].self_attn.rope.base = 77.0


def other_frequencies(model: nn.Module) -> None:
    model.model.layers[1].self_attn.rope._freqs = mx.arange(16.0)


def last_bit(model: nn.Module) -> None:
    weight = model.model.embed_tokens.weight
    bits = weight.reshape(-1).view(mx.uint32)
    bits[-1] = bits[-1] ^ 1
    model.model.embed_tokens.weight = bits.view(weight.dtype).reshape(weight.shape)


def two_swapped(model: nn.Module) -> None:
    weight = model.model.layers[1].mlp.down_proj.weight
    weight[3], weight[7] = mx.array(weight[7]), mx.array(weight[3])


@pytest.mark.parametrize(
    "change",
    [reversed_rows, swapped_layers, other_eps, other_rope, other_frequencies, last_bit,
     two_swapped],
)  # fmt: skip
def test_a_model_that_differs_anywhere_has_another_digest(change):
    one, same, other = tiny_llama(), tiny_llama(), tiny_llama()
    change(other)
    assert module_digest(one) == module_digest(same) != module_digest(other)


def test_an_array_of_several_pieces_and_of_odd_bytes(monkeypatch):
    monkeypatch.setattr("mlx_eagle.server.identity.PIECE", 100)
    for kind, size in ((mx.uint8, 1001), (mx.bfloat16, 333), (mx.float32, 1000)):
        module = nn.Module()
        seen = set()
        for order in (slice(None), slice(None, None, -1)):
            module.weight = mx.arange(size).astype(kind)[order]
            seen.add(module_digest(module))
        assert len(seen) == 2


def test_a_folder_gives_nothing_to_a_pair_that_is_not_known(tmp_path):
    path = tmp_path / f"{'0' * 32}-{'0' * 8}.safetensors"
    metadata = {"tokens": "AAAAAA==", "cache_type": "user", "is_trimmable": "True"}
    metadata |= {"num_target": "0", "is_whole": "True"}
    mx.save_safetensors(str(path), {}, metadata)
    folder = CacheFolder(tmp_path)
    assert folder.files() == {}
    ours_now = CacheFolder(tmp_path)
    ours_now.pair = {"cache_type": "user"}
    assert list(ours_now.files()) == [path]


def write_adapter(folder, target: str, scale: float):
    """The same matrices whatever the scale."""
    settings = {"rank": 4, "scale": scale, "dropout": 0.0}
    folder.mkdir()
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    model, _ = load(target)
    model.freeze()
    linear_to_lora_layers(model, 2, settings)
    mx.random.seed(3)
    trained = {k: mx.random.normal(v.shape) for k, v in tree_flatten(model.trainable_parameters())}
    mx.save_safetensors(str(folder / "adapters.safetensors"), trained)
    return folder


def test_adapters_that_differ_in_their_scale_share_no_caches(pair, tmp_path):
    flags = ("--model", pair["target"], "--num-draft-tokens", "0", "--prompt-cache-dir")
    flags = (*flags, tmp_path / "caches", "--adapter-path")
    texts, cached = [], []
    for name, scale in (("half", 0.5), ("three", 3.0), ("again", 3.0)):
        folder = write_adapter(tmp_path / name, pair["target"], scale)
        with ours(*flags, folder) as asked:
            found = asked.complete(prompt="Once upon a time " * 5, logit_bias=ENDLESS)
            texts.append(found.choices[0].text)
            cached.append(found.usage.prompt_tokens_details.cached_tokens)
    assert cached[:2] == [0, 0] and cached[2] > 0
    assert texts[0] != texts[1] == texts[2]
