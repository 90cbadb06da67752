"""Redis (or Valkey) as a place for KV blocks: SET and GET of values, a stream of their keys.

    put     SET block; XADD its key to the layout's stream
    get     GET
    news    XREAD the stream: which blocks there are

Which blocks Redis evicts is its own policy's choice (`maxmemory-policy allkeys-lru`).

Needs the package `redis`; only this file imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....errors import InvalidRequest, MissingDependency
from ..disk.block_key import KEY_BYTES, Block, StoredLayout
from .remote_store import ANSWER_S, News

MAX_KEYS = 1_000_000  # of the stream; beyond, the oldest are forgotten by those who come
_FOLLOW_MS = 500
_PAGE = 4096  # keys of the stream read at a time


class RedisClient:
    """Connections to one server, one a thread that uses it. See RemoteClient."""

    name = "Redis"
    ask: Callable[[Sequence[bytes]], list[bool]] | None = None

    def __init__(self, url: str, layout: StoredLayout) -> None:
        """`url`: redis://HOST:PORT/DB, rediss:// or unix://PATH. Raises MissingDependency,
        InvalidRequest; nothing for a server that does not answer."""
        self._redis = _connected(url)
        self._prefix = b"stemma:kv:" + layout.digest.hex().encode() + b":"

    def name_of(self, key: bytes) -> bytes:
        """What Redis knows a block by."""
        return self._prefix + key

    def get(self, key: bytes) -> bytes | None:
        data: bytes | None = self._redis.get(self.name_of(key))
        return data

    def put(self, block: Block, value: bytes) -> bool:
        self._redis.set(self.name_of(block.key), value)
        told = {b"k": block.key, b"p": block.parent or b""}
        self._redis.xadd(self._prefix + b"keys", told, maxlen=MAX_KEYS, approximate=True)
        return True

    def delete(self, key: bytes) -> None:
        self._redis.delete(self.name_of(key))

    def news(self, cursor: bytes | None, wait: bool) -> News:
        last = cursor or b"0"
        block_ms = _FOLLOW_MS if wait else None
        answer = self._redis.xread({self._prefix + b"keys": last}, count=_PAGE, block=block_ms)
        entries = answer[0][1] if answer else []
        blocks = []
        for _, told in entries:
            key, parent = told.get(b"k", b""), told.get(b"p", b"")
            if len(key) == KEY_BYTES and len(parent) in (0, KEY_BYTES):
                blocks.append((key, parent or None))
        return News(blocks, entries[-1][0] if entries else last, len(entries) < _PAGE)

    def close(self) -> None:
        self._redis.close()


def _connected(url: str) -> Any:
    try:
        import redis
    except ImportError as error:
        raise MissingDependency("redis", "redis", "a KV store in Redis") from error
    make: Callable[..., Any] = redis.Redis.from_url
    try:
        return make(url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S)
    except ValueError as error:
        raise InvalidRequest.of("kv_store", url, f"redis://HOST:PORT/DB ({error})") from error
