"""The file of what rounds cost: shared by processes, read with suspicion, dispensable."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import PROMPT, plain, speculative, tiny_head, tiny_llama

from mlx_eagle.decoding import calibrate, remembered
from mlx_eagle.decoding.costs import DraftShape, RoundCosts, Ways
from mlx_eagle.decoding.remembered import CostFile, read_entries, versions
from mlx_eagle.decoding.timing import Amount

SHAPES = (DraftShape(1), DraftShape(3))
COSTS = RoundCosts(1.0, {DraftShape(1): 1.5, DraftShape(3): 2.5})
FILES = {"calibration.json", "calibration.lock"}
FULL = OSError(28, "No space left on device")
LIMIT = 120  # seconds for any process here

WRITER = """
import sys
from pathlib import Path
from mlx_eagle.decoding.costs import DraftShape, RoundCosts
from mlx_eagle.decoding.remembered import CostFile
path, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
file = CostFile(path)
for i in range(count):
    file.put(f"{name} {i}", RoundCosts(1.0 + i, {DraftShape(1): 2.0 + i}))
"""


def writer(path: Path, name: str, count: int) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, str(path), name, str(count)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "calibration.json"


def test_what_is_put_is_got_by_another(path):
    CostFile(path).put("key", COSTS)
    assert CostFile(path).get("key", SHAPES) == COSTS
    assert CostFile(path).get("key", SHAPES[:1]) is None, "other shapes than were measured"
    assert CostFile(path).get("other", SHAPES) is None


def test_failed_shapes_and_ways_are_remembered(path):
    costs = RoundCosts(1.0, {DraftShape(1): 1.5}, (DraftShape(3),), Ways(keeps_tail=True))
    CostFile(path).put("key", costs)
    CostFile(path).put("none", RoundCosts(1.0, {}, tuple(SHAPES)))
    assert CostFile(path).get("key", SHAPES) == costs
    assert CostFile(path).get("none", SHAPES).failed == tuple(SHAPES)
    assert CostFile(path).get("key", SHAPES[:1]) is None, "other shapes than were measured"


@pytest.mark.parametrize("share", [0.625, 0.0, 1.0])
def test_what_texts_accepted_is_remembered(path, share):
    costs = replace(COSTS, acceptance=share)
    CostFile(path).put("key", costs)
    assert CostFile(path).get("key", SHAPES) == costs


def test_several_processes_lose_nothing(path):
    names = "ab"
    processes = [writer(path, name, 15) for name in names]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        errors = [process.communicate(timeout=LIMIT)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert errors == [""] * len(names)
    known = json.loads(path.read_text())
    assert known.keys() == {f"{name} {i}" for name in names for i in range(15)}
    for key, entry in known.items():
        i = int(key.split()[1])
        assert entry["plain"] == 1 + i and entry["rounds"] == {"1": 2 + i}
    assert {file.name for file in path.parent.iterdir()} == FILES


def test_several_threads_lose_nothing(path):
    file = CostFile(path)

    def put(name: str) -> None:
        for i in range(10):
            file.put(f"{name} {i}", COSTS)

    threads = [threading.Thread(target=put, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert len(read_entries(path)) == 30


@pytest.mark.exhaustive
def test_a_process_killed_while_it_writes(path):
    """Whenever that is, the file can be read, and the next process can write."""
    for tries in range(3):
        process = writer(path, f"killed {tries}", 100_000)
        try:
            assert process.stdout.readline() == "ready\n"
            process.stdin.write("go\n")
            process.stdin.flush()
            while not any(key.startswith(f"killed {tries}") for key in read_entries(path)):
                assert process.poll() is None
        finally:
            process.kill()
            process.wait(LIMIT)
        json.loads(path.read_text())
    (path.parent / "calibration.abc.new").write_text("{ half")
    CostFile(path).put("key", COSTS)
    assert CostFile(path).get("key", SHAPES) == COSTS
    assert {file.name for file in path.parent.iterdir()} == FILES


GOOD = {"plain": 1.0, "rounds": {"1": 1.5, "3": 2.5}}
NEW = {"date": time.time(), "versions": versions(), "ways": []}
DAMAGED = {
    "cut off": json.dumps({"key": GOOD})[:-9],
    "empty": "",
    "no JSON": "\x00\xff{",
    "a list": "[1, 2]",
    "a number": "7",
    "deep": "[" * 100_000,
    "deep values": '{"key": ' + '{"rounds": ' * 100_000,
    "huge integers": '{"key": {"plain": 1, "rounds": {"1": 1' + "0" * 5000 + ', "3": 2}}}',
    "no rounds": '{"key": {"plain": 1.0}}',
    "rounds a list": '{"key": {"plain": 1.0, "rounds": [1, 3]}}',
    "an entry of text": '{"key": "fast"}',
    "text for a time": json.dumps({"key": GOOD | {"plain": "1"}}),
    "true for a time": json.dumps({"key": GOOD | {"plain": True}}),
    "null for a time": json.dumps({"key": GOOD | {"plain": None}}),
    "zero": json.dumps({"key": GOOD | {"plain": 0}}),
    "negative": json.dumps({"key": GOOD | {"rounds": {"1": -1.5, "3": 2.5}}}),
    "not a number": '{"key": {"plain": NaN, "rounds": {"1": 1, "3": 2}}}',
    "endless": '{"key": {"plain": 1, "rounds": {"1": Infinity, "3": 2}}}',
    "a subnormal time": '{"key": {"plain": 1, "rounds": {"1": 5e-324, "3": 2}}}',
    "a number that failed": json.dumps({"key": GOOD | {"failed": 7}}),
    "numbers that failed": json.dumps({"key": GOOD | {"failed": [7]}}),
    "an unknown way": json.dumps({"key": GOOD | {"ways": ["by_magic"]}}),
    "nested ways": json.dumps({"key": GOOD | {"ways": [["keeps_tail"]]}}),
    "text for a date": json.dumps({"key": GOOD | {"date": "today"}}),
    "more accepted than drafted": json.dumps({"key": GOOD | {"acceptance": 1.5}}),
    "a shape guessed": json.dumps({"key": GOOD | {"guessed": "3"}}),
    "a time nested": '{"key": {"plain": 1, "rounds": {"1": [1], "3": 2}}}',
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(path, name):
    path.parent.mkdir()
    path.write_text(DAMAGED[name], encoding="latin-1")
    file = CostFile(path)
    assert file.get("key", SHAPES) is None
    file.put("other", COSTS)
    assert file.get("other", SHAPES) == COSTS
    assert read_entries(path).keys() == {"other"}


def test_a_damaged_entry_costs_no_other(path):
    path.parent.mkdir()
    path.write_text(json.dumps({"key": GOOD | NEW, "bad": {"plain": "1"}}))
    assert CostFile(path).get("key", SHAPES) == COSTS


def test_what_is_no_file_is_not_opened(path):
    path.parent.mkdir()
    os.mkfifo(path)  # to read it would wait for ever
    assert CostFile(path).get("key", SHAPES) is None


def test_a_file_that_is_too_large_is_not_read(path, monkeypatch):
    CostFile(path).put("key", COSTS)
    monkeypatch.setattr("mlx_eagle.system.json_schema.MAX_MEMORY", 10)
    assert CostFile(path).get("key", SHAPES) is None


def raises(err: OSError):
    def function(*_):
        raise err

    return function


def unwritable(kind: str, tmp_path: Path, monkeypatch) -> Path:
    """A place where nothing can be kept."""
    if kind == "a file in the way":
        (tmp_path / "cache").write_text("")
    elif kind == "a file below":
        return Path("/dev/null/cache/calibration.json")
    elif kind == "a folder in its place":
        (tmp_path / "cache" / "calibration.json" / "x").mkdir(parents=True)
    elif kind == "full disk":
        monkeypatch.setattr(remembered.tempfile, "mkstemp", raises(FULL))
    elif kind == "full disk, later":
        monkeypatch.setattr(Path, "replace", raises(FULL))
    elif kind == "read-only":
        denied = PermissionError(13, "Permission denied")
        monkeypatch.setattr(remembered.os, "open", raises(denied))
    elif kind == "locked":
        monkeypatch.setattr(remembered, "LOCK_TIMEOUT", 0.05)
        taken = BlockingIOError(11, "Resource temporarily unavailable")
        monkeypatch.setattr(remembered.fcntl, "flock", raises(taken))
    return tmp_path / "cache" / "calibration.json"


KINDS = [
    "a file in the way",
    "a file below",
    "a folder in its place",
    "full disk",
    "full disk, later",
    "read-only",
    "locked",
]


@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_can_be_kept_it_is_kept_in_memory(kind, tmp_path, monkeypatch, capsys):
    file = CostFile(unwritable(kind, tmp_path, monkeypatch))
    for key in ("one", "two"):
        file.put(key, COSTS)
        assert file.get(key, SHAPES) == COSTS
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1, "one warning"
    assert "what rounds cost could not be saved" in warning
    assert not list(tmp_path.rglob("*.new")), "nothing half-written"


def test_what_was_kept_in_memory_is_saved_when_that_works_again(path, monkeypatch):
    file = CostFile(path)
    with monkeypatch.context() as patch:
        patch.setattr(remembered.tempfile, "mkstemp", raises(FULL))
        file.put("one", COSTS)
    file.put("two", COSTS)
    assert read_entries(path).keys() == {"one", "two"}


def test_the_text_comes_all_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "AMOUNT", Amount(1, 1, 1))
    (tmp_path / "home").write_text("")
    monkeypatch.setattr(calibrate, "user_cache", lambda: tmp_path / "home")
    model = tiny_llama()
    for recalibrate in (True, False):
        options = {"num_draft_tokens": "auto", "recalibrate": recalibrate}
        tokens, _ = speculative(model, tiny_head(model), PROMPT, 9, **options)
        assert tokens == plain(model, PROMPT, 9)
        monkeypatch.setattr(calibrate, "guess_costs", lambda *_: 1 / 0)  # kept in memory
    assert capsys.readouterr().err.count("Warning: what rounds cost could not be saved") == 1
