"""A child process that is asked over its standard input and output, frame by frame, and waited for
within bounds.

What it computes it bounds itself, in CPU time. Bounded here is what it cannot see: that it is
stopped, or given no time to run.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, BinaryIO, Protocol

LOOK_S = 1.0  # how often a process that does not reply is looked at

_LENGTH = struct.Struct("<I")


class ProcessStopped(Exception):
    """By a signal: it may never go on."""


class PipedProcess:
    """Owns the process and its pipes. Lifetime: until `end`."""

    def __init__(
        self,
        command: list[str],
        niceness: int,
        *,
        descriptors: Sequence[int] = (),
        **environment: str,
    ) -> None:
        """The process has these descriptors, too. Raises OSError where it cannot be started."""
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=descriptors,
            start_new_session=True,  # its parent handles Ctrl-C
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._num_looks_left = 0
        try:
            os.set_blocking(self._input.fileno(), False)
            if niceness:
                os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)
        except OSError:
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> int:
        """The exit code; a process that still runs is killed, since it has nothing to lose."""
        if not self._is_ending():
            self._process.kill()
        status = self._process.wait()
        for stream in (self._input, self._output):
            with contextlib.suppress(OSError):
                stream.close()
        return status

    def exchange(self, request: bytes, limit_s: float) -> bytes | None:
        """Write these bytes, then read a frame; None at the output's end. Raises TimeoutError,
        ProcessStopped, and OSError where the process has ended."""
        self._num_looks_left = math.ceil(limit_s / LOOK_S)
        left = memoryview(request)
        while left:
            self._wait_until(self._input.fileno(), select.POLLOUT)
            left = left[os.write(self._input.fileno(), left) :]
        return read_frame(self)

    def read(self, num_bytes: int) -> bytes:
        """For `read_frame`: so many bytes of its output; fewer at the end."""
        data = bytearray()
        while len(data) < num_bytes:
            self._wait_until(self._output.fileno(), select.POLLIN)
            more = os.read(self._output.fileno(), num_bytes - len(data))
            if not more:
                break
            data += more
        return bytes(data)

    def _is_ending(self) -> bool:
        """Whether its output has ended, so that it is about to exit."""
        try:
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _wait_until(self, descriptor: int, event: int) -> None:
        """Wait for an event or a hang-up. Counts looks, not a clock: while this process is itself
        paused, nobody runs out of time."""
        poller = select.poll()
        poller.register(descriptor, event)
        while not poller.poll(1000 * LOOK_S):
            self._num_looks_left -= 1
            if self._is_stopped():
                raise ProcessStopped
            if self._num_looks_left <= 0:
                raise TimeoutError("the machine is too busy to do it now; try again")

    def _is_stopped(self) -> bool:
        """By a signal; never where the system does not say (macOS)."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"


def output_of_frames(is_quiet: bool) -> BinaryIO:
    """For a child: its standard output, for frames alone. What libraries print goes to standard
    error, or to nobody if it is to be quiet; errors of Python are still written."""
    output = os.fdopen(os.dup(1), "wb")
    sys.stderr = os.fdopen(os.dup(2), "w")
    if is_quiet:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
    os.dup2(2, 1)
    return output


def framed(payload: bytes) -> bytes:
    """A length, then that many bytes."""
    return _LENGTH.pack(len(payload)) + payload


def write_frame(stream: IO[bytes], payload: bytes) -> None:
    """Write a frame at once."""
    stream.write(framed(payload))
    stream.flush()


class Readable(Protocol):
    """What frames are read from."""

    def read(self, num_bytes: int, /) -> bytes:
        """So many bytes; fewer at its end."""


def read_frame(stream: Readable) -> bytes | None:
    """None at the stream's end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    payload = stream.read(length)
    return payload if len(payload) == length else None
