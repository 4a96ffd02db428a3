"""Configurations of real targets, as their ``config.json`` has them, and tiny models of them."""

from typing import Any

import mlx.nn as nn
from mlx_lm.utils import _get_classes

FOUR_BITS = {"group_size": 64, "bits": 4}
EIGHT_BITS = {"group_size": 64, "bits": 8}

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "quantization": FOUR_BITS,
}
VICUNA_13B = {
    "model_type": "llama",
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "intermediate_size": 13824,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "quantization": FOUR_BITS,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
    "quantization": FOUR_BITS,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 201088,
    # The experts as published, the rest in 8 bits: MXFP4-Q8.
    "quantization": {
        "group_size": 32, "bits": 4, "mode": "mxfp4",
        "lm_head": EIGHT_BITS, "model.embed_tokens": EIGHT_BITS,
        **{f"model.layers.{i}.self_attn.{name}_proj": EIGHT_BITS for i in range(24)
           for name in "qkvo"},
    },
}  # fmt: skip
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
    "quantization": FOUR_BITS,
}
GEMMA3_12B = {
    "model_type": "gemma3",
    "vocab_size": 262208,
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "num_hidden_layers": 48,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
        "rms_norm_eps": 1e-6,
    },
    "quantization": FOUR_BITS,
}
_GEMMA4 = {
    "model_type": "gemma4_text",
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "use_double_wide_mlp": False,
}
GEMMA4_31B = {
    "model_type": "gemma4",
    "vocab_size": 262144,
    "text_config": _GEMMA4
    | {
        "hidden_size": 5376,
        "num_hidden_layers": 60,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    },
    "quantization": FOUR_BITS,
}
GEMMA4_26B_A4B = {
    "model_type": "gemma4",
    "vocab_size": 262144,
    "text_config": _GEMMA4
    | {
        "hidden_size": 2816,
        "num_hidden_layers": 30,
        "intermediate_size": 2112,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "quantization": FOUR_BITS,
}
QWEN35_27B = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_value_heads": 48,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    },
    "quantization": FOUR_BITS,
}

TINY = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64,
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "top_k_experts": 2,
}  # fmt: skip


def with_tiny_weights(config: dict[str, Any], **changes: int) -> nn.Module:
    """The layers and heads as published; all else is tiny, and what ``changes`` say of what is."""
    text = config.get("text_config", config)
    given = {name: size for name, size in {**TINY, **changes}.items() if name in text}
    text = {**text, **given, "vocab_size": 64}
    text.pop("quantization", None)
    config = {**config, "text_config": text, "vocab_size": 64} if "text_config" in config else text
    model_class, args_class = _get_classes(config)
    model: nn.Module = model_class(args_class.from_dict(config))
    return model
