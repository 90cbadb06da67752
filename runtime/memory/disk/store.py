"""KV blocks on disk: saved behind the engine's back, found in memory, fetched beside its steps.

    engine's thread    longest, save, fetch: no I/O, no waiting
    writer's thread    bounded queue -> file -> journal -> index; gives up the oldest at the bound
    readers' threads   file -> checked -> Fetch, a bounded number of bytes at a time

One process writes a layout's folder; others read along (their writer's thread follows the journal)
and take over when it has gone. A block is found only when its file is whole and renamed, and only
behind all blocks before it. A damaged file is dropped with a warning. Where writing fails the store
writes no more, says so once, and what it has can still be read; where nothing can be read it is
off. Nothing here raises after the constructor, and the constructor raises nothing for a bad folder.

What it does not know: tensors, pages, requests. Format: block_file.py; keys: block_key.py.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from .block_file import (
    CorruptBlock,
    Payload,
    file_bytes,
    read_block,
    read_header,
    will_read,
    write_block,
)
from .block_key import Block, StoredLayout
from .block_store import Fetch, StoreMode, StoreStats
from .folder import StoreFolder
from .index import StoreIndex
from .journal import ADDED, GONE, USED, Journal, JournalReader, Record

__all__ = ["DiskStore"]

log = logging.getLogger(__name__)

MAX_PENDING_BYTES = 256 * 2**20  # that wait to be written
MAX_FETCH_BYTES = 512 * 2**20  # that are fetched and not yet released
FOLLOW_S = 1.0  # how often a process that only reads looks for new blocks
_JOURNAL_SLACK = 4096  # records that a journal may have beyond two a block


class DiskStore:
    """The blocks of one layout under `folder`. Its methods belong to one thread (the engine's).

    Invariant: files take at most `max_bytes`, once the store has been opened as the writer; every
    block found was written whole.
    """

    def __init__(
        self,
        folder: Path,
        layout: StoredLayout,
        *,
        max_bytes: int,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        max_fetch_bytes: int = MAX_FETCH_BYTES,
        num_readers: int = 1,
        follow_s: float = FOLLOW_S,
    ) -> None:
        self.layout = layout
        self.max_blocks = max_bytes // file_bytes(layout)
        self.stats = StoreStats()
        self._max_pending = max(1, max_pending_bytes // layout.block_bytes)
        self._max_fetched = max(1, max_fetch_bytes // layout.block_bytes)
        self._follow_s = follow_s
        self._folder = StoreFolder(folder, layout)
        self._followed = JournalReader(self._folder.journal_path, layout.digest)
        self._journal = Journal(self._folder.journal_path, layout.digest)
        self._index = StoreIndex()
        self._changed = threading.Condition()  # guards all below, the index and the stats
        self._mode = StoreMode.OFF
        self._jobs: deque[partial[None]] = deque()  # of the writer
        self._is_writing = False
        self._pending: set[bytes] = set()  # keys of blocks that wait to be written
        self._fetches: deque[Fetch] = deque()
        self._num_fetched = 0  # blocks that fetches hold, or will
        self.num_fetches_ended = 0
        self._is_closing = False
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        self._threads: list[threading.Thread] = []
        self._open()
        if self._mode is not StoreMode.OFF:
            self._start_threads(num_readers)

    # --- the engine's side ------------------------------------------------------------------------

    @property
    def mode(self) -> StoreMode:
        """What it does with its folder now."""
        return self._mode

    def fileno(self) -> int:
        """Readable when a fetch may be done; then call `collect`."""
        return self._wake_r

    def collect(self) -> None:
        """Make `fileno` unreadable until another fetch is done."""
        with suppress(BlockingIOError):
            os.read(self._wake_r, 4096)

    def longest(self, blocks: Sequence[Block]) -> int:
        """How many of a sequence's first blocks can be fetched."""
        with self._changed:
            return self._index.longest(blocks)

    def note_use(self, blocks: Sequence[Block]) -> int:
        """A sequence's first blocks are used again: how many of them need not be saved, as they
        are here or will be."""
        with self._changed:
            num_found = self._index.longest(blocks)
            if num_found:
                self._use(blocks[num_found - 1].key)
            while num_found < len(blocks) and blocks[num_found].key in self._pending:
                num_found += 1
            return num_found

    def num_accepted(self) -> int:
        """How many blocks `save` would take now."""
        with self._changed:
            is_writer = self._mode is StoreMode.WRITER and not self._is_closing
            return self._max_pending - len(self._pending) if is_writer else 0

    def save(self, block: Block, payload: Payload) -> bool:
        """Write a block some time soon, unless it is here; parents first. False if it was dropped:
        nobody writes here, the queue is full, or the block before it is not here. The payload
        ([layout.block_bytes] uint8, contiguous) is the store's from here on."""
        assert payload.nbytes == self.layout.block_bytes, f"{payload.nbytes} bytes are no block"
        with self._changed:
            if block.key in self._index or block.key in self._pending:
                return True
            if self._mode is not StoreMode.WRITER or self._is_closing:
                return False
            if len(self._pending) >= self._max_pending or not self._has(block.parent):
                self.stats.num_dropped += 1
                return False
            self._pending.add(block.key)
            self._jobs.append(partial(self._write, block, payload))
            self._changed.notify_all()
            return True

    def fetch(self, blocks: Sequence[Block]) -> Fetch:
        """Begin to read consecutive blocks of a sequence; of more than fit the bound on fetched
        bytes, only the first ones. Poll `is_done`."""
        with self._changed:
            num_found = self._index.longest(blocks)
            if num_found:
                self._use(blocks[num_found - 1].key)
            fetch = Fetch(self, blocks[: min(num_found, self._max_fetched)])
            if not fetch.blocks or self._is_closing or self._mode is StoreMode.OFF:
                fetch.is_done = True
            else:
                self._fetches.append(fetch)
                self._changed.notify_all()
            return fetch

    def release(self, fetch: Fetch) -> None:
        """See Fetch.release."""
        with self._changed:
            if fetch.is_released:
                return
            fetch.is_released = True
            if fetch in self._fetches:  # not begun
                self._fetches.remove(fetch)
                fetch.is_done = True
            elif fetch.is_done:
                self._forget_payloads(fetch)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was saved is written; False if it took too long. Not for the engine's
        loop."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what waits, as far as the time allows, and let go of the folder."""
        end_s = time.monotonic() + timeout_s
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            for fetch in self._fetches:
                fetch.is_done = True
            self._fetches.clear()
            self._changed.notify_all()
            self._changed.wait_for(self._is_idle, timeout_s)
            self.stats.num_dropped += len(self._pending)
            self._jobs.clear()
            self._pending.clear()
            self._mode = StoreMode.OFF
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.1, end_s - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):  # else a disk hangs
            self._journal.close()
            self._folder.unlock()
        os.close(self._wake_w)
        os.close(self._wake_r)

    def describe(self) -> dict[str, Any]:
        """Its state and counters as plain data."""
        with self._changed:
            return {
                "mode": self._mode.value,
                "num_blocks": len(self._index),
                "max_blocks": self.max_blocks,
                "num_pending": len(self._pending),
                "num_bytes": len(self._index) * file_bytes(self.layout),
                **asdict(self.stats),
            }

    def _is_idle(self) -> bool:
        return not self._jobs and not self._is_writing

    def _has(self, key: bytes | None) -> bool:
        return key is None or key in self._index or key in self._pending

    def _use(self, key: bytes) -> None:
        self._index.touch(key)
        if self._mode is StoreMode.WRITER and not self._is_closing:
            self._jobs.append(partial(self._note, Record(USED, key)))
            self._changed.notify_all()

    def _forget_payloads(self, fetch: Fetch) -> None:
        self._num_fetched -= len(fetch.blocks)
        fetch.payloads = []
        self._changed.notify_all()

    # --- opening ----------------------------------------------------------------------------------

    def _open(self) -> None:
        """Become the writer, or a reader; off where neither can be."""
        try:
            with suppress(PermissionError):  # what is there can perhaps be read
                self._folder.prepare()
            self._become_writer_or_reader()
        except OSError as error:
            self._mode = StoreMode.OFF
            log.warning("the KV store %s is off: %s", self._folder.path, error)

    def _become_writer_or_reader(self) -> None:
        try:
            if self._folder.try_lock():
                self._become_writer()
                return
            reason = "another process writes it"
            self._mode = StoreMode.READER
        except OSError as error:
            reason = f"it cannot be written ({error})"
            self._mode = StoreMode.FAILED
            self._folder.unlock()
        self._follow()
        os.scandir(self._folder.path).close()  # raises where nothing can be read
        log.warning("the KV store %s is only read: %s", self._folder.path, reason)

    def _become_writer(self) -> None:
        """Make index and journal agree with the files. Raises OSError."""
        index, num_lost, num_corrupt = self._index_of_files()
        self._journal.rewrite(index.in_order())
        with self._changed:
            self._index, self._mode = index, StoreMode.WRITER
            self.stats.num_lost += num_lost
            self.stats.num_corrupt += num_corrupt
            num_over = len(index) - self.max_blocks
        for _ in range(num_over):
            self._evict(None)

    def _index_of_files(self) -> tuple[StoreIndex, int, int]:
        """The journal's index without blocks that have no file, with files that it lacks; and how
        many were lost, and corrupt."""
        index = StoreIndex()
        reader = JournalReader(self._folder.journal_path, self.layout.digest)
        _replay(reader.read()[1], index)
        files = self._folder.tidy()
        lost = index.keys() - files
        for key in lost:
            index.remove(key)
        num_corrupt = 0
        for key in files - index.keys():
            try:
                block = read_header(self._folder.path_of(key), self.layout)
                if block.key != key:
                    raise CorruptBlock("another block")
                index.add(key, block.parent)
            except (CorruptBlock, OSError) as error:
                num_corrupt += 1
                self._remove_corrupt(key, error)
        return index, len(lost), num_corrupt

    def _follow(self) -> None:
        """Take in what the writer's journal says. Raises OSError."""
        is_new, records = self._followed.read()
        with self._changed:
            if is_new:
                self._index = StoreIndex()
            _replay(records, self._index)

    # --- the writer's thread ----------------------------------------------------------------------

    def _start_threads(self, num_readers: int) -> None:
        targets = [self._write_loop, *[self._read_loop] * num_readers]
        for target in targets:
            thread = threading.Thread(target=target, name="stemma-kv-store", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _write_loop(self) -> None:
        try:
            self._read_along()
            while (job := self._next_job()) is not None:
                job()
        except Exception as error:  # whatever it is: the engine goes on
            self._stop_writing(error)

    def _read_along(self) -> None:
        """While another process writes: learn of its blocks, and take over when it has gone."""
        while self._mode is StoreMode.READER:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing, self._follow_s)
                if self._is_closing:
                    return
            if self._folder.try_lock():
                self._become_writer()
                log.warning("the KV store %s is written from here on", self._folder.path)
            else:
                self._follow()

    def _next_job(self) -> partial[None] | None:
        """Wait for work; None at the end."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._jobs or self._is_closing)
            if not self._jobs:
                return None
            self._is_writing = True
            return self._jobs.popleft()

    def _write(self, block: Block, payload: Payload) -> None:
        started = time.perf_counter()
        with self._changed:
            is_rooted = block.parent is None or block.parent in self._index
        is_saved = is_rooted and self._make_room(block.parent)
        if is_saved:
            self._write_file(block, payload)
            self._note(Record(ADDED, block.key, block.parent))
        with self._changed:
            self._pending.discard(block.key)
            if is_saved:
                self._index.add(block.key, block.parent)
                self.stats.num_saved += 1
            else:
                self.stats.num_dropped += 1
            self.stats.write_s += time.perf_counter() - started

    def _write_file(self, block: Block, payload: Payload) -> None:
        path = self._folder.path_of(block.key)
        try:
            write_block(path, self.layout, block, payload)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700)
            write_block(path, self.layout, block, payload)

    def _make_room(self, parent: bytes | None) -> bool:
        """Whether one more block is within the bound, the oldest given up where it was not."""
        while len(self._index) >= self.max_blocks:
            if not self._evict(parent):
                return False
        return True

    def _evict(self, keep: bytes | None) -> bool:
        with self._changed:
            key = self._index.oldest(keep)
            if key is None:
                return False
            self._index.remove(key)
            self.stats.num_evicted += 1
        self._remove(key)
        return True

    def _remove(self, key: bytes) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._folder.path_of(key))
        self._note(Record(GONE, key))

    def _note(self, record: Record) -> None:
        self._journal.append(record)
        if self._journal.num_records > 2 * len(self._index) + _JOURNAL_SLACK:
            with self._changed:
                blocks = list(self._index.in_order())
            self._journal.rewrite(blocks)

    def _stop_writing(self, error: Exception) -> None:
        with self._changed:
            if self._mode in (StoreMode.WRITER, StoreMode.READER):
                self._mode = StoreMode.FAILED
                self.stats.num_dropped += len(self._pending)
                what = f"{type(error).__name__}: {error}"
                log.warning("the KV store %s is only read now: %s", self._folder.path, what)
            self._jobs.clear()
            self._pending.clear()
            self._is_writing = False
            self._changed.notify_all()

    # --- the readers' threads ---------------------------------------------------------------------

    def _read_loop(self) -> None:
        while (fetch := self._next_fetch()) is not None:
            try:
                self._read(fetch)
            except Exception:  # the request that waits for it computes instead
                log.exception("blocks of the KV store could not be read")
            with self._changed:
                fetch.is_done = True
                self.num_fetches_ended += 1
                if fetch.is_released:
                    self._forget_payloads(fetch)
                if not self._is_closing:
                    with suppress(BlockingIOError):
                        os.write(self._wake_w, b"\0")

    def _next_fetch(self) -> Fetch | None:
        """Wait for a fetch that fits the bound; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or self._can_fetch())
            if self._is_closing:
                return None
            fetch = self._fetches.popleft()
            self._num_fetched += len(fetch.blocks)
            return fetch

    def _can_fetch(self) -> bool:
        if not self._fetches:
            return False
        return self._num_fetched + len(self._fetches[0].blocks) <= self._max_fetched

    def _read(self, fetch: Fetch) -> None:
        paths = [self._folder.path_of(block.key) for block in fetch.blocks]
        for path in paths[1:]:
            will_read(path)
        for block, path in zip(fetch.blocks, paths, strict=True):
            if fetch.is_released or self._is_closing:
                return
            started = time.perf_counter()
            try:
                payload = read_block(path, self.layout, block)
            except (CorruptBlock, OSError) as error:
                self._drop(block.key, error)
                return
            with self._changed:
                fetch.payloads.append(payload)
                self.stats.num_fetched += 1
                self.stats.read_s += time.perf_counter() - started

    def _drop(self, key: bytes, error: Exception) -> None:
        """A block could not be read: it is not found any more."""
        is_gone = isinstance(error, FileNotFoundError)
        with self._changed:
            self._index.remove(key)
            self.stats.num_lost += is_gone
            self.stats.num_corrupt += not is_gone
            is_writer = self._mode is StoreMode.WRITER and not self._is_closing
            if is_writer:
                self._jobs.append(partial(self._remove, key))
                self._changed.notify_all()
        if not is_gone:
            log.warning("KV block %s was dropped: %s", self._folder.path_of(key), error)

    def _remove_corrupt(self, key: bytes, error: Exception) -> None:
        path = self._folder.path_of(key)
        log.warning("KV block %s was dropped: %s", path, error)
        with suppress(OSError):
            os.unlink(path)


def _replay(records: Iterable[Record], index: StoreIndex) -> None:
    for record in records:
        if record.kind == ADDED:
            index.add(record.key, record.parent)
        elif record.kind == GONE:
            index.remove(record.key)
        else:
            index.touch(record.key)
