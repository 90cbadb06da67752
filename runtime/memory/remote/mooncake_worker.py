"""`python -m stemma.runtime.memory.remote.mooncake_worker DESCRIPTOR`: a client of Mooncake.

Started and asked by `mooncake_client.py`; exchanges frames over standard input and output, and
blocks through the memory that DESCRIPTOR stands for. Its memory is all that it has: what Mooncake
moves is neither looked at nor believed here. When its parent ends, its input ends, and so does it.

Needs the package `mooncake-transfer-engine`, or a variant of it; only this file imports it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import struct
import sys
from contextlib import suppress
from typing import Any

from ....piped_process import output_of_frames, read_frame, write_frame
from .mooncake_client import ASK, DELETE, GET, JOIN, PUT, MooncakeAddress
from .remote_store import ANSWER_S

_LENT_BYTES = 0  # to the pool: blocks lie in storage nodes, and outlive engines
_SETUP_RETRIES = "1"  # of 4.5 s each, where a master accepts but does not answer


def main() -> None:
    """Answer until standard input ends."""
    output = output_of_frames("MC_LOG_LEVEL" not in os.environ)  # statuses say what fails
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", _SETUP_RETRIES)
    worker = _Worker(int(sys.argv[1]))
    with suppress(BrokenPipeError):  # the engine has died, and nobody reads replies
        while (question := read_frame(sys.stdin.buffer)) is not None:
            write_frame(output, worker.reply(question))
    os._exit(0)  # the library's threads may wait for a master that is gone


class _Worker:
    """Owns the client, and the memory of one block. Lifetime: the process's."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, 0)
        self._num_bytes = len(self._memory)
        self._place = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._store: Any = None

    def reply(self, question: bytes) -> bytes:
        """An error's text or nothing, of what is asked first; then statuses."""
        kind, rest = question[:1], question[1:]
        if not kind:
            return _why_missing().encode()
        if kind == JOIN:
            return self._join(MooncakeAddress(**json.loads(rest))).encode()
        names = rest.decode().split("\n")
        statuses = self._exist(names) if kind == ASK else [self._carry_out(kind, names[0])]
        return struct.pack(f"<{len(statuses)}q", *statuses)

    def _carry_out(self, kind: bytes, name: str) -> int:
        if kind == GET:
            return int(self._store.get_into(name, self._place, self._num_bytes))
        if kind == PUT:
            return int(self._store.put_from(name, self._place, self._num_bytes))
        assert kind == DELETE, "no such question"
        return int(self._store.remove(name, True))  # also while others read it

    def _exist(self, names: list[str]) -> list[int]:
        return [int(status) for status in self._store.batch_is_exist(names)]

    def _join(self, address: MooncakeAddress) -> str:
        """Why it cannot; nothing where it can."""
        try:
            own = _own_address(address)
        except OSError as error:
            return f"no master at {address.host}:{address.port} ({error})"
        store = _store_class()()
        master = f"{_bracketed(address.host)}:{address.port}"
        buffers = (_LENT_BYTES, 0)  # and no buffer of its own: blocks go through ours
        how = (address.protocol, address.devices)
        if status := store.setup(_bracketed(own), address.metadata, *buffers, *how, master):
            return f"the master does not take it ({status})"
        if status := store.register_buffer(self._place, self._num_bytes):
            return f"its memory cannot be registered ({status})"
        self._store = store
        return ""


def _store_class() -> Any:
    from mooncake.store import MooncakeDistributedStore

    return MooncakeDistributedStore


def _why_missing() -> str:
    try:
        _store_class()
    except ImportError as error:  # not installed, or a library of the system is not
        return str(error)
    return ""


def _own_address(address: MooncakeAddress) -> str:
    """This machine's, as the master's network sees it. Raises OSError where there is no master."""
    with socket.create_connection((address.host, address.port), ANSWER_S) as probe:
        own: str = probe.getsockname()[0]
        return own


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


if __name__ == "__main__":
    main()
