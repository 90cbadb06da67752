"""`python -m stemma.runtime.memory.peers.nixl_worker DESCRIPTOR`: an agent of NIXL, over UCX.

Started and asked by `nixl_memory.py`; exchanges frames over standard input and output. It sends
from the memory that DESCRIPTOR stands for, and lets others write into memory of the process that
started it, as long as that offers it. When its parent ends, its input ends, and so does it.

Needs the package `nixl`, or `nixl-cu12` or `nixl-cu13` alone; only this file imports it.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import secrets
import select
import sys
import time
from contextlib import suppress
from typing import Any

import numpy as np

from ....piped_process import output_of_frames, read_frame, write_frame
from .nixl_memory import ADDRESS, CLOSE, NUMBER, OFFER, OFFERED, OPEN, WITHDRAW, WRITE

_PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
_BACKEND = "UCX"
_WRITE_S = 1.5  # then it has failed; less than the parent waits
_POLL_S = 0.0002  # between two looks for what comes, while somebody may write
_MAX_OFFERED_BYTES = 2**44  # of addresses, none of which is used twice; then another process begins
_FIXED_UNUSED = 0x10 | 0x20 | 0x02 | 0x4000  # MAP_FIXED, _ANONYMOUS, _PRIVATE, _NORESERVE


def main() -> None:
    """Answer until standard input ends."""
    output = output_of_frames("NIXL_LOG_LEVEL" not in os.environ)
    os.environ.setdefault("UCX_NET_DEVICES", "lo")  # engines are on one host
    worker = _Worker(int(sys.argv[1]))
    with suppress(BrokenPipeError):
        while worker.waits() and (question := read_frame(sys.stdin.buffer)) is not None:
            write_frame(output, worker.reply(question))
    os._exit(0)  # UCX's libraries fail when they are unloaded


class _Worker:
    """Owns the agent. Lifetime: the process's."""

    def __init__(self, descriptor: int) -> None:
        self._piece = mmap.mmap(descriptor, 0)
        self._agent: Any = None
        self._offered: dict[int, tuple[mmap.mmap, Any]] = {}  # by address: memory, registration
        self._withdrawn: list[mmap.mmap] = []  # whose addresses stay taken
        self._num_offered_bytes = 0
        self._opened: dict[int, tuple[str, int]] = {}  # agent's name, address
        self._num_opened = 0

    def waits(self) -> bool:
        """For a question, while what others write comes in."""
        while self._offered and not select.select([sys.stdin], [], [], 0)[0]:
            self._agent.get_new_notifs()  # which makes progress; nobody sends any
            time.sleep(_POLL_S)
        return True

    def reply(self, question: bytes) -> bytes:
        """Why it cannot, or nothing, of what is asked first; then nothing where it fails."""
        kind, rest = question[:1], question[1:]
        if not kind:
            return self._begin().encode()
        try:
            answers = {OFFER: self._offer, WITHDRAW: self._withdraw, OPEN: self._open,
                       WRITE: self._write, CLOSE: self._close}  # fmt: skip
            return answers[kind](rest)
        except Exception as error:  # of NIXL, which says why in its log
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return b""

    def _begin(self) -> str:
        try:
            api = _api()
            settings = api.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
            self._agent = api.nixl_agent("stemma-" + secrets.token_hex(8), settings)
            self._register(self._piece)
        except Exception as error:  # of the libraries that are loaded, too
            return f"{type(error).__name__}: {error}"
        return ""

    def _register(self, memory: mmap.mmap) -> Any:
        place = [(_address(memory), len(memory), 0, "")]
        return self._agent.register_memory(place, "DRAM", [_BACKEND])

    def _offer(self, rest: bytes) -> bytes:
        """Address, then what another agent has to know."""
        number, num_bytes = OFFERED.unpack(rest)
        self._num_offered_bytes += num_bytes
        if self._num_offered_bytes > _MAX_OFFERED_BYTES:
            os._exit(0)
        descriptor = os.open(f"/proc/{os.getppid()}/fd/{number}", os.O_RDWR)
        try:
            memory = mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)
        registered = self._register(memory)
        self._offered[_address(memory)] = memory, registered
        told: bytes = self._agent.get_partial_agent_metadata(registered, True, [_BACKEND])
        return ADDRESS.pack(_address(memory)) + told

    def _withdraw(self, rest: bytes) -> bytes:
        (address,) = ADDRESS.unpack(rest)
        memory, registered = self._offered.pop(address)
        self._agent.deregister_memory(registered, [_BACKEND])
        _make_unusable(address, len(memory))
        self._withdrawn.append(memory)
        return b"\1"

    def _open(self, rest: bytes) -> bytes:
        name = self._agent.add_remote_agent(rest[ADDRESS.size :])
        name = name.decode() if isinstance(name, bytes) else name
        self._num_opened += 1
        self._opened[self._num_opened] = name, ADDRESS.unpack_from(rest)[0]
        return NUMBER.pack(self._num_opened)

    def _write(self, rest: bytes) -> bytes:
        """Spans of the piece into the memory; when this returns they are there. After a failure
        the other agent is unknown, and what it has offered is no longer open."""
        name, address = self._opened[NUMBER.unpack_from(rest)[0]]
        is_written = False
        try:
            is_written = self._is_written(rest, address, name)
        finally:
            if not is_written:
                self._forget(name)
        return b"\1" if is_written else b""

    def _is_written(self, rest: bytes, address: int, name: str) -> bool:
        spans = np.frombuffer(rest, np.uint64, offset=NUMBER.size).reshape(-1, 3)
        sides = []
        for column, base in ((0, _address(self._piece)), (1, address)):
            device = np.zeros(len(spans), np.uint64)
            side = np.stack([spans[:, column] + np.uint64(base), spans[:, 2], device], 1)
            sides.append(self._agent.get_xfer_descs(side, "DRAM"))
        request = self._agent.initialize_xfer("WRITE", *sides, name, b"", [_BACKEND])
        until_s = time.monotonic() + _WRITE_S
        state = self._agent.transfer(request)
        while state == "PROC" and time.monotonic() < until_s:
            time.sleep(0)
            state = self._agent.check_xfer_state(request)
        if state == "PROC":
            os._exit(1)  # the piece may still be read: it is given up together with the process
        self._agent.release_xfer_handle(request)
        return bool(state == "DONE")

    def _close(self, rest: bytes) -> bytes:
        name, _ = self._opened.pop(NUMBER.unpack(rest)[0], ("", 0))
        if name and not any(name == other for other, _ in self._opened.values()):
            self._forget(name)
        return b"\1"

    def _forget(self, name: str) -> None:
        """All that was told of an agent."""
        self._opened = {n: each for n, each in self._opened.items() if each[0] != name}
        self._agent.remove_remote_agent(name)


def _api() -> Any:
    """Raises ImportError."""
    errors = []
    for name in _PACKAGES:
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError as error:
            errors.append(str(error))
    raise ImportError("; ".join(errors))


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _make_unusable(address: int, num_bytes: int) -> None:
    """Give memory back, but not its addresses: who writes there fails. Raises OSError."""
    mapped = ctypes.CDLL(None, use_errno=True).mmap
    mapped.restype = ctypes.c_void_p
    mapped.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    if mapped(address, num_bytes, 0, _FIXED_UNUSED, -1, 0) != address:
        raise OSError(ctypes.get_errno(), "a withdrawn place cannot be closed")


if __name__ == "__main__":
    main()
