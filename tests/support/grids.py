"""What ``make test`` tries of a grid of parameters, and what only ``make test-all`` does."""

from collections.abc import Iterable
from typing import Any

import pytest


def thorough(values: Iterable[Any], *quick: Any) -> list[Any]:
    """All of ``values``, of which ``make test`` tries the ``quick`` ones.

    In a grid it tries the combinations of what is quick along every side.
    """
    values = list(values)
    assert set(map(repr, quick)) <= set(map(repr, values)), f"{quick} are not all in {values}"
    slow = pytest.mark.exhaustive
    return [v if repr(v) in map(repr, quick) else pytest.param(v, marks=slow) for v in values]
