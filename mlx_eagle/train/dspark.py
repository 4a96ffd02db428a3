"""Training of DSpark heads: of what is accepted, and of how sure the head is of it.

DeepSpec, modeling/dspark/loss.py: .1 of cross-entropy and .9 of the L1 distance from the target's
distribution, and cross-entropy of the confidence head with the share that would be accepted.
Before each slot stands the text's token.
"""

from typing import Any

import mlx.core as mx

from ..drafters.dspark import DSparkConfig, DSparkHead
from .block import BlockRecipe, Fresh, layer_values
from .chunks import Arrays
from .losses import mixed_losses

RANK = 256  # of a fresh head's Markov head


class DSparkRecipe(BlockRecipe):
    """A DSpark head, with its Markov head of any kind, and its confidence head if it has one."""

    parts = ("markov_head", "confidence_head")
    spread = 3

    def compare(
        self, states: mx.array, before: mx.array, labels: mx.array, final: mx.array
    ) -> Arrays:
        drafter = self.drafter
        # Split at once: the gradient of each separate slice would be as large as all of them.
        slots = zip(*(mx.split(x, self.depth, axis=1) for x in drafter.slots(states)), strict=True)
        carried = drafter.start(len(states))
        rows = []
        for slot, own in enumerate(slots):
            tokens = before[:, slot]
            logits, carried = drafter.after(tokens, carried, *(part[:, 0] for part in own))
            rows.append(logits)
        probs = self.teacher.probs(final)
        logits = mx.stack(rows, axis=1)[..., : probs.shape[-1]].astype(mx.float32)
        loss = mixed_losses(self.settings.losses().terms, logits, probs, labels)
        sure = drafter.confidence_logits(states, before)
        if sure is None:
            return [loss]
        kept = mx.minimum(probs, mx.softmax(logits, axis=-1)).sum(axis=-1)
        return [loss, mx.logaddexp(0, sure) - mx.stop_gradient(kept) * sure]


def fresh(fields: dict[str, Any]) -> Fresh:
    """Make a head, as speculators publishes them."""
    rank = min(RANK, fields["hidden_size"])
    c = DSparkConfig(**fields, first_slot=0, markov_rank=rank, confidence="markov")
    proposal = {"proposal_type": "greedy", "speculative_tokens": c.longest_draft}
    same = ("mask_token_id", "block_size", "draft_vocab_size", "markov_rank")
    values = {name: getattr(c, name) for name in same} | {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_config": {"algorithm": "dspark", "proposal_methods": [proposal]},
        "transformer_layer_config": layer_values(c),
        "aux_hidden_state_layer_ids": list(c.taps),
        "sample_from_anchor": True,
        "markov_head_type": c.markov_kind,
        "confidence_head_with_markov": True,
    }
    return DSparkHead(c), values, {}
