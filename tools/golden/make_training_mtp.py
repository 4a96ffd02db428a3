"""Freeze losses and gradients of tiny MTP layers in the PyPI package ``speculators``.

    pip install torch speculators==0.9.0
    python tools/golden/make_training_mtp.py [VARIANT ...]

Writes ``training-VARIANT/``; see ``lessons.py``. No target is run: ``states`` (B, T, h), which are
its own behind the last norm, are random, as are its tables, ``embed_tokens`` and ``lm_head``
(V, h). Three steps are trained, each of which attends to its own, with cross-entropy of the
text's tokens.
"""

import torch
from common import chosen, randomize, stub
from lessons import DRAFTER, freeze_lesson, random_texts

# Imported by the library when it starts, and not used here.
stub("datasets", "hs_connectors", "httpx", "loguru", "openai", "psutil", "torchaudio")

from speculators import SpeculatorsConfig, VerifierConfig  # noqa: E402
from speculators.models.mtp.config import MTPSpeculatorConfig  # noqa: E402
from speculators.models.mtp.core import MTPDraftModel, compute_step_weights  # noqa: E402
from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: E402
from transformers import Qwen3_5TextConfig, Qwen3Config  # noqa: E402

STEPS = 3
DECAY = 0.6
ROPE = {"rope_type": "default", "rope_theta": 100.0}
GATED = {
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
}
# variant: (layer config class, changes to DRAFTER, whether norms hold their weight less one)
VARIANTS = {
    "mtp": (Qwen3Config, {}, False),
    "mtp-gated": (Qwen3_5TextConfig, GATED, True),
}


def make_model(name: str) -> MTPDraftModel:
    """Make random layers of a variant, with random tables."""
    make_config, changes, less_one = VARIANTS[name]
    layer = make_config(**{**DRAFTER, **changes})
    layer._attn_implementation = "eager"
    config = MTPSpeculatorConfig(
        transformer_layer_config=layer,
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = MTPDraftModel(config)
    del model.verifier_lm_head
    randomize(model)
    for parameter, weight in model.named_parameters():
        if less_one and weight.dim() == 1 and "norm" in parameter:
            weight.data -= 1
    return model


def main() -> None:
    torch.set_num_threads(1)
    for seed, name in chosen(VARIANTS):
        torch.manual_seed(700 + seed)
        tokens, counts = random_texts()
        model = make_model(name)
        states = torch.randn(*tokens.shape, DRAFTER["hidden_size"]).bfloat16().float()
        is_answer = torch.cat([torch.zeros(len(tokens), 1), counts[:, :-1]], dim=1)
        behind = (0, STEPS + 1)  # slots without which the library leaves out the last ones
        given = {
            "input_ids": torch.nn.functional.pad(tokens, behind),
            "hidden_states": torch.nn.functional.pad(states, (0, 0, *behind)),
            "loss_mask": torch.nn.functional.pad(is_answer, behind),
            "step_weights": compute_step_weights(DECAY, STEPS),
        }
        more = {"tokens": tokens, "counts": counts, "states": states}
        tables = {key: getattr(model, key).weight for key in ("embed_tokens", "lm_head")}
        more |= {key: table.detach().bfloat16() for key, table in tables.items()}
        freeze_lesson(name, 700 + seed, model, lambda: model(**given)[1], more)  # noqa: B023


if __name__ == "__main__":
    main()
