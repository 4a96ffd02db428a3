"""Freeze the logits of tiny random EAGLE-3 heads in the PyPI package ``speculators``.

    pip install torch speculators==0.9.0
    python tools/golden/make_speculators.py [VARIANT ...]

Writes, for each variant, ``speculators-VARIANT/``, among the golden heads of the tests:
``config.json`` and ``model.safetensors`` as the library's own ``save_pretrained`` leaves them
(bfloat16), and ``expected.safetensors``, computed by the library from the same weights in
float32:

    tokens   (T,)            token t follows position t, whose features are row t
    features (T, 3h)
    logits   (1 + 4, T, Vd)  logits[0] of the extend pass over all T slots; logits[i][t] of the
                             i-th draft step after the prefix of slots 0..t, its token being
                             tokens[t + i] (0 past the end), its state the one fed back

The library's unrolled training forward computes all prefixes at once. It lets step i of slot t see
the true-feature slots that slot t saw. With a sliding window, that is one window for the whole
chain; with a cache, the window would move along.
"""

import torch
from common import (
    GOLDEN,
    LAYER,
    NUM_STEPS,
    chosen,
    freeze,
    random_inputs,
    random_vocabulary,
    randomize,
    stub,
)

# Imported by the library when it starts, and not used here.
stub("datasets", "hs_connectors", "httpx", "loguru", "openai", "psutil", "torchaudio")

from speculators import SpeculatorsConfig, VerifierConfig  # noqa: E402
from speculators.models.eagle3 import Eagle3SpeculatorConfig  # noqa: E402
from speculators.models.eagle3.core import Eagle3DraftModel  # noqa: E402
from speculators.models.eagle3.rotary_partial import install_partial_neox_rotary  # noqa: E402
from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: E402
from transformers import LlamaConfig, Qwen3Config  # noqa: E402

# Fewer and longer heads, so that scaled frequencies differ; a short original length, so that
# ten positions reach both ends of the blend.
LONG_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 4}
MIXED = {
    **SLIDING,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"],
}


def theta(base: float) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base}}


# variant: (layer config class, changes to LAYER, changes to the speculator's config)
VARIANTS = {
    "default": (
        LlamaConfig,
        {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16},
        {},
    ),
    "norm-before-residual": (LlamaConfig, {}, {"norm_before_residual": True}),
    "norm-before-fc": (LlamaConfig, {}, {"norm_before_fc": True}),
    "eagle31": (LlamaConfig, {}, {"fc_norm": True, "norm_output": True}),
    "all-norms": (
        LlamaConfig,
        {},
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    ),
    "two-layers": (LlamaConfig, {"num_hidden_layers": 2}, {"norm_before_residual": True}),
    "qwen3": (Qwen3Config, theta(1e6), {}),
    "attention-bias": (
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, **theta(5e5)},
        {},
    ),
    "sliding-window": (Qwen3Config, {**SLIDING, "layer_types": ["sliding_attention"]}, {}),
    "mixed-windows": (Qwen3Config, MIXED, {}),
    "llama3-rope": (LlamaConfig, {**LONG_HEADS, "rope_parameters": LLAMA3}, {}),
    "yarn-rope": (LlamaConfig, {**LONG_HEADS, "rope_parameters": YARN}, {}),
    "partial-rope": (
        LlamaConfig,
        {
            **LONG_HEADS,
            # Of type linear, because transformers heeds the partial factor only with scaling.
            "rope_parameters": {
                "rope_type": "linear",
                "rope_theta": 10000.0,
                "factor": 2.0,
                "partial_rotary_factor": 0.5,
            },
        },
        {},
    ),
    "wide-heads": (LlamaConfig, {"head_dim": 16}, {}),  # heads x head_dim = 64, hidden 32
    "full-vocabulary": (LlamaConfig, {}, {"draft_vocab_size": 128}),
}


def make_config(config_class: type, algorithm: str, num_tokens: int, variant: tuple, **values):
    """Make the speculator's config of a variant; ``values`` hold where the variant has none."""
    layer_class, layer, flags = variant
    layer_config = layer_class(**{**LAYER, **layer})
    layer_config._attn_implementation = "eager"
    return config_class(
        transformer_layer_config=layer_config,
        speculators_config=SpeculatorsConfig(
            algorithm=algorithm,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=num_tokens)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **{"eagle_aux_hidden_state_layer_ids": [2, 6, 9], "draft_vocab_size": 48} | values | flags,
    )


def with_vocabulary(model: torch.nn.Module) -> torch.nn.Module:
    """Give a model random weights, and a random draft vocabulary if it has one."""
    if model.use_draft_vocab:
        model.load_vocab_mappings(
            *random_vocabulary(model.verifier_vocab_size, model.draft_vocab_size)
        )
    return randomize(model)


def run(
    model: torch.nn.Module, tokens: torch.Tensor, features: torch.Tensor, **options
) -> list[torch.Tensor]:
    """Run the library's forward on tokens (T,) and features (T, F); return all logits (n, Vd)."""
    found = []
    hook = model.lm_head.register_forward_hook(lambda *call: found.append(call[-1][0]))
    model(
        hidden_states=features[None],
        input_ids=tokens[None],
        document_ids=torch.zeros(1, len(tokens), dtype=torch.long),
        **options,
    )
    hook.remove()
    return found


@torch.no_grad()
def expect(model: Eagle3DraftModel) -> dict[str, torch.Tensor]:
    layer = model.config.transformer_layer_config
    tokens, features = random_inputs(layer.vocab_size, layer.hidden_size)
    logits = run(model, tokens, features, ttt_steps=NUM_STEPS)
    return {"tokens": tokens, "features": features, "logits": torch.stack(logits)}


def main() -> None:
    install_partial_neox_rotary()  # the library's own patch; full rotation is untouched
    torch.set_num_threads(1)
    for seed, variant in chosen(VARIANTS):
        torch.manual_seed(seed)
        config = make_config(Eagle3SpeculatorConfig, "eagle3", 3, VARIANTS[variant])
        model = with_vocabulary(Eagle3DraftModel(config))
        folder = GOLDEN / f"speculators-{variant}"
        freeze(model, folder, expect(model), "speculators", variant, seed)


if __name__ == "__main__":
    main()
