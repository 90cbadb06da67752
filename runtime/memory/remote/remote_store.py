"""KV blocks at a key/value server: what one engine has computed, every other one can fetch.

    engine's thread    longest, save, fetch: no I/O, no waiting
    writer's thread    put block
    reader's thread    get, checked -> Fetch; of servers that do not tell: is it there?
    follower's thread  which blocks there are; and whether the server is there (again)

A block's value is what its file would contain (`disk/block_file.py`): its name, its tokens and
checksums are held against what was asked for, and whatever differs is a miss. A block is found only
behind all blocks before it. Which blocks the server evicts is its own policy's choice: one that is
gone is forgotten when it is asked for. While the server does not answer, nothing is found or saved,
and it is tried again every few seconds.

A server tells which blocks it has, or has to be asked. In the second case every block may be there:
a fetch begins with the question, which the reader asks between any two blocks, so that a request
for which there is nothing waits for one answer and not behind other requests' blocks.

Knows no server: `redis_client.py`, `mooncake_client.py`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol

from ..disk.block_file import CorruptBlock, Payload, packed, unpacked
from ..disk.block_key import Block, StoredLayout
from ..disk.block_store import Fetch, StoreMode, StoreStats
from ..disk.index import StoreIndex

__all__ = ["ANSWER_S", "News", "RemoteClient", "RemoteStore"]

log = logging.getLogger(__name__)

MAX_PENDING_BYTES = 256 * 2**20  # that wait to be written
MAX_FETCH_BYTES = 512 * 2**20  # that are fetched and not yet released
ANSWER_S = 2.0  # that a server may take for one block; then it is computed
RETRY_S = 2.0


class News(NamedTuple):
    """Blocks that a server has, beyond a place in its list of them."""

    blocks: list[tuple[bytes, bytes | None]]  # key, parent's key
    cursor: bytes  # the place behind them
    is_all: bool  # there were no more


class RemoteClient(Protocol):
    """One server, asked by several threads at once. Each call but `close` may raise anything: the
    server has not answered, within about ANSWER_S."""

    name: str  # of the server, for who reads logs

    def get(self, key: bytes) -> bytes | None:
        """What lies under a block's key, unchecked."""

    def put(self, block: Block, value: bytes) -> bool:
        """False where there was no room."""

    def delete(self, key: bytes) -> None:
        """Nothing happens if it was not there."""

    def news(self, cursor: bytes | None, wait: bool) -> News:
        """What is behind the cursor (None: all), after a while if there is nothing; without `wait`
        at once. Raises where the server cannot be used any more."""

    @property
    def ask(self) -> Callable[[Sequence[bytes]], list[bool]] | None:
        """Which of these keys it has; None where `news` tells."""

    def close(self) -> None:
        """Ends what others wait for."""


class RemoteStore:
    """The blocks of one layout at a server. Its methods belong to one thread (the engine's).

    Nothing here raises.
    """

    def __init__(
        self,
        client: RemoteClient,
        layout: StoredLayout,
        *,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        max_fetch_bytes: int = MAX_FETCH_BYTES,
    ) -> None:
        self.layout = layout
        self.stats = StoreStats()
        self.num_fetches_ended = 0
        self._client = client
        self._max_pending = max(1, max_pending_bytes // layout.block_bytes)
        self._max_fetched = max(1, max_fetch_bytes // layout.block_bytes)
        self._index = StoreIndex()  # blocks that are known to be there
        self._cursor: bytes | None = None  # of the news that the index has
        self._changed = threading.Condition()  # guards all below, the index and the stats
        self._mode = StoreMode.FAILED  # until the follower has reached it
        self._saves: deque[tuple[Block, Payload]] = deque()
        self._is_writing = False
        self._pending: set[bytes] = set()
        self._unasked: deque[Fetch] = deque()  # whose first block may not be there
        self._fetches: deque[Fetch] = deque()
        self._begun: set[Fetch] = set()  # and not yet released: their blocks take memory
        self._is_closing = False
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        self._threads = [
            threading.Thread(target=loop, name="stemma-remote-kv", daemon=True)
            for loop in (self._write_loop, self._read_loop, self._follow_loop)
        ]
        for thread in self._threads:
            thread.start()

    # --- the engine's side ------------------------------------------------------------------------

    @property
    def mode(self) -> StoreMode:
        return self._mode

    def fileno(self) -> int:
        return self._wake_r

    def collect(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_r, 4096)

    def longest(self, blocks: Sequence[Block]) -> int:
        with self._changed:
            return self._num_perhaps_there(blocks) if self._mode is StoreMode.WRITER else 0

    def note_use(self, blocks: Sequence[Block]) -> int:
        with self._changed:
            num_found = self._index.longest(blocks)
            while num_found < len(blocks) and blocks[num_found].key in self._pending:
                num_found += 1
            return num_found

    def num_accepted(self) -> int:
        with self._changed:
            is_open = self._mode is StoreMode.WRITER and not self._is_closing
            return self._max_pending - len(self._pending) if is_open else 0

    def save(self, block: Block, payload: Payload) -> bool:
        assert payload.nbytes == self.layout.block_bytes, f"{payload.nbytes} bytes are no block"
        with self._changed:
            if block.key in self._index or block.key in self._pending:
                return True
            is_open = self._mode is StoreMode.WRITER and not self._is_closing
            has_parent = block.parent is None or block.parent in self._index
            has_parent = has_parent or block.parent in self._pending
            if not is_open or len(self._pending) >= self._max_pending or not has_parent:
                self.stats.num_dropped += 1
                return False
            self._pending.add(block.key)
            self._saves.append((block, payload))
            self._changed.notify_all()
            return True

    def fetch(self, blocks: Sequence[Block]) -> Fetch:
        with self._changed:
            num_blocks = min(self._num_perhaps_there(blocks), self._max_fetched)
            fetch = Fetch(self, blocks[:num_blocks])
            if not fetch.blocks or self._is_closing or self._mode is not StoreMode.WRITER:
                fetch.is_done = True
            else:
                is_there = fetch.blocks[0].key in self._index
                (self._fetches if is_there else self._unasked).append(fetch)
                self._changed.notify_all()
            return fetch

    def release(self, fetch: Fetch) -> None:
        with self._changed:
            if fetch.is_released:
                return
            fetch.is_released = True
            for waiting in (self._unasked, self._fetches):
                if fetch in waiting:
                    waiting.remove(fetch)
                    fetch.is_done = True
            if fetch.is_done:
                self._forget_payloads(fetch)

    def flush(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        end_s = time.monotonic() + timeout_s
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            for fetch in (*self._unasked, *self._fetches):
                fetch.is_done = True
            self._unasked.clear()
            self._fetches.clear()
            self._changed.notify_all()
            self._changed.wait_for(self._is_idle, timeout_s)
            self.stats.num_dropped += len(self._pending)
            self._saves.clear()
            self._pending.clear()
            self._mode = StoreMode.OFF
            self._changed.notify_all()
        self._client.close()
        for thread in self._threads:
            thread.join(max(0.1, end_s - time.monotonic()))
        os.close(self._wake_w)
        os.close(self._wake_r)

    def describe(self) -> dict[str, Any]:
        with self._changed:
            return {
                "mode": self._mode.value,
                "num_blocks": len(self._index),
                "num_pending": len(self._pending),
                "num_bytes": len(self._index) * self.layout.block_bytes,
                **asdict(self.stats),
            }

    def _is_idle(self) -> bool:
        return not self._saves and not self._is_writing

    def _num_perhaps_there(self, blocks: Sequence[Block]) -> int:
        return self._index.longest(blocks) if self._client.ask is None else len(blocks)

    def _forget_payloads(self, fetch: Fetch) -> None:
        self._begun.discard(fetch)
        fetch.payloads = []
        self._changed.notify_all()

    # --- the threads' side ------------------------------------------------------------------------

    def _stop_using(self, error: Exception) -> None:
        """The server does not answer: nothing is found until the follower has reached it again, and
        has learnt anew what it has; it may have been started without its data."""
        with self._changed:
            was_open = self._mode is StoreMode.WRITER
            self._index, self._cursor = StoreIndex(), None
            if self._mode is not StoreMode.OFF:
                self._mode = StoreMode.FAILED
            self.stats.num_dropped += len(self._saves)
            self._pending.difference_update(block.key for block, _ in self._saves)
            self._saves.clear()
            self._changed.notify_all()
        if was_open:
            log.warning(
                "the KV store in %s does not answer, and is not used: %s", self._client.name, error
            )

    def _write_loop(self) -> None:
        while (save := self._next_save()) is not None:
            block, payload = save
            started = time.perf_counter()
            is_saved, failure = False, None
            try:
                is_saved = self._client.put(block, packed(self.layout, block, payload))
            except Exception as error:  # whatever the library raises
                failure = error
            with self._changed:
                self._is_writing = False
                self._pending.discard(block.key)
                if is_saved:
                    self._index.add(block.key, block.parent)
                    self.stats.num_saved += 1
                    self.stats.write_s += time.perf_counter() - started
                else:
                    self.stats.num_dropped += 1
                self._changed.notify_all()
            if failure is not None:
                self._stop_using(failure)

    def _next_save(self) -> tuple[Block, Payload] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._saves or self._is_closing)
            if not self._saves:
                return None
            self._is_writing = True
            return self._saves.popleft()

    def _read_loop(self) -> None:
        while self._has_work():
            fetch = None
            try:
                self._ask()
                if (fetch := self._next_fetch()) is not None:
                    self._read(fetch)
            except Exception as error:  # the request that waits for it computes instead
                self._stop_using(error)
            if fetch is not None:
                with self._changed:
                    self._end(fetch)

    def _has_work(self) -> bool:
        """Wait for some; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or self._unasked or self._can_begin())
            return not self._is_closing

    def _ask(self) -> None:
        """Whether the first blocks of new fetches are there; where not, that is the answer."""
        with self._changed:
            asked = tuple(self._unasked)
            self._unasked.clear()
        if not asked:
            return
        assert self._client.ask is not None, "it has told of all that is fetched"
        are_there = [False] * len(asked)
        try:
            are_there = self._client.ask([fetch.blocks[0].key for fetch in asked])
        except Exception as error:
            self._stop_using(error)  # before those who wait hear of it
            raise
        finally:
            with self._changed:
                for fetch, is_there in zip(asked, are_there, strict=True):
                    if is_there and not fetch.is_released:
                        self._fetches.append(fetch)
                    else:
                        self._end(fetch)

    def _next_fetch(self) -> Fetch | None:
        with self._changed:
            if self._is_closing or not self._can_begin():
                return None
            fetch = self._fetches.popleft()
            self._begun.add(fetch)
            return fetch

    def _can_begin(self) -> bool:
        if not self._fetches:
            return False
        num_begun = sum(len(fetch.blocks) for fetch in self._begun)
        return num_begun + len(self._fetches[0].blocks) <= self._max_fetched

    def _end(self, fetch: Fetch) -> None:
        """Nothing more comes. Called under the lock."""
        fetch.is_done = True
        self.num_fetches_ended += 1
        if fetch.is_released:
            self._forget_payloads(fetch)
        if not self._is_closing:
            with suppress(BlockingIOError):
                os.write(self._wake_w, b"\0")

    def _read(self, fetch: Fetch) -> None:
        for block in fetch.blocks:
            self._ask()
            if fetch.is_released or self._is_closing:
                return
            started = time.perf_counter()
            data = self._client.get(block.key)
            payload = None if data is None else self._checked(data, block)
            with self._changed:
                if payload is None:
                    self.stats.num_lost += data is None and block.key in self._index
                    self.stats.num_corrupt += data is not None
                    self._index.remove(block.key)
                    return
                self._index.add(block.key, block.parent)
                fetch.payloads.append(payload)
                self.stats.num_fetched += 1
                self.stats.read_s += time.perf_counter() - started

    def _checked(self, data: bytes, block: Block) -> Payload | None:
        """The block's payload; None if there is any doubt, and then nobody finds it any more."""
        try:
            return unpacked(data, self.layout, block)
        except CorruptBlock as error:
            where, key = self._client.name, block.key.hex()
            log.warning("KV block %s in %s is not used: %s", key, where, error)
            with suppress(Exception):
                self._client.delete(block.key)
            return None

    def _follow_loop(self) -> None:
        while not self._is_closing:
            try:
                self._follow()
            except Exception as error:
                self._stop_using(error)
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closing, RETRY_S)

    def _follow(self) -> None:
        """Learn which blocks there are beyond those of the last news."""
        cursor = self._cursor
        news = self._client.news(cursor, wait=self._mode is StoreMode.WRITER)
        with self._changed:
            if self._cursor is not cursor:
                return  # another thread had no answer meanwhile
            self._cursor = news.cursor
            for key, parent in news.blocks:
                self._index.add(key, parent)
            if news.is_all and self._mode is StoreMode.FAILED:
                self._mode = StoreMode.WRITER
