"""Freeze losses and gradients of tiny drafters of blocks in the PyPI package ``speculators``.

    pip install torch speculators==0.9.0
    python tools/golden/make_training_speculators.py [VARIANT ...]

Writes ``training-VARIANT/``; see ``lessons.py``. Blocks stand behind ``anchors`` (B, N), -1: none,
which are random in the library.

The library packs texts into one row. Its rows are about the token in their own place, and those of
heads whose first slot drafts (``sample_from_anchor``) about the one after; it masks the rows of
both by the token in their own place. So that the mask is that of what is drafted, such heads get
it one slot earlier.
"""

import torch
from common import chosen, random_vocabulary, randomize, stub

# Imported by the library when it starts, and not used here.
stub("datasets", "hs_connectors", "httpx", "loguru", "openai", "psutil", "torchaudio")

from lessons import (  # noqa: E402
    ANCHORS,
    DRAFTER,
    LENGTHS,
    SIZES,
    TAPS,
    anchors_of_texts,
    freeze_lesson,
    frozen_target,
    packed,
    random_texts,
    target_states,
)
from speculators import SpeculatorsConfig, VerifierConfig  # noqa: E402
from speculators.losses import resolve_loss_config  # noqa: E402
from speculators.models.dflash import DFlashSpeculatorConfig, core  # noqa: E402
from speculators.models.dflash2 import DFlash2SpeculatorConfig  # noqa: E402
from speculators.models.dflash2.core import DFlash2DraftModel  # noqa: E402
from speculators.models.dspark import DSparkSpeculatorConfig  # noqa: E402
from speculators.models.dspark.core import DSparkDraftModel  # noqa: E402
from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: E402
from transformers import Qwen3Config  # noqa: E402

BLOCK = 5
LAYERS = {
    **DRAFTER,
    "layer_types": ["full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": 6,
}
DPACE = {"per_position_loss_weight": "dpace", "loss": "ce"}
DECAY = {"per_position_loss_weight": "fixed-exp-decay", "gamma": 3.0}
CLASSES = {
    "dflash": (core.DFlashDraftModel, DFlashSpeculatorConfig),
    "dflash2": (DFlash2DraftModel, DFlash2SpeculatorConfig),
    "dspark": (DSparkDraftModel, DSparkSpeculatorConfig),
}
TWO = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6}
# variant: (kind, changes to the config, what its forward takes)
VARIANTS = {
    "dflash": ("dflash", {}, DPACE),
    "dflash-narrow": (
        "dflash",
        {"draft_vocab_size": 40, "sample_from_anchor": True},
        {**DECAY, "loss": "ce"},
    ),
    "dflash2": ("dflash2", TWO, DPACE),
    "dspark-kl": (
        "dspark",
        {"markov_rank": 8, "markov_head_type": "gated"},
        {**DECAY, "loss": "kl_div"},
    ),
}


def make_model(name: str, target: torch.nn.Module) -> torch.nn.Module:
    """Make a random drafter of a variant, with the target's table, output and norm."""
    kind, changes, _ = VARIANTS[name]
    make, make_config = CLASSES[kind]
    layers = Qwen3Config(**LAYERS)
    layers._attn_implementation = "eager"
    is_first = changes.get("sample_from_anchor", kind == "dspark")
    config = make_config(
        transformer_layer_config=layers,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[
                GreedyTokenProposalConfig(speculative_tokens=BLOCK - (not is_first))
            ],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **{
            "draft_vocab_size": SIZES["vocab_size"],
            "block_size": BLOCK,
            "aux_hidden_state_layer_ids": list(TAPS),
            "mask_token_id": 95,
            **changes,
        },
    )
    model = randomize(make(config))
    rows = torch.arange(SIZES["vocab_size"])
    if model.use_draft_vocab:
        model.load_vocab_mappings(*random_vocabulary(SIZES["vocab_size"], config.draft_vocab_size))
        rows = model.t2d.nonzero()[:, 0]
    model.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight)
    model.verifier_norm.weight.data.copy_(target.model.norm.weight)
    for head in (model.lm_head, model.verifier_lm_head):
        head.weight.data.copy_(target.lm_head.weight[rows])
    return model


def inputs_of(model: torch.nn.Module, target: torch.nn.Module, texts: tuple) -> dict:
    """Return what the library's forward takes of texts, and fix its choice of anchors."""
    tokens, counts = texts
    features, _ = target_states(target, tokens)
    entering, _ = target_states(target, tokens, (4,))
    is_answer = torch.cat([torch.zeros(len(tokens), 1, dtype=torch.bool), counts[:, :-1]], dim=1)
    mask = counts if model.config.sample_from_anchor else is_answer
    starts = torch.tensor([0, *LENGTHS[:-1]]).cumsum(0)
    flat = [start + a for start, own in zip(starts, ANCHORS, strict=True) for a in own]
    anchors = torch.stack(flat)
    core.select_anchors = lambda *_: (anchors, torch.ones(len(anchors), dtype=torch.bool))
    numbers = torch.arange(len(tokens))[:, None].expand(tokens.shape)
    return {
        "hidden_states": packed(features, BLOCK),
        "verifier_last_hidden_states": packed(entering, BLOCK),
        "input_ids": packed(tokens, BLOCK),
        "loss_mask": packed(mask.long(), BLOCK),
        "document_ids": packed(numbers, BLOCK, -1),
        "position_ids": packed(torch.arange(tokens.shape[1]).expand(tokens.shape), BLOCK),
        "max_anchors": len(anchors),
    }


def options_of(name: str) -> dict:
    """Return what the forward takes of losses, in plain PyTorch."""
    kind, _, settings = VARIANTS[name]
    loss = settings["loss"]
    found = {key: value for key, value in settings.items() if key != "loss"}
    found["loss_config"] = resolve_loss_config(loss, "eager")
    if kind != "dflash":
        found["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]
    return found


def main() -> None:
    torch.set_num_threads(1)
    target = frozen_target()
    for seed, name in chosen(VARIANTS):
        torch.manual_seed(500 + seed)
        texts = random_texts()
        model = make_model(name, target)
        given = inputs_of(model, target, texts) | options_of(name)
        more = {"tokens": texts[0], "counts": texts[1], "anchors": anchors_of_texts()}
        freeze_lesson(name, 500 + seed, model, lambda: model(**given)[1], more)  # noqa: B023


if __name__ == "__main__":
    main()
