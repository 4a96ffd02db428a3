"""Where our own cache lies: in the user's home, or among temporary files where there is none."""

import os
import tempfile
from pathlib import Path

import pytest

from mlx_eagle.system.atomic_folder import temporary_cache, user_cache


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_without_a_home_it_is_among_temporary_files(temporary, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    folder = user_cache()
    assert folder.parent == temporary and folder.is_dir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert user_cache() == folder, "the same for the next process"


@pytest.mark.parametrize("kind", ["open to all", "a link", "a file"])
def test_a_name_that_somebody_else_took_is_not_used(temporary, kind):
    taken = temporary / f"mlx-eagle-{os.getuid()}"
    if kind == "open to all":
        taken.mkdir()
        taken.chmod(0o777)
    elif kind == "a link":
        (temporary / "elsewhere").mkdir()
        taken.symlink_to(temporary / "elsewhere")
    else:
        taken.write_text("")
    folder = temporary_cache()
    assert folder != taken and folder.is_dir() and not folder.is_symlink()
    assert folder.stat().st_mode & 0o777 == 0o700
