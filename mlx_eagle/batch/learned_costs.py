"""What rounds of a batch cost where nobody waits for a measurement: guessed, then learned.

For batches whose number of requests changes all the time. What the rounds themselves teach is kept
for each number, in the same file as the costs of single requests.
"""

from functools import partial

import mlx.nn as nn

from ..decoding.calibrate import CHAINS, cost_file, trust_in
from ..decoding.cost_keys import context_bucket, make_key
from ..decoding.decoder import Decoder
from ..decoding.guess import guess_costs
from ..decoding.live_costs import LiveCosts
from ..drafters.base import Drafter


class LearnedCosts:
    """``CostsBySize`` of requests like that of ``decoder``, on ``model`` with ``draft_model``."""

    def __init__(self, model: nn.Module, draft_model: Drafter, decoder: Decoder):
        self.num_requests = 0
        self._model, self._draft_model = model, draft_model
        self._live: LiveCosts | None = None
        self._key = make_key(
            model,
            draft_model,
            decoder.cache,
            decoder.quantization,
            decoder.rule,
            decoder.processors,
            context_bucket(decoder.cache, 0),
            "chains learned, texts: ",
        )

    def of(self, num_requests: int) -> LiveCosts:
        """See ``CostsBySize.of``; what was learned of the number before is kept."""
        if self._live is not None:
            self._live.close()
        self.num_requests, key = num_requests, f"{self._key}{num_requests}"
        file = cost_file()
        known = file.get(key, CHAINS)
        if known is None:
            known = guess_costs(self._model, self._draft_model, CHAINS, num_requests)
        self._live = LiveCosts(known, trust_in(self._model, key), partial(file.correct, key))
        return self._live
