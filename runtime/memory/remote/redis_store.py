"""KV blocks in Redis (or Valkey): what one engine has computed, every other one can fetch.

    engine's thread    longest, save, fetch: no I/O, no waiting
    writer's thread    SET block; XADD its key to the layout's stream
    reader's thread    GET, checked -> Fetch
    follower's thread  XREAD the stream: which blocks there are

A block's value is what its file would contain (`disk/block_file.py`): its name, its tokens and
checksums are held against what was asked for, and whatever differs is a miss. A block is found only
behind all blocks before it. Which blocks Redis evicts is its own policy's choice (`maxmemory-policy
allkeys-lru`): one that is gone is forgotten when it is asked for. While Redis does not answer,
nothing is found or saved, and it is tried again every few seconds.

Needs the package `redis`; only this file imports it.
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
from functools import partial
from typing import Any

from ....errors import InvalidRequest, MissingDependency
from ..disk.block_file import CorruptBlock, Payload, packed, unpacked
from ..disk.block_key import KEY_BYTES, Block, BlockLayout
from ..disk.block_store import Fetch, StoreMode, StoreStats
from ..disk.index import StoreIndex

__all__ = ["RedisStore"]

log = logging.getLogger(__name__)

MAX_PENDING_BYTES = 256 * 2**20  # that wait to be written
MAX_FETCH_BYTES = 512 * 2**20  # that are fetched and not yet released
MAX_KEYS = 1_000_000  # of the stream; beyond, the oldest are forgotten by those who come
ANSWER_S = 2.0  # that Redis may take for one block; then it is computed
RETRY_S = 2.0
_FOLLOW_MS = 500
_PAGE = 4096  # keys of the stream read at a time


class RedisStore:
    """The blocks of one layout at a Redis server. Its methods belong to one thread (the engine's).

    Nothing here raises after the constructor, and the constructor raises nothing for a server that
    does not answer.
    """

    def __init__(
        self,
        url: str,
        layout: BlockLayout,
        *,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        max_fetch_bytes: int = MAX_FETCH_BYTES,
    ) -> None:
        """`url`: redis://HOST:PORT/DB, rediss:// or unix://PATH. Raises MissingDependency,
        InvalidRequest."""
        self.layout = layout
        self.stats = StoreStats()
        self.num_fetches_ended = 0
        self._clients = [_client(url) for _ in range(3)]  # one a thread
        self._name = b"stemma:kv:" + layout.digest.hex().encode() + b":"
        self._max_pending = max(1, max_pending_bytes // layout.block_bytes)
        self._max_fetched = max(1, max_fetch_bytes // layout.block_bytes)
        self._index = StoreIndex()
        self._last = b"0"  # entry of the stream that was read
        self._changed = threading.Condition()  # guards all below, the index and the stats
        self._mode = StoreMode.FAILED  # until the follower has reached it
        self._saves: deque[tuple[Block, Payload]] = deque()
        self._is_writing = False
        self._pending: set[bytes] = set()
        self._fetches: deque[Fetch] = deque()
        self._num_fetched = 0
        self._is_closing = False
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        loops = (self._write_loop, self._read_loop, self._follow_loop)
        self._threads = [
            threading.Thread(target=partial(loop, client), name="stemma-redis", daemon=True)
            for loop, client in zip(loops, self._clients)
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
            return self._index.longest(blocks) if self._mode is StoreMode.WRITER else 0

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
            num_found = self._index.longest(blocks)
            fetch = Fetch(self, blocks[: min(num_found, self._max_fetched)])
            if not fetch.blocks or self._is_closing or self._mode is not StoreMode.WRITER:
                fetch.is_done = True
            else:
                self._fetches.append(fetch)
                self._changed.notify_all()
            return fetch

    def release(self, fetch: Fetch) -> None:
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
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
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
            self._saves.clear()
            self._pending.clear()
            self._mode = StoreMode.OFF
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.1, end_s - time.monotonic()))
        for client in self._clients:
            client.close()
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

    def _forget_payloads(self, fetch: Fetch) -> None:
        self._num_fetched -= len(fetch.blocks)
        fetch.payloads = []
        self._changed.notify_all()

    # --- the threads' side ------------------------------------------------------------------------

    def _stop_using(self, error: Exception) -> None:
        """Redis does not answer: nothing is found until the follower has reached it again, and has
        learnt anew what it has; it may have been started without its data."""
        with self._changed:
            was_open = self._mode is StoreMode.WRITER
            self._index, self._last = StoreIndex(), b"0"
            if self._mode is not StoreMode.OFF:
                self._mode = StoreMode.FAILED
            self.stats.num_dropped += len(self._saves)
            self._pending.difference_update(block.key for block, _ in self._saves)
            self._saves.clear()
            self._changed.notify_all()
        if was_open:
            log.warning("the KV store in Redis does not answer, and is not used: %s", error)

    def _write_loop(self, client: Any) -> None:
        while (save := self._next_save()) is not None:
            block, payload = save
            started = time.perf_counter()
            try:
                self._write(client, block, payload)
                failure = None
            except Exception as error:  # whatever the library raises
                failure = error
            with self._changed:
                self._is_writing = False
                self._pending.discard(block.key)
                if failure is None:
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

    def _write(self, client: Any, block: Block, payload: Payload) -> None:
        client.set(self._name + block.key, packed(self.layout, block, payload))
        told = {b"k": block.key, b"p": block.parent or b""}
        client.xadd(self._name + b"keys", told, maxlen=MAX_KEYS, approximate=True)

    def _read_loop(self, client: Any) -> None:
        while (fetch := self._next_fetch()) is not None:
            try:
                self._read(client, fetch)
            except Exception as error:  # the request that waits for it computes instead
                self._stop_using(error)
            with self._changed:
                fetch.is_done = True
                self.num_fetches_ended += 1
                if fetch.is_released:
                    self._forget_payloads(fetch)
                if not self._is_closing:
                    with suppress(BlockingIOError):
                        os.write(self._wake_w, b"\0")

    def _next_fetch(self) -> Fetch | None:
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

    def _read(self, client: Any, fetch: Fetch) -> None:
        for block in fetch.blocks:
            if fetch.is_released or self._is_closing:
                return
            started = time.perf_counter()
            data = client.get(self._name + block.key)
            try:
                payload = None if data is None else unpacked(data, self.layout, block)
            except CorruptBlock as error:
                payload = None
                log.warning("KV block %s in Redis is not used: %s", block.key.hex(), error)
                with suppress(Exception):
                    client.delete(self._name + block.key)
            with self._changed:
                if payload is None:
                    self._index.remove(block.key)
                    self.stats.num_lost += data is None
                    self.stats.num_corrupt += data is not None
                    return
                fetch.payloads.append(payload)
                self.stats.num_fetched += 1
                self.stats.read_s += time.perf_counter() - started

    def _follow_loop(self, client: Any) -> None:
        while not self._is_closing:
            try:
                self._follow(client)
            except Exception as error:
                self._stop_using(error)
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closing, RETRY_S)

    def _follow(self, client: Any) -> None:
        """Learn which blocks there are behind the last entry of the stream that was read."""
        last = self._last
        block_ms = None if self._mode is StoreMode.FAILED else _FOLLOW_MS
        answer = client.xread({self._name + b"keys": last}, count=_PAGE, block=block_ms)
        entries = answer[0][1] if answer else []
        with self._changed:
            if self._last is not last:
                return  # another thread had no answer meanwhile
            for number, told in entries:
                self._last = number
                key, parent = told.get(b"k", b""), told.get(b"p", b"")
                if len(key) == KEY_BYTES and len(parent) in (0, KEY_BYTES):
                    self._index.add(key, parent or None)
            if len(entries) < _PAGE and self._mode is StoreMode.FAILED:
                self._mode = StoreMode.WRITER


def _client(url: str) -> Any:
    try:
        import redis
    except ImportError as error:
        raise MissingDependency("redis", "redis", "a KV store in Redis") from error
    make: Callable[..., Any] = redis.Redis.from_url
    try:
        return make(url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S)
    except ValueError as error:
        raise InvalidRequest.of("kv_store", url, f"redis://HOST:PORT/DB ({error})") from error
