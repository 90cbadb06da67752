"""KV written by NIXL (UCX) from one engine's memory into another's, by a process of its own a side.

    sender's process                                              receiver's process
    piece -> shared memory -> worker  == UCX ==>  worker -> shared memory = the stream's blocks

Why not a thread: UCX listens on TCP whatever it writes through, and checks neither who connects nor
where he writes; its progress thread takes two thirds of a core while nothing comes; and its
libraries end with a fault (nixl-cu12 1.5.1, without a GPU). A worker has nothing but the blocks of
streams on their way, is killed when it is late, and ends without a destructor.

NIXL's own notifications are not used: they have to be polled for. The sender says over ZeroMQ what
it has written, with its epoch and a running number, when NIXL says that the bytes are there. The
place of a stream that was withdrawn is never another one's: a write that comes late fails.
"""

from __future__ import annotations

import base64
import logging
import mmap
import os
import struct
import sys
import threading
import time
from collections import deque
from contextlib import suppress

import numpy as np

from ....errors import MissingDependency
from ....piped_process import PipedProcess, ProcessStopped, framed
from ..disk.block_file import Payload
from ..disk.block_key import BlockLayout
from . import wire
from .piece_places import Place, spans_of
from .written_memory import NIXL, StreamMemory

log = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-P", "-m", "stemma.runtime.memory.peers.nixl_worker")
OFFER, WITHDRAW, OPEN, WRITE, CLOSE = b"O", b"W", b"N", b"P", b"C"  # how a question begins
OFFERED = struct.Struct("<iQ")  # a descriptor of this process, number of bytes
ADDRESS = struct.Struct("<Q")
NUMBER = struct.Struct("<I")  # of an opened memory
_START_S = 30.0  # until the library is loaded (0.5 s on an idle machine)
_ANSWER_S = 2.0  # for one piece: less than the silence after which peers are gone (wire.SILENCE_S)
_RETRY_S = 10.0  # between two starts of a worker (guess)


class NixlWorker:
    """Owns the process that has NIXL's agent, and the memory of one piece that both see. Of one
    thread, but for `close`. Whatever goes wrong ends the process; another one is started."""

    def __init__(self) -> None:
        """Raises MissingDependency where the library cannot be loaded."""
        if sys.platform != "linux":
            raise MissingDependency("Linux", "nixl", "KV written by NIXL")
        self._descriptor = os.memfd_create("stemma-kv-piece")
        os.ftruncate(self._descriptor, wire.MAX_PIECE_BYTES)
        self.piece = np.frombuffer(mmap.mmap(self._descriptor, wire.MAX_PIECE_BYTES), np.uint8)
        self.unused: deque[bytes] = deque()  # numbers of what is no longer open
        self.number = 0  # of processes that were started: what an earlier one knew is gone
        self._process: PipedProcess | None = None
        self._started_s = 0.0
        self._is_closed = False
        if error := self._start():
            self.close()
            raise MissingDependency(f"nixl ({error})", "nixl", "KV written by NIXL")

    def ask(self, question: bytes) -> bytes:
        """Its answer; empty where it cannot, or there is no worker now."""
        process = self._process
        if process is None:
            self.unused.clear()
            if time.monotonic() - self._started_s > _RETRY_S:
                self._started_s = time.monotonic()
                threading.Thread(target=self._start, name="stemma-nixl", daemon=True).start()
            return b""
        questions = [CLOSE + self.unused.popleft() for _ in range(len(self.unused))]
        for each in [*questions, question]:
            reply = self._reply(process, each, _ANSWER_S)
            if reply is None:
                self._process = None
                return b""
        return reply or b""

    def close(self) -> None:
        """End it; nobody asks any more."""
        self._is_closed = True
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.end()
        os.close(self._descriptor)

    def _start(self) -> str:
        """Why there is none; nothing where there is."""
        self._started_s = time.monotonic()
        try:
            command = [*WORKER_COMMAND, str(self._descriptor)]
            process = PipedProcess(command, 0, descriptors=[self._descriptor])
        except OSError as error:
            return str(error)
        reply = self._reply(process, b"", _START_S)
        if reply is None:
            return "its process has ended"
        if reply or self._is_closed:
            process.end()
            return reply.decode()
        self.number += 1
        self._process = process
        return ""

    def _reply(self, process: PipedProcess, question: bytes, limit_s: float) -> bytes | None:
        """None: the process was ended."""
        reply = None
        with suppress(TimeoutError, ProcessStopped, OSError):
            reply = process.exchange(framed(question), limit_s)
        if reply is None:
            process.kill()
            log.warning("NIXL's process has ended (%d): KV goes by ZeroMQ", process.end())
        return reply


class NixlOffers:
    """Of memory into which NIXL may write: a stream's blocks, from `offer` to `withdraw`."""

    kind = NIXL

    def __init__(self) -> None:
        """Raises MissingDependency."""
        self._worker = NixlWorker()

    def offer(self, memory: StreamMemory) -> str | None:
        reply = self._worker.ask(OFFER + OFFERED.pack(memory.descriptor, memory.num_bytes))
        return f"{NIXL} {base64.b64encode(reply).decode()}" if reply else None

    def withdraw(self, offer: str) -> None:
        self._worker.ask(WITHDRAW + _offered(offer)[: ADDRESS.size])

    def close(self) -> None:
        self._worker.close()


class NixlMemory:
    """What NixlOffers has offered, as the sender's worker knows it."""

    def __init__(self, offer: str, layout: BlockLayout, worker: NixlWorker) -> None:
        """Raises ValueError for what is no such offer."""
        self._layout = layout
        self._worker = worker
        self._of, self._number = 0, b""
        offered = _offered(offer)
        self._number = worker.ask(OPEN + offered)
        if not self._number:
            raise ValueError("NIXL cannot reach it")
        self._of = worker.number

    def write(self, place: Place, token: int, kv: Payload) -> bool:
        if kv.nbytes > len(self._worker.piece) or self._of != self._worker.number:
            return False
        spans = spans_of(self._layout, place, token, kv.shape[1])
        self._worker.piece[: kv.nbytes] = kv.reshape(-1)
        return bool(self._worker.ask(WRITE + self._number + spans.tobytes()))

    def __del__(self) -> None:
        if self._of == self._worker.number:  # by any thread
            self._worker.unused.append(self._number)


def _offered(offer: str) -> bytes:
    return base64.b64decode(offer.partition(" ")[2], validate=True)
