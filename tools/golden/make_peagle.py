"""Freeze what the PyPI package ``speculators`` computes for tiny random P-EAGLE heads.

    pip install torch speculators==0.9.0
    python tools/golden/make_peagle.py [VARIANT ...]

Writes ``peagle-VARIANT/``, among the golden heads of the tests with the same three files as
``make_speculators.py``. The library trains on a random part of all drafts; here it is given all
that fit in T slots:

    logits   (K, T, Vd)      logits[i][t] of the i-th token drafted after the prefix of slots
                             0..t, all of one forward pass; zeros where t + i >= T
"""

import torch
from common import GOLDEN, NUM_SLOTS, chosen, freeze, random_vocabulary, randomize, stub

stub("datasets", "hs_connectors", "httpx", "loguru", "openai", "psutil", "torchaudio")

from speculators import SpeculatorsConfig, VerifierConfig  # noqa: E402
from speculators.models.peagle import core  # noqa: E402
from speculators.models.peagle.config import PEagleSpeculatorConfig  # noqa: E402
from speculators.models.peagle.core import PEagleDraftModel  # noqa: E402
from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: E402
from transformers import LlamaConfig, Qwen3Config  # noqa: E402

DEPTHS = 5
LAYER = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
WINDOW = {
    "num_hidden_layers": 2,
    "use_sliding_window": True,
    "sliding_window": 4,
    "layer_types": ["full_attention", "sliding_attention"],
}

# variant: (layer config class, changes to LAYER, changes to the speculator's config)
VARIANTS = {
    "llama": (LlamaConfig, {}, {}),
    "five-features": (
        Qwen3Config,
        {"num_hidden_layers": 3},
        {
            "eagle_aux_hidden_state_layer_ids": [2, 4, 6, 8, 9],
            "norm_before_residual": True,
            "norm_before_fc": True,
        },
    ),
    "eagle31": (LlamaConfig, {}, {"fc_norm": True, "norm_output": True}),
    "mixed-windows": (Qwen3Config, WINDOW, {}),
}


def make_config(variant: str) -> PEagleSpeculatorConfig:
    layer_class, layer, flags = VARIANTS[variant]
    layer_config = layer_class(**{**LAYER, **layer})
    layer_config._attn_implementation = "eager"
    values = {
        "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
        "draft_vocab_size": 48,
        "mask_token_id": 97,
    }
    return PEagleSpeculatorConfig(
        transformer_layer_config=layer_config,
        speculators_config=SpeculatorsConfig(
            algorithm="peagle",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTHS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **{**values, **flags},
    )


def every_draft(**_: object) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of the library's random choice: anchor and depth of every draft."""
    anchors = [torch.arange(NUM_SLOTS - depth) for depth in range(DEPTHS)]
    depths = [torch.full((len(a),), depth) for depth, a in enumerate(anchors)]
    return torch.cat(anchors), torch.cat(depths)


core.generate_cod_sample_indices = every_draft
core.compute_metrics = lambda **_: (None, None)  # of losses, which are not wanted


@torch.no_grad()
def expect(model: PEagleDraftModel) -> dict[str, torch.Tensor]:
    layer = model.config.transformer_layer_config
    num_aux = len(model.config.eagle_aux_hidden_state_layer_ids)
    tokens = torch.randint(0, layer.vocab_size, (NUM_SLOTS,))
    scales = torch.linspace(0.5, 4, num_aux)[None, :, None]
    features = (torch.randn(NUM_SLOTS, num_aux, layer.hidden_size) * scales).flatten(1)
    found = []
    hook = model.lm_head.register_forward_hook(lambda *call: found.append(call[-1][0]))
    model(
        hidden_states=features[None],
        input_ids=tokens[None],
        document_ids=torch.zeros(1, NUM_SLOTS, dtype=torch.long),
        verifier_last_hidden_states=torch.zeros(1, NUM_SLOTS, layer.hidden_size),
    )
    hook.remove()
    logits = torch.zeros(DEPTHS, NUM_SLOTS, model.draft_vocab_size)
    anchors, depths = every_draft()
    logits[depths, anchors] = found[0]
    return {"tokens": tokens, "features": features, "logits": logits}


def main() -> None:
    torch.set_num_threads(1)
    for seed, variant in chosen(VARIANTS):
        torch.manual_seed(200 + seed)
        model = PEagleDraftModel(make_config(variant))
        model.load_vocab_mappings(
            *random_vocabulary(model.verifier_vocab_size, model.draft_vocab_size)
        )
        randomize(model)
        folder = GOLDEN / f"peagle-{variant}"
        freeze(model, folder, expect(model), "speculators", variant, 200 + seed)


if __name__ == "__main__":
    main()
