"""What most of these files serve."""

import pytest
from serving import write_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> dict[str, str]:
    """A tiny target with its drafters: see ``write_pair``. Nobody changes its files."""
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def flags(pair) -> tuple[str, ...]:
    return "--model", pair["target"], "--draft-model", pair["head"], "--usage-stats"
