"""Latent attention as it is stored, packed or not; its logits are in test_convert_logits.py."""

import mlx.core as mx
import numpy as np
from golden.frozen import relative
from mlx_lm.models.cache import KVCache

from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.head_weights import build_head
from mlx_eagle.drafters.kind import LoadOptions

H, RANK, QUERY, NOPE, ROPE, VALUE, HEADS = 64, 64, 32, 12, 8, 32, 2
CONFIG = Eagle3Config(
    hidden_size=H,
    target_hidden_size=H,
    num_layers=1,
    num_heads=HEADS,
    num_kv_heads=HEADS,
    head_dim=NOPE + ROPE,
    intermediate_size=96,
    vocab_size=128,
    draft_vocab_size=48,
    rope={"type": "default", "theta": 10000.0, "dims": ROPE, "traditional": True},
    latent={
        "q_lora_rank": QUERY,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
    },
)
SHAPES = {
    "fc": (H, 3 * H),
    "lm_head": (48, H),
    "layers.0.self_attn.q_a_proj": (QUERY, 2 * H),
    "layers.0.self_attn.q_b_proj": (HEADS * (NOPE + ROPE), QUERY),
    "layers.0.self_attn.kv_a_proj_with_mqa": (RANK + ROPE, 2 * H),
    "layers.0.self_attn.kv_b_proj": (HEADS * (NOPE + VALUE), RANK),
    "layers.0.self_attn.o_proj": (H, HEADS * VALUE),
    "layers.0.mlp.gate_proj": (96, H),
    "layers.0.mlp.up_proj": (96, H),
    "layers.0.mlp.down_proj": (H, 96),
}
NORMS = {
    "norm": H,
    "layers.0.input_layernorm": H,
    "layers.0.hidden_norm": H,
    "layers.0.post_attention_layernorm": H,
    "layers.0.self_attn.q_a_layernorm": QUERY,
    "layers.0.self_attn.kv_a_layernorm": RANK,
}


def test_packed_equals_dequantized():
    mx.random.seed(3)
    norms = {f"{name}.weight": 1 + 0.2 * mx.random.normal((n,)) for name, n in NORMS.items()}
    packed, dense = dict(norms), dict(norms)
    for name, shape in SHAPES.items():
        parts = mx.quantize(mx.random.normal(shape) / shape[1] ** 0.5, group_size=32, bits=4)
        for kind, part in zip(("weight", "scales", "biases"), parts, strict=True):
            packed[f"{name}.{kind}"] = part
        dense[f"{name}.weight"] = mx.dequantize(*parts, group_size=32, bits=4)
    features, embeddings = mx.random.normal((7, 3 * H)), mx.random.normal((7, H))

    def run(weights: dict, quantization: dict | None) -> np.ndarray:
        head = build_head(CONFIG, dict(weights), quantization, LoadOptions(), mx.float32)
        cache = [KVCache()]
        states = [head(embeddings[:5], head.fuse(features[:5]), cache)]
        states += [head(embeddings[i : i + 1], states[-1][-1:], cache) for i in (5, 6)]
        assert cache[0].offset == 7
        assert cache[0].keys.shape[-1] == RANK and cache[0].values.shape[-1] == ROPE
        return np.array(head.logits(mx.concatenate(states)))

    found = run(packed, {"group_size": 32, "bits": 4})
    assert relative(found, run(dense, None)) < 1e-4
