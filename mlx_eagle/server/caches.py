"""Prompt caches of earlier requests: the target's, with the drafter's part behind them.

A cache that can be trimmed serves all texts that begin like its own. Recurrent states and full
windows cannot: they have snapshots at the points where other texts are likely to differ.
"""

import logging
import time
from argparse import Namespace
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import (
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)

from ..batch.requests import Request
from ..drafters.base import Drafter
from ..target_model.cache_view import single_caches
from ..target_model.target import Target
from .cache_files import FOLDER_BYTES, CacheFolder, Caches, Snapshot, Tokens
from .metrics import CacheCounts

NUM_KEPT = {"system": 1, "user": 2, "assistant": 1}
"""Snapshots kept along one text, by mlx-lm's name for the role of the text's last message.

A turn continues the last answer, or the last question where thoughts are left out; an edited
one continues the question before.
"""
SETTLED = 1.0  # seconds: an agent asks again sooner


def can_trim(caches: list[Any]) -> bool:
    """Whether any number of tokens can be cut off the end, leaving the caches as before them.

    mlx-lm says so of chunked caches too whose front is gone, which a shorter text would need.
    """
    chunks = [cache for cache in single_caches(caches) if isinstance(cache, ChunkedKVCache)]
    return can_trim_prompt_cache(caches) and not any(chunk.start_position for chunk in chunks)


def trim(caches: list[Any], num_tokens: int) -> None:
    """Cut tokens off the end, and free their memory."""
    trim_prompt_cache(caches, num_tokens)
    for cache in single_caches(caches):
        if type(cache) in TRIMMED_FOREVER and cache.offset > 0:
            cache.keys, cache.values = tree_map(
                lambda array, size=cache.offset: array[..., :size, :], [cache.keys, cache.values]
            )


TRIMMED_FOREVER = (KVCache, QuantizedKVCache, ConcatenateKVCache)


def shortened(caches: Caches, num_tokens: int) -> Caches:
    """Copy the caches without the last ``num_tokens``; no drafter's part if it cannot be cut."""
    target = deepcopy(caches.target)
    draft = deepcopy(caches.draft)
    if num_tokens > 0:
        trim(target, num_tokens)
        draft = draft if can_trim(draft) else []
        trim(draft, num_tokens)
    return Caches(target + draft, caches.num_target, caches.is_whole and num_tokens == 0)


def is_always_trimmable(caches: list[Any]) -> bool:
    """Whether caches of these kinds can always be trimmed, and so need no snapshots."""
    return all(type(cache) in TRIMMED_FOREVER for cache in single_caches(caches))


def without_last(request: Request) -> Caches | None:
    """Caches to file for a text that ended in shared rounds: all but its last token.

    That token was not run yet: a request that continues the text runs it, with what follows.
    None if the caches cannot be trimmed to that.
    """
    decoder = request.decoder
    target = decoder.cache
    draft = decoder.drafter.cache
    if not can_trim(target) or not can_trim(draft):
        return None
    trim_prompt_cache(draft, 1)
    return Caches(target + draft, len(target), is_whole=False)


class PairCache:
    """Snapshots of earlier texts, for the requests that begin like them.

    As in mlx-lm's store, ``max_size`` is the number of texts kept in memory, and ``max_bytes``
    bounds their size. With a ``folder`` they go to files too, once ``folder.pair`` is known.
    ``counts`` may be read from any thread, the rest from one thread only.
    """

    def __init__(
        self, max_size: int = 10, max_bytes: int = 1 << 63, folder: CacheFolder | None = None
    ):
        self.max_size = max_size
        self.max_bytes = max_bytes
        self.folder = folder
        self.counts = CacheCounts()
        self._snapshots: list[Snapshot] = []
        self._clock = 0  # the rank of what left memory last
        self._used = time.monotonic()

    def insert_cache(
        self,
        tokens: list[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
        salt: str = "",
    ) -> None:
        """File the caches of a text; the caller must not use them afterwards.

        Only requests with the same ``salt`` find them.
        """
        caches = prompt_cache if isinstance(prompt_cache, Caches) else Caches(prompt_cache)
        text = np.array(tokens, np.int32)
        made = Snapshot(text, cache_type, can_trim(caches.target), salt, caches)
        for other in self._of(made.salt):
            is_loaded = other.caches is not None and len(other.tokens) > len(text)
            if is_loaded and other.num_usable(text) == len(text):
                self._use(other)  # and that is all that is needed
                return
        for other in self._replaced_by(made):
            other.caches = None
            if len(other.tokens) == len(text):
                made.path = other.path
            if other.path in (None, made.path):
                self._snapshots.remove(other)
        self._snapshots.append(made)
        self._use(made)
        self._make_room(made)

    def fetch(self, tokens: list[int], salt: str = "") -> tuple[Caches | None, list[int]]:
        """Copy the caches that fit best; return them and the tokens they lack, at least one."""
        wanted = np.array(tokens[:-1], np.int32)
        self._look_into_folder()
        while (snapshot := self._nearest(wanted, salt)) is not None:
            num_usable = snapshot.num_usable(wanted)
            storage = "memory" if snapshot.caches is not None else "disk"
            caches = self._load(snapshot)
            if caches is None:
                continue  # it is gone
            self.counts.hits[storage] += 1
            self._use(snapshot)
            got = shortened(caches, len(snapshot.tokens) - num_usable)
            self._make_room(snapshot)
            return got, tokens[num_usable:]
        self.counts.misses += 1
        return None, tokens

    def save_next(self) -> None:
        """Write a snapshot to a file, if one is due; call it while there is nothing else to do.

        A text that is about to continue is not worth it.
        """
        if self.folder is not None and time.monotonic() - self._used >= SETTLED:
            self._save(next(filter(_is_unsaved, reversed(self._snapshots)), None))

    def save_all(self, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Write all snapshots that have no file, newest first, until ``is_hurried``."""
        if self.folder is None:
            return
        unsaved = [s for s in reversed(self._snapshots) if _is_unsaved(s)]
        if unsaved:
            logging.info(f"Writing prompt caches to {self.folder.path}: {len(unsaved)}.")
        for snapshot in unsaved:
            if not is_hurried():
                self._save(snapshot)

    def _replaced_by(self, made: Snapshot) -> list[Snapshot]:
        """List the snapshots of shorter texts that ``made`` replaces."""
        others = [other for other in self._of(made.salt) if other is not made]
        before = [s for s in others if s.num_usable(made.tokens) == len(s.tokens)]
        if made.is_trimmable:
            return before
        same = [s for s in before if len(s.tokens) == len(made.tokens)]
        alike = [s for s in before if s not in same and s.cache_type == made.cache_type]
        alike.sort(key=lambda s: -len(s.tokens))
        return same + alike[NUM_KEPT[made.cache_type] - 1 :]

    def _of(self, salt: str) -> list[Snapshot]:
        return [snapshot for snapshot in self._snapshots if snapshot.salt == salt]

    def _nearest(self, wanted: Tokens, salt: str) -> Snapshot | None:
        """Find the best snapshot to continue from; None if there is none.

        Among equals, prefer one in memory, then the one of which the least is cut off.
        """
        return max(
            (s for s in self._of(salt) if s.num_usable(wanted) > 0),
            key=lambda s: (s.num_usable(wanted), s.caches is not None, -len(s.tokens)),
            default=None,
        )

    def _load(self, snapshot: Snapshot) -> Caches | None:
        """Return its caches, read from the file if needed; if that fails, forget it."""
        if snapshot.caches is None and self.folder is not None and snapshot.path is not None:
            snapshot.caches = self.folder.load(snapshot.path)
        if snapshot.caches is None:
            self._snapshots.remove(snapshot)
        return snapshot.caches

    def _use(self, snapshot: Snapshot) -> None:
        """Mark a snapshot as used, so that others leave memory first."""
        snapshot.rank = self._clock + len(snapshot.tokens)
        self._used = time.monotonic()
        if self.folder is not None and snapshot.path is not None:
            self.folder.use(snapshot.path)

    def _make_room(self, newest: Snapshot) -> None:
        """Drop snapshots from memory until the rest fit, ``newest`` last of all."""

        def lowest(snapshots: list[Snapshot]) -> Snapshot:
            return min(snapshots, key=lambda s: (s is newest, s.rank))

        for cache_type, num_kept in NUM_KEPT.items():
            loaded = [s for s in self._loaded() if s.cache_type == cache_type]
            while len(loaded) > self.max_size * num_kept:
                loaded.remove(leaving := lowest(loaded))
                self._leave(leaving)
        loaded = self._loaded()
        while sum(s.caches.nbytes for s in loaded if s.caches is not None) > self.max_bytes:
            loaded.remove(leaving := lowest(loaded))
            self._leave(leaving)
        self._count()

    def _loaded(self) -> list[Snapshot]:
        return [s for s in self._snapshots if s.caches is not None]

    def _leave(self, snapshot: Snapshot) -> None:
        if _is_unsaved(snapshot):
            self._save(snapshot)
        self._clock = max(self._clock, snapshot.rank)
        snapshot.caches = None
        if snapshot.path is None:
            self._snapshots.remove(snapshot)

    def _save(self, snapshot: Snapshot | None) -> None:
        if self.folder is None or snapshot is None or snapshot.caches is None:
            return
        snapshot.path = self.folder.save(snapshot)
        snapshot.is_unwritable = snapshot.path is None
        if snapshot.path is not None:  # which makes those of shorter texts useless
            outdated = {s.path: s for s in self._replaced_by(snapshot) if s.path is not None}
            self.folder.remove(outdated)
            self._snapshots = [s for s in self._snapshots if s.path not in outdated]
        self._count()

    def _look_into_folder(self) -> None:
        """Take in the files that exist now, including other servers'."""
        if self.folder is None:
            return
        files = self.folder.files()
        for snapshot in self._snapshots:
            if snapshot.path is not None and files.pop(snapshot.path, None) is None:
                snapshot.path = None
        self._snapshots = [s for s in self._snapshots if s.caches or s.path]
        self._snapshots += files.values()

    def _count(self) -> None:
        loaded = self._loaded()
        self.counts.snapshots["memory"] = len(loaded)
        self.counts.bytes["memory"] = sum(s.caches.nbytes for s in loaded if s.caches is not None)
        if self.folder is not None:
            self.counts.snapshots["disk"], self.counts.bytes["disk"] = self.folder.measure()


def _is_unsaved(snapshot: Snapshot) -> bool:
    is_loaded = snapshot.caches is not None and snapshot.path is None
    return is_loaded and not snapshot.is_unwritable


def open_prompt_cache(args: Namespace) -> PairCache:
    """Open the store that the flags ask for. Raises ValueError if its folder is not writable."""
    max_bytes = args.prompt_cache_bytes
    folder = None
    if args.prompt_cache_dir is not None:
        path = Path(args.prompt_cache_dir).expanduser()
        folder = CacheFolder(path, FOLDER_BYTES if max_bytes is None else max_bytes)
    return PairCache(args.prompt_cache_size, 1 << 63 if max_bytes is None else max_bytes, folder)


def prepare(
    caches: Caches | None, model: nn.Module, drafter: Drafter | None, text: list[int]
) -> Caches:
    """Make fetched caches that hold ``text`` ready for the next request.

    Without a drafter the result has no drafter's part, which would fall behind. With one it has:
    a fresh part if there was none, so the drafter starts cold. If the caches are not
    whole, as when they were trimmed, what the drafter keeps of the last token is computed.
    """
    if caches is None:
        caches = Caches(make_prompt_cache(model))
    if drafter is None:
        return Caches(caches.target)
    if not caches.draft:
        caches += drafter.make_cache()
    elif drafter.taps and text and not caches.is_whole:
        # The pair at the seam couples the features of the last token with the token to come,
        # and the features that were held belong to a token that has been trimmed away.
        target = caches.target
        trim(target, 1)
        _, features = Target(model, drafter.taps)(mx.array(text[-1:]), target)
        drafter.begin(caches.draft).save_last_features(features)
        mx.eval(features)
    return caches
