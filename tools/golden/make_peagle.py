"""Freeze the logits of tiny random P-EAGLE heads in the PyPI package ``speculators``.

    pip install torch speculators==0.9.0
    python tools/golden/make_peagle.py [VARIANT ...]

Writes ``peagle-VARIANT/``, among the golden heads of the tests with the same three files as
``make_speculators.py``. The library trains on a random part of all drafts; here it computes all
that fit in T slots:

    logits   (K, T, Vd)      logits[i][t] of the i-th token drafted after the prefix of slots
                             0..t, all of one forward pass; zeros where t + i >= T
"""

import torch
from common import GOLDEN, NUM_SLOTS, chosen, freeze
from make_speculators import MIXED, make_config, run, with_vocabulary
from speculators.models.peagle import core
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.models.peagle.core import PEagleDraftModel
from transformers import LlamaConfig, Qwen3Config

DEPTHS = 5
TWO = {"num_hidden_layers": 2}

# variant: (layer config class, changes to LAYER, changes to the speculator's config)
VARIANTS = {
    "llama": (LlamaConfig, TWO, {}),
    "five-features": (
        Qwen3Config,
        {"num_hidden_layers": 3},
        {
            "eagle_aux_hidden_state_layer_ids": [2, 4, 6, 8, 9],
            "norm_before_residual": True,
            "norm_before_fc": True,
        },
    ),
    "eagle31": (LlamaConfig, TWO, {"fc_norm": True, "norm_output": True}),
    "mixed-windows": (Qwen3Config, MIXED, {}),
}


def every_draft(**_: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return anchor and depth of every draft, in place of the library's random choice."""
    anchors = [torch.arange(NUM_SLOTS - depth) for depth in range(DEPTHS)]
    depths = [torch.full((len(a),), depth) for depth, a in enumerate(anchors)]
    return torch.cat(anchors), torch.cat(depths)


core.generate_cod_sample_indices = every_draft
core.compute_metrics = lambda **_: (None, None)  # losses, which are not needed


@torch.no_grad()
def expect(model: PEagleDraftModel) -> dict[str, torch.Tensor]:
    layer = model.config.transformer_layer_config
    num_aux = len(model.config.eagle_aux_hidden_state_layer_ids)
    tokens = torch.randint(0, layer.vocab_size, (NUM_SLOTS,))
    scales = torch.linspace(0.5, 4, num_aux)[None, :, None]
    features = (torch.randn(NUM_SLOTS, num_aux, layer.hidden_size) * scales).flatten(1)
    states = torch.zeros(1, NUM_SLOTS, layer.hidden_size)
    logits = torch.zeros(DEPTHS, NUM_SLOTS, model.draft_vocab_size)
    anchors, depths = every_draft()
    found = run(model, tokens, features, verifier_last_hidden_states=states)
    logits[depths, anchors] = found[0]
    return {"tokens": tokens, "features": features, "logits": logits}


def main() -> None:
    torch.set_num_threads(1)
    for seed, variant in chosen(VARIANTS):
        torch.manual_seed(200 + seed)
        config = make_config(
            PEagleSpeculatorConfig, "peagle", DEPTHS, VARIANTS[variant], mask_token_id=97
        )
        model = with_vocabulary(PEagleDraftModel(config))
        folder = GOLDEN / f"peagle-{variant}"
        freeze(model, folder, expect(model), "speculators", variant, 200 + seed)


if __name__ == "__main__":
    main()
