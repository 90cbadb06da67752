"""A grammar worker's process as the engine sees it: started, asked, given up, ended.

A worker bounds its own CPU time, memory and stack (`worker.py`), and what exceeds them is a fault
of the grammar. Bounded here is what it cannot see: that it is stopped, or given no time to run.
That is no fault of the grammar, which may be tried again.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import signal
import subprocess
import sys
from pathlib import Path

from .frames import CRASHES, Check, Job, framed, read_frame

START_TIMEOUT_S = 60.0  # of a worker on a very busy machine, which must compile C++ first
WALL_LIMIT_S = 60.0  # for a reply, besides the CPU time that it may take
LOOK_S = 1.0  # how often a worker that does not reply is looked at


class WorkerLost(Exception):
    """The process has ended, and not at its limit; the message gives the cause.

    `is_of_grammar`: the grammar caused it, by running out of stack or memory where that cannot be
    caught.
    """

    def __init__(self, message: str, *, is_of_grammar: bool = False) -> None:
        super().__init__(message)
        self.is_of_grammar = is_of_grammar


class WorkerProcess:
    """A worker process. Raises WorkerLost when it does not start."""

    def __init__(self, niceness: int) -> None:
        try:
            self._process = _started()
        except OSError as error:  # no descriptors, processes or memory left
            raise WorkerLost(f"the compiler's process cannot be started: {error}") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._num_looks_left = 0
        try:
            os.set_blocking(self._input.fileno(), False)
            if niceness:
                os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)
            is_ready = self._exchange(b"", START_TIMEOUT_S) == b"ready"
        except (TimeoutError, WorkerLost, OSError):
            is_ready = False
        if not is_ready:
            self.end()
            raise WorkerLost("the compiler's process does not start")

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, job: Job | Check) -> bytes | None:
        """The reply, or None where it would have taken more CPU time than it may. Raises
        WorkerLost; TimeoutError where no reply has come for long."""
        try:
            reply = self._exchange(framed(pickle.dumps(job)), WALL_LIMIT_S + job.limit_s)
        except (TimeoutError, WorkerLost):
            self.end()
            raise
        except OSError:  # it has ended
            reply = None
        if reply is not None:
            return reply
        status = self.end()
        if status == -signal.SIGPROF:
            return None
        if -status in CRASHES:
            message = "nested too deeply, or beyond what the compiler can take"
            raise WorkerLost(message, is_of_grammar=True)
        raise WorkerLost(f"the compiler's process ended (exit code {status})")

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

    def _is_ending(self) -> bool:
        """Whether its output has ended, so that it is about to exit."""
        try:
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _exchange(self, request: bytes, limit_s: float) -> bytes | None:
        """Write these bytes, then read a frame; None at the output's end. Raises TimeoutError,
        WorkerLost, and OSError where the process has ended."""
        self._num_looks_left = math.ceil(limit_s / LOOK_S)
        while request:
            self._wait_until(self._input.fileno(), select.POLLOUT)
            request = request[os.write(self._input.fileno(), request) :]
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

    def _wait_until(self, descriptor: int, event: int) -> None:
        """Wait for an event or a hang-up. Counts looks, not a clock: while this process is itself
        paused, nobody runs out of time."""
        poller = select.poll()
        poller.register(descriptor, event)
        while not poller.poll(1000 * LOOK_S):
            self._num_looks_left -= 1
            if self._is_stopped():
                raise WorkerLost("the compiler's process was stopped")
            if self._num_looks_left <= 0:
                raise TimeoutError("the machine is too busy to compile it now; try again")

    def _is_stopped(self) -> bool:
        """By a signal; never where the system does not say (macOS)."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"


def _started() -> subprocess.Popen[bytes]:
    # Reserved address space counts as memory: an arena per thread is 64 MB of it.
    single = {"MALLOC_ARENA_MAX": "1", "RAYON_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "stemma.constrained.serving.worker"],
        bufsize=0,
        env={**os.environ, **single},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # its parent handles Ctrl-C
    )
