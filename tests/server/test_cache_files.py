"""The folder of prompt caches: damage, a full disk or a killed writer cost no more than time."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
)

from mlx_eagle.server import cache_files
from mlx_eagle.server.cache_files import CacheFolder
from mlx_eagle.server.caches import Caches, PairCache


def kept(num_tokens: int, first: int = 0) -> tuple[list[int], list]:
    """A text and caches that tell which text they are of."""
    tokens = list(range(first, first + num_tokens))
    cache = KVCache()
    rows = mx.array(tokens, mx.float32)[None, None, :, None] * mx.ones((4,))
    cache.update_and_fetch(rows, rows)
    mx.eval(cache.state)
    return tokens, [cache]


def store(path, max_bytes: int = 10**9, max_size: int = 10, **pair: str) -> PairCache:
    made = PairCache(max_size, folder=CacheFolder(path, max_bytes))
    made.folder.pair = {"model": "m", "draft_model": "d", "chat_template": "t"} | pair
    return made


def found(caches: PairCache, num_tokens: int, first: int = 0) -> int:
    """How many tokens of a text are not to be read again, and that they are the right ones."""
    tokens, _ = kept(num_tokens, first)
    got, rest = caches.fetch([*tokens, 7])
    num_cached = num_tokens + 1 - len(rest)
    if got is not None:
        keys, _ = got[0].keys_and_values()
        assert keys[0, 0, :, 0].tolist() == tokens[:num_cached]
    return num_cached


DAMAGES = {
    "empty": lambda data: b"",
    "cut off": lambda data: data[: len(data) // 2],
    "one bit": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "other words": lambda data: data.replace(b"is_whole", b"is_whale"),
    "no JSON": lambda data: data[:8] + b"[" + data[9:],
    "a page": lambda data: b"<html>" * 100,
    "zeros": lambda data: bytes(len(data)),
    "an endless header": lambda data: b"\xff" * 7 + data[7:],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("is_known", [False, True])
def test_a_damaged_file_is_a_miss(tmp_path, caplog, damage, is_known):
    """Before a server has looked at it, and after."""
    writer, late = store(tmp_path), store(tmp_path)
    for first in (0, 1000):
        writer.insert_cache(*kept(50, first))
        writer.save_all()
    paths = {len(text.tokens) + text.tokens[0]: path for path, text in late.folder.files().items()}
    reader = late if is_known else store(tmp_path)
    data = paths[50].read_bytes()
    paths[50].write_bytes(DAMAGES[damage](data))
    assert found(reader, 50) == 0 and found(reader, 50, 1000) == 50
    assert found(reader, 50) == 0
    (record,) = caplog.records
    assert str(paths[50]) in record.message and "is removed, not used" in record.message
    assert [path.name for path in tmp_path.iterdir()] == [paths[1050].name]


def test_files_are_their_owners_alone(tmp_path):
    caches = store(tmp_path / "a" / "b")
    caches.insert_cache(*kept(50))
    caches.save_all()
    (path,) = (tmp_path / "a" / "b").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    (loaded,), metadata = load_prompt_cache(str(path), return_metadata=True)
    assert loaded.offset == 50 and metadata["model"] == "m"


def test_every_kind_of_cache_comes_back_as_it_was(tmp_path):
    """The drafter's behind the target's, and with them what the store knows of both."""
    rows = mx.random.normal((1, 2, 20, 64))
    made = [
        KVCache(),
        RotatingKVCache(8, keep=2),
        ChunkedKVCache(16),
        CacheList(KVCache(), ArraysCache(1)),
        ConcatenateKVCache(),
    ]
    for cache in (*made[:3], made[3][0], made[4]):
        cache.update_and_fetch(rows, rows + 1)
    made += [made[0].to_quantized(bits=8), ArraysCache(2), KVCache()]
    made[-2][0] = rows
    writer = store(tmp_path)
    writer.insert_cache([*range(20)], Caches(made, 5, is_whole=False))
    writer.save_all()
    got, _ = store(tmp_path).fetch([*range(21)])
    assert [type(cache) for cache in got] == [type(cache) for cache in made]
    assert (got.num_target, got.is_whole) == (5, False)
    for one, other in zip(got, made, strict=True):
        ours, theirs = (dict(tree_flatten(cache.state)) for cache in (one, other))
        assert ours.keys() == theirs.keys()
        assert all(
            mx.array_equal(mx.array(ours[k]), mx.array(theirs[k]))
            for k in ours
            if not isinstance(ours[k], str | None)
        )


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"--prompt-cache-dir .*file cannot be written \(.*\): name"
    ):
        CacheFolder(tmp_path / "file")


def test_a_full_disk_costs_the_files_only(tmp_path, caplog, monkeypatch):
    caches = store(tmp_path)
    free = SimpleNamespace(free=0)
    monkeypatch.setattr(cache_files.shutil, "disk_usage", lambda path: free)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        for first in (0, 1000):
            caches.insert_cache(*kept(50, first))
            caches.save_all()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    assert found(caches, 50) == found(caches, 50, 1000) == 50
    (record,) = caplog.records
    assert "(No space left on device): it is kept in memory only" in record.message
    caches.insert_cache(*kept(60, 2000))
    caches.save_all()
    assert len(list(tmp_path.iterdir())) == 1  # and it works again


def test_files_of_another_pair_are_left_alone(tmp_path):
    writer = store(tmp_path)
    writer.insert_cache(*kept(50))
    writer.save_all()
    for name in writer.folder.pair:
        assert found(store(tmp_path, **{name: "another"}), 50) == 0
    assert found(store(tmp_path), 50) == 50


def test_two_servers_on_one_folder(tmp_path):
    """They find each other's texts, and one may remove what the other knows of."""
    one, two = store(tmp_path), store(tmp_path)
    one.insert_cache(*kept(50))
    one.save_all()
    assert found(two, 50) == 50 and two.counts.hits == {"memory": 0, "disk": 1}
    assert found(two, 50) == 50 and two.counts.hits == {"memory": 1, "disk": 1}
    three = store(tmp_path)
    assert found(three, 10) == 10
    two.insert_cache(*kept(80))  # which goes on behind the first
    two.save_all()
    assert len(list(tmp_path.iterdir())) == 1
    assert found(three, 80) == 80 and found(one, 80) == 80
    one.folder.remove(list(one.folder.files()))
    assert found(store(tmp_path), 80) == 0 and found(three, 80) == 80


def test_the_least_recently_used_files_go_first(tmp_path):
    first = store(tmp_path)
    for i in range(4):
        first.insert_cache(*kept(50, 100 * i))
        first.save_all()
        if i == 2:
            size = first.counts.bytes["disk"]
            assert found(first, 50) == 50  # the first is used once more
            first.folder.max_bytes = size
    assert first.counts.bytes["disk"] <= size and first.counts.snapshots["disk"] == 3
    later = store(tmp_path)
    assert [found(later, 50, 100 * i) for i in range(4)] == [50, 0, 50, 50]
    small = store(tmp_path / "small", max_bytes=100)
    small.insert_cache(*kept(50))
    small.save_all()
    assert list((tmp_path / "small").iterdir()) == []
    assert store(tmp_path, max_bytes=size // 2).folder.measure()[0] == 1


def test_who_is_in_a_hurry_leaves_the_rest(tmp_path):
    caches = store(tmp_path)
    for i in range(4):
        caches.insert_cache(*kept(50, 100 * i))
    answers = iter([False, False, True, True])
    caches.save_all(lambda: next(answers))
    assert [found(store(tmp_path), 50, 100 * i) for i in range(4)] == [0, 0, 50, 50]


def test_what_leaves_memory_is_found_in_files(tmp_path):
    caches = store(tmp_path, max_size=2)
    for i in range(5):
        caches.insert_cache(*kept(50, 100 * i))
    assert caches.counts.snapshots == {"memory": 2, "disk": 3}
    assert [found(caches, 50, 100 * i) for i in range(5)] == [50] * 5
    assert caches.counts.misses == 0 and caches.counts.hits["disk"] >= 3


def test_short_texts_do_not_push_out_a_long_one():
    caches = PairCache(max_size=3)
    caches.insert_cache(*kept(400))
    for i in range(12):
        caches.insert_cache(*kept(30, 1000 * i + 1000))
        assert found(caches, 30, 1000 * i + 1000) == 30
    assert found(caches, 400) == 400
    for i in range(100):  # but it does not stay for ever
        caches.insert_cache(*kept(30, 1000 * i + 1000))
    assert found(caches, 400) == 0


WRITER = """
import sys
from pathlib import Path
from test_cache_files import kept, store
caches = store(Path(sys.argv[1]), max_bytes=int(sys.argv[2]))
for i in range(10**6):
    caches.insert_cache(*kept(20_000, 100_000 * (i % 50)))
    caches.save_all()
"""


def begin_writer(folder, max_bytes: int) -> subprocess.Popen:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(max_bytes)],
        env=os.environ | {"PYTHONPATH": path},
    )


@pytest.mark.exhaustive
def test_killed_writers_leave_whole_files(tmp_path):
    """Two at once in one folder; each is killed in the middle of what it does, several times."""
    num_drafts = 0
    for i in range(4):
        writers = [begin_writer(tmp_path, 4_000_000) for _ in range(2)]
        before = set(tmp_path.iterdir())
        while not {path for path in tmp_path.iterdir() if path.name[0] != "."} - before:
            assert all(writer.poll() is None for writer in writers)
            time.sleep(0.01)
        time.sleep(0.05 + 0.0137 * i)
        for writer in writers:
            writer.kill()
            writer.wait()
        num_drafts += len([path for path in tmp_path.iterdir() if path.name[0] == "."])
        caches = store(tmp_path, max_bytes=4_000_000)
        files = caches.folder.files()
        assert set(tmp_path.iterdir()) == set(files)  # nothing else is left
        assert sum(path.stat().st_size for path in files) <= 2 * 4_000_000
        for text in files.values():
            assert found(caches, len(text.tokens), int(text.tokens[0])) == len(text.tokens)
    assert num_drafts > 0  # some were killed while they wrote


def test_a_pipe_with_the_name_of_a_draft_stops_nobody(tmp_path):
    pipe = tmp_path / cache_files.DRAFT.format("0" * 32, "0" * 8)
    os.mkfifo(pipe)
    CacheFolder(tmp_path)  # which would wait for a writer
    assert pipe.exists()
