"""What several test files share about the draft length: costs of rounds, a controller by script."""

from mlx_eagle.decoding.controller import Plan, RoundCosts

FLAT = RoundCosts(1.0, {Plan(k): 1.1 + 0.13 * k for k in range(1, 8)})
LINEAR = RoundCosts(1.0, {Plan(k): 1.04 * k + 1.0 for k in range(1, 8)})


class ScriptedPace:
    """Sizes by a script, parked in its zeros."""

    is_hopeless = False

    def __init__(self, sizes):
        self.sizes, self.parked, self.events, self.i = sizes, False, [], 0

    def next_plan(self, num_tokens):
        size = self.sizes[self.i % len(self.sizes)]
        self.i += 1
        self.parked = size == 0
        return Plan(size)

    def record(self, plan, *num_accepted):
        pass

    def recost(self, costs):
        pass
