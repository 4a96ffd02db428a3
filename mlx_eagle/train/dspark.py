"""Training of DSpark heads: of what is accepted, and of how sure the head is of it.

DeepSpec, modeling/dspark/loss.py: .1 of cross-entropy and .9 of the L1 distance from the target's
distribution, and cross-entropy of the confidence head with the share that would be accepted.
Before each slot stands the text's token.
"""

import mlx.core as mx

from .block import BlockRecipe
from .chunks import Arrays
from .losses import mixed_losses


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
        loss = mixed_losses(self.settings.terms, logits, probs, labels)
        sure = drafter.confidence_logits(states, before)
        if sure is None:
            return [loss]
        kept = mx.minimum(probs, mx.softmax(logits, axis=-1)).sum(axis=-1)
        return [loss, mx.logaddexp(0, sure) - mx.stop_gradient(kept) * sure]
