"""Mooncake's store as a place for KV blocks, spoken to by a process of its own.

    engine's process           worker (mooncake_worker.py)      Mooncake
    name  -- pipe ------------>  get_into, put_from  ---------->  master: where it lies
    block <- shared memory --->  its one registered buffer <--->  storage nodes: the bytes

Why not a thread: `setup` and `close` hold the interpreter's lock, for 90 s where no master answers
(0.3.13), and a call that has begun cannot be given up. The library also listens on all addresses,
and whoever connects may read and write what memory it was given (the TCP transport has no keys). A
process is killed when it is late, and has nothing but one block.

After a failed transfer bytes may still arrive: the memory is given up together with the process,
and what the engine checks and uses is always its own copy.

Mooncake does not tell which blocks it has: they are asked for (`remote_store.py`). Which ones it
evicts is its master's choice.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from urllib.parse import parse_qsl, urlsplit

from ....errors import InvalidRequest, MissingDependency
from ....piped_process import PipedProcess, ProcessStopped, framed
from ..disk.block_file import file_bytes
from ..disk.block_key import Block, StoredLayout
from .remote_store import ANSWER_S, News

DEFAULT_PORT = 50051
WORKER_COMMAND = (sys.executable, "-P", "-m", "stemma.runtime.memory.remote.mooncake_worker")
JOIN, GET, PUT, DELETE, ASK = b"J", b"G", b"P", b"D", b"A"  # how a question begins
_PURPOSE = "a KV store in Mooncake"
_START_S = 30.0  # until the library is loaded (0.2 s on an idle machine)
_JOIN_S = 6.0  # until the master knows the worker (0.1 s)
_LOOK_S = 0.5  # how often is looked whether the worker lives

# mooncake-store/include/types.h: ErrorCode. All others mean that the transfer may go on.
_ABSENT = (-703, -704, -707)  # not yet whole, not found, evicted while it was read
_WRONG_SIZE = -600  # it is larger than a block
_EXISTS = -705
_NO_ROOM = (-200, -1700)  # no memory, or no more for this tenant


@dataclass(frozen=True, slots=True)
class MooncakeAddress:
    """Where the master is, and how its nodes are reached."""

    host: str
    port: int
    protocol: str = "tcp"
    devices: str = ""  # of RDMA, separated by commas
    metadata: str = "P2PHANDSHAKE"  # or a metadata server's URL

    @classmethod
    def of(cls, url: str) -> MooncakeAddress:
        """mooncake://HOST:PORT?protocol=rdma&devices=NAMES&metadata=URL. Raises InvalidRequest."""
        parts = urlsplit(url)
        try:
            options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True))
        except ValueError:  # as for no options at all
            options = {"": ""} if parts.query else {}
        try:
            if not parts.hostname or parts.path.strip("/") or "@" in parts.netloc:
                raise ValueError("no host and port")
            if options.get("protocol", "tcp") not in ("tcp", "rdma"):
                raise ValueError("no such protocol")
            if unknown := options.keys() - {"protocol", "devices", "metadata"}:
                raise ValueError(f"no such option: {min(unknown)!r}")
            return cls(parts.hostname, parts.port or DEFAULT_PORT, **options)
        except ValueError as error:
            form = "mooncake://HOST:PORT, with ?protocol=tcp or rdma, &devices=NAMES, &metadata=URL"
            raise InvalidRequest.of("kv_store", url, f"{form} ({error})") from error


class MooncakeClient:
    """Owns the worker and the memory of one block that they share. See RemoteClient.

    One question at a time. Whatever goes wrong ends the worker; `news` starts another one.
    """

    name = "Mooncake"

    def __init__(self, url: str, layout: StoredLayout) -> None:
        """Raises InvalidRequest, and MissingDependency where the library cannot be loaded; nothing
        for a master that does not answer."""
        self._address = MooncakeAddress.of(url)
        if sys.platform != "linux":
            raise MissingDependency("Linux", "mooncake", _PURPOSE)
        self._num_bytes = file_bytes(layout)
        self._prefix = "stemma:kv:" + layout.digest.hex() + ":"
        self._lock = threading.Lock()  # of all below, but for `close`
        self._process: PipedProcess | None = None
        self._memory: mmap.mmap | None = None  # [num_bytes], of this process alone
        self._has_joined = False
        self._is_closed = threading.Event()
        with self._lock:
            self._start()

    def name_of(self, key: bytes) -> str:
        """What Mooncake knows a block by."""
        return self._prefix + key.hex()

    def get(self, key: bytes) -> bytes | None:
        with self._lock:
            (status,) = self._statuses(GET, [key])
            if status in _ABSENT:
                return None
            if status == _WRONG_SIZE:
                return b""
            if status < 0:
                raise self._failure(status)
            assert self._memory is not None
            return self._memory[:status]

    def put(self, block: Block, value: bytes) -> bool:
        with self._lock:
            if self._memory is not None:
                self._memory[:] = value
            (status,) = self._statuses(PUT, [block.key])
            if status not in (0, _EXISTS, *_NO_ROOM):
                raise self._failure(status)
            return status not in _NO_ROOM

    def delete(self, key: bytes) -> None:
        with self._lock:
            self._statuses(DELETE, [key])

    def ask(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            statuses = self._statuses(ASK, keys)
            if min(statuses) < 0:
                raise self._failure(min(statuses))
            return [status == 1 for status in statuses]

    def news(self, cursor: bytes | None, wait: bool) -> News:
        if wait:
            self._is_closed.wait(_LOOK_S)
        with self._lock:
            if not wait:
                self._join()
            if self._process is None or self._process.has_ended:
                raise self._ended("its process has ended")
        return News([], b"", True)

    def close(self) -> None:
        self._is_closed.set()
        if (process := self._process) is not None:
            process.kill()  # somebody may wait for its reply
        with self._lock:
            self._end()

    # --- under the lock ---------------------------------------------------------------------------

    def _start(self) -> None:
        """Raises OSError, MissingDependency."""
        if self._is_closed.is_set():
            raise ConnectionError("it is closed")
        descriptor = os.memfd_create("stemma-kv-block")
        try:
            os.ftruncate(descriptor, self._num_bytes)
            self._memory = mmap.mmap(descriptor, self._num_bytes)
            command = [*WORKER_COMMAND, str(descriptor)]
            self._process = PipedProcess(command, 0, descriptors=[descriptor])
            if self._is_closed.is_set():  # `close` may have found none to kill, and waits
                self._process.kill()
        finally:
            os.close(descriptor)
        if error := self._exchange(b"", _START_S).decode():
            self._end()
            package = f"mooncake-transfer-engine ({error})"
            raise MissingDependency(package, "mooncake", _PURPOSE)

    def _join(self) -> None:
        """Have a worker that the master knows."""
        if self._process is None:
            self._start()
        if not self._has_joined:
            settings = json.dumps(asdict(self._address)).encode()
            if error := self._exchange(JOIN + settings, _JOIN_S).decode():
                raise ConnectionError(error)
            self._has_joined = True

    def _statuses(self, question: bytes, keys: Sequence[bytes]) -> tuple[int, ...]:
        names = "\n".join(map(self.name_of, keys)).encode()
        return struct.unpack(f"<{len(keys)}q", self._exchange(question + names, ANSWER_S))

    def _exchange(self, question: bytes, limit_s: float) -> bytes:
        """Raises ConnectionError; then there is no worker any more."""
        if self._process is None:
            raise ConnectionError("it was lost")
        try:
            reply = self._process.exchange(framed(question), limit_s)
        except TimeoutError as error:
            raise self._ended(f"no answer in {limit_s:g} s") from error
        except (ProcessStopped, OSError) as error:
            raise self._ended("its process has stopped") from error
        if reply is None:
            raise self._ended("its process has ended")
        return reply

    def _failure(self, status: int) -> ConnectionError:
        return self._ended(f"Mooncake's error {status}")

    def _ended(self, why: str) -> ConnectionError:
        self._end()
        return ConnectionError(why)

    def _end(self) -> None:
        """Forget the worker and its memory, into which bytes may still come."""
        process, self._process = self._process, None
        memory, self._memory = self._memory, None
        self._has_joined = False
        if process is not None:
            process.kill()
            process.end()
        if memory is not None:
            memory.close()
