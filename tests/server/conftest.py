"""What most of these files serve."""

import json

import pytest
from architectures import ARCHITECTURES, build
from mlx_lm.utils import save_model
from serving import write_pair, write_tokenizer


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> dict[str, str]:
    """A tiny target with its drafters: see ``write_pair``. Nobody changes its files."""
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def flags(pair) -> tuple[str, ...]:
    return "--model", pair["target"], "--draft-model", pair["head"], "--usage-stats"


@pytest.fixture(scope="session")
def recurrent(pair, tmp_path_factory) -> str:
    """A target of the sizes of the pair's, with caches that allow no trees."""
    folder = tmp_path_factory.mktemp("recurrent")
    config = ARCHITECTURES["lfm2"] | {"vocab_size": write_tokenizer(folder)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, "lfm2", config)
        save_model(folder, build("lfm2"))
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
