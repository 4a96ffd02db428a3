"""The names that results had in version 0.1.0, written beside those of today.

For programs that read ``results.json`` and ``results.csv``; the next version leaves them out.
"""

from collections.abc import Mapping
from typing import Any

OLD_NAMES = {
    "configurations": "arms",
    "configuration": "arm",
    "mean_acceptance_length": "tau",
    "drafting_events": "pace_events",
}


def with_old_names(value: Any) -> Any:
    """A copy of plain data in which everything that was renamed stands under both names.

    {"configuration": "k=1"} -> {"configuration": "k=1", "arm": "k=1"}
    """
    if isinstance(value, list):
        return [with_old_names(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    found = {key: with_old_names(item) for key, item in value.items()}
    old = {OLD_NAMES[key]: item for key, item in found.items() if key in OLD_NAMES}
    return {**old, **found}
