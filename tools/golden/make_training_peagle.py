"""Freeze losses and gradients of a tiny P-EAGLE head in the PyPI package ``speculators``.

    pip install torch speculators==0.9.0
    python tools/golden/make_training_peagle.py

Writes ``training-peagle/``; see ``lessons.py``. Slot i of a text has its token i + 1 and the taps
of token i, and is about what the target says after token i + 1. Which drafts are computed is
random in the library, and fixed here by ``elements`` (E, 3): text, slot a and depth d >= 1 of a
draft about what slot a + d is about. All slots have a draft of depth 0.

The loss is the divergence from the target among the tokens that can be drafted, its mean over all
drafts whose slot a + d counts. The library also counts slots where the target's own choice cannot
be drafted, and it keeps the output matrix; here the mask leaves such slots out, and the matrix is
trained, as SpecForge has both.
"""

import torch
from common import chosen, random_vocabulary, randomize, stub
from lessons import (
    DRAFTER,
    LENGTHS,
    SIZES,
    TAPS,
    freeze_lesson,
    frozen_target,
    packed,
    random_texts,
    target_states,
)

# Imported by the library when it starts, and not used here.
stub("datasets", "hs_connectors", "httpx", "loguru", "openai", "psutil", "torchaudio")

from speculators import SpeculatorsConfig, VerifierConfig  # noqa: E402
from speculators.losses import resolve_loss_config  # noqa: E402
from speculators.models.peagle import core  # noqa: E402
from speculators.models.peagle.config import PEagleSpeculatorConfig  # noqa: E402
from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

DEPTHS = 4
KEPT = 0.7  # of the drafts that could be computed at a depth
VARIANTS = {"peagle": {}}


def make_model(target: torch.nn.Module, changes: dict) -> core.PEagleDraftModel:
    """Make a random head, with the target's table, output and norm."""
    layer = LlamaConfig(**DRAFTER)
    layer._attn_implementation = "eager"
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layer,
        speculators_config=SpeculatorsConfig(
            algorithm="peagle",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTHS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        eagle_aux_hidden_state_layer_ids=list(TAPS),
        draft_vocab_size=40,
        mask_token_id=95,
        **changes,
    )
    model = randomize(core.PEagleDraftModel(config))
    model.lm_head.weight.requires_grad_(True)
    model.load_vocab_mappings(*random_vocabulary(SIZES["vocab_size"], 40))
    model.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight)
    model.verifier_norm.weight.data.copy_(target.model.norm.weight)
    model.verifier_lm_head.weight.data.copy_(target.lm_head.weight[model.t2d])
    return model


def random_elements(counts: torch.Tensor) -> torch.Tensor:
    """Draw drafts (E, 3) of depths >= 1: some of those behind a kept one, in slots that count."""
    found = []
    for text, own in enumerate(counts.tolist()):
        kept = {slot for slot, counted in enumerate(own) if counted and slot >= 1}
        for depth in range(1, DEPTHS):
            kept = {slot for slot in kept if torch.rand(()) < KEPT}
            found += [(text, slot - depth, depth) for slot in sorted(kept)]
            kept = {slot + 1 for slot in kept if slot + 1 < len(own) and own[slot + 1]}
    return torch.tensor(found)


def inputs_of(model: torch.nn.Module, target: torch.nn.Module, texts: tuple) -> tuple:
    """Return what the library's forward takes of texts, and the elements, which are fixed."""
    tokens, counts = texts
    features, logits = target_states(target, tokens)
    entering, _ = target_states(target, tokens, (4,))
    after = [torch.roll(x, -1, dims=1) for x in (tokens, entering, logits)]
    is_drafted = counts & model.t2d[after[2].argmax(dim=-1)]
    elements = random_elements(counts)
    starts = torch.tensor([0, *LENGTHS[:-1]]).cumsum(0)
    every = torch.arange(sum(LENGTHS))
    anchors = torch.cat([every, starts[elements[:, 0]] + elements[:, 1]])
    depths = torch.cat([torch.zeros_like(every), elements[:, 2]])
    core.generate_cod_sample_indices = lambda **_: (anchors, depths)
    numbers = torch.arange(len(tokens))[:, None].expand(tokens.shape)
    given = {
        "hidden_states": packed(features, 0),
        "input_ids": packed(after[0], 0),
        "verifier_last_hidden_states": packed(after[1], 0),
        "loss_mask": packed(is_drafted.long(), 0),
        "document_ids": packed(numbers, 0),
        "num_depths": DEPTHS,
        "loss_config": resolve_loss_config("kl_div", "eager"),
    }
    return given, elements


def main() -> None:
    torch.set_num_threads(1)
    target = frozen_target()
    for seed, name in chosen(VARIANTS):
        torch.manual_seed(800 + seed)
        texts = random_texts()
        model = make_model(target, VARIANTS[name])
        given, elements = inputs_of(model, target, texts)
        more = {"tokens": texts[0], "counts": texts[1], "elements": elements}
        freeze_lesson(name, 800 + seed, model, lambda: model(**given)[1], more)  # noqa: B023


if __name__ == "__main__":
    main()
