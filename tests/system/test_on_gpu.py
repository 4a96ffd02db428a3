"""What the tables and emulations of a GPU say, held to a real one."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import CROWDED, FUSED, PROMPT, plain, speculative, tiny_head, tiny_llama
from metal_rules import MATRIX_FROM, width_class
from mlx_lm.models.cache import make_prompt_cache
from tolerances import tolerance

from mlx_eagle.decoding import generate_step
from mlx_eagle.decoding.decoder import Decoder
from mlx_eagle.drafters.quantize import pack
from mlx_eagle.drafters.tree import parse_tree
from mlx_eagle.target_model.probe import check_trees


def packed(inputs: int, outputs: int, dtype: mx.Dtype) -> list[mx.array]:
    return list(mx.quantize(mx.random.normal((outputs, inputs)).astype(dtype), 64, 4))


@pytest.mark.on_gpu("metal", "kernels change with the number of rows")
@pytest.mark.parametrize("width", [1024, 4096, 8192])
def test_products_change_at_the_rows_that_the_table_says(width):
    """Weights are rounded to bfloat16 from there on, which shows in a row's result."""
    weights, x = packed(width, width, mx.bfloat16), mx.random.normal((40, width), mx.bfloat16)
    exact = mx.dequantize(*(w if w.dtype == mx.uint32 else w.astype(mx.float32) for w in weights))

    def error(num_rows: int) -> float:
        found = mx.quantized_matmul(x[:num_rows], *weights, group_size=64, bits=4)[:2]
        wanted = x[:2].astype(mx.float32) @ exact.T
        return mx.abs(found.astype(mx.float32) - wanted).mean().item()

    machine = str(mx.device_info()["architecture"])[-4:]
    limit = MATRIX_FROM[machine][width_class(width)]
    below, above = error(limit - 1), error(limit)
    assert above > 1.02 * below, f"no other kernel from {limit} rows on: {below:.3g}, {above:.3g}"


@pytest.mark.on_gpu("metal", "the GPU rounds ties away from zero when it quantizes")
def test_heads_are_quantized_on_the_cpu():
    weights = (mx.random.randint(-64, 64, (64, 256)) / 8).astype(mx.float16)
    ours = pack("a.weight", weights, 4, 64)["a.weight"]
    there, _, _ = mx.quantize(weights, 64, 4, stream=mx.cpu)
    assert np.array_equal(np.array(ours), np.array(there))
    assert not mx.array_equal(ours, mx.quantize(weights, 64, 4)[0]).item()


@pytest.mark.on_gpu("metal", "attention in parts takes another kernel")
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_all_ways_of_a_round_are_tried(dtype, monkeypatch):
    monkeypatch.setattr(generate_step, "LONG_PREFILL", 0.0)
    used, use = [], Decoder.use
    monkeypatch.setattr(Decoder, "use", lambda d, o: used.append(o) or use(d, o))
    model = tiny_llama(**CROWDED)
    model.set_dtype(dtype)
    drafter = tiny_head(model)
    drafter.head.set_dtype(dtype)
    tokens, _ = speculative(model, drafter, PROMPT, 200, num_draft_tokens="auto")
    assert len(tokens) == 200 and any(options.splits_attention for options in used)
    assert any(options.uses_overlay for options in used)
    assert any(options.forces_fused for options in used)


@pytest.mark.on_gpu("metal", "half precision takes the kernels that people run")
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [FUSED, CROWDED], ids=["fused", "crowded"])
def test_good_targets_are_not_refused_trees(sizes, dtype):
    model = tiny_llama(**sizes)
    model.set_dtype(dtype)
    check_trees(model, make_prompt_cache(model))


@pytest.mark.on_gpu("metal", "chains and trees in float32")
@pytest.mark.parametrize(
    "draft", [{"num_draft_tokens": 7}, {"tree": parse_tree("3x3:7")}], ids=["chain", "tree"]
)
def test_float32_is_token_identical(draft):
    model = tiny_llama(**CROWDED)
    assert tolerance() <= 1e-4, "run the tests with MLX_ENABLE_TF32=0: make test does"
    tokens, _ = speculative(model, tiny_head(model), PROMPT, 40, **draft)
    assert tokens == plain(model, PROMPT, 40)
