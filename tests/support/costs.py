"""What test files share about the draft length: costs of rounds, a controller by script."""

from mlx_eagle.decoding.costs import DraftShape, RoundCosts

FLAT = RoundCosts(1.0, {DraftShape(k): 1.1 + 0.13 * k for k in range(1, 8)})
LINEAR = RoundCosts(1.0, {DraftShape(k): 1.04 * k + 1.0 for k in range(1, 8)})


class ScriptedController:
    """Sizes by a script; drafting is off in its zeros."""

    is_hopeless = False

    def __init__(self, sizes):
        self.sizes, self.drafting_off, self.events, self.i = sizes, False, [], 0

    def next_shape(self, num_tokens):
        size = self.sizes[self.i % len(self.sizes)]
        self.i += 1
        self.drafting_off = size == 0
        return DraftShape(size)

    def record(self, shape, *num_accepted):
        pass

    def record_time(self, shape, seconds):
        pass

    def update_costs(self, costs):
        pass

    def close(self):
        pass
