"""What rounds may cost where nobody has timed one: a guess by the machine and the weights.

Only its form matters, the costs beside each other, and that little: it has no weight against the
first times (``live_costs.py``).
"""

from collections.abc import Sequence

import mlx.nn as nn
from mlx.utils import tree_flatten

from ..drafters.base import Drafter
from ..system.machines import Products, this_machine
from .costs import DraftShape, RoundCosts

ROUND = 0.1  # plain steps: what a round has to do beside its passes
DENSE_ROW = 0.08  # plain steps: one row more over weights that are read once for all rows
PACKED_ROW = 0.02  # beside what reading packed weights once more costs


def guess_costs(
    model: nn.Module, drafter: Drafter, shapes: Sequence[DraftShape], num_texts: int = 1
) -> RoundCosts:
    """Costs of ``shapes`` for so many texts in shared passes, in plain steps of one."""
    products = this_machine().products
    is_packed = any(hasattr(module, "bits") for module in model.modules())
    step = min(1.0, sum(map(num_bytes, drafter.modules())) / max(1, num_bytes(model)))

    def of_pass(num_rows: int) -> float:
        """Of so many rows of each text."""
        num_rows *= num_texts
        if is_packed:
            return _reads(products, num_rows) + PACKED_ROW * (num_rows - 1)
        return 1 + DENSE_ROW * (num_rows - 1)

    def cost(shape: DraftShape) -> float:
        num_rows = 1 + (shape.size if shape.tree is None else shape.tree.nodes)
        return of_pass(num_rows) + step * of_pass(1) * shape.size + ROUND

    rounds = {shape: cost(shape) for shape in shapes}
    costs = RoundCosts(of_pass(1), rounds, knows_ways=False)
    return costs.as_guess()


def _reads(products: Products | None, num_rows: int) -> int:
    """How often a pass goes through packed weights, or what takes as long."""
    if products is None:
        return num_rows
    kernel, times = products.kernel(num_rows)
    if kernel == "vector":
        return times
    # MLX changes kernels where they take equally long.
    return times * products.kernel(products.limit() - 1).times


def num_bytes(module: nn.Module) -> int:
    """The size of a module's weights."""
    return sum(weights.nbytes for _, weights in tree_flatten(module.parameters()))
