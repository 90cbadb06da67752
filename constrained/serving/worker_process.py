"""A grammar worker's process as the engine sees it: started, asked, given up, ended.

A worker bounds its own CPU time, memory and stack (`worker.py`), and what exceeds them is a fault
of the grammar. That it is stopped, or given no time to run (`piped_process.py`), is none: the
grammar may be tried again.
"""

from __future__ import annotations

import pickle
import signal
import sys

from ...piped_process import PipedProcess, ProcessStopped, framed
from .frames import CRASHES, Check, Job

START_TIMEOUT_S = 60.0  # of a worker on a very busy machine, which must compile C++ first
WALL_LIMIT_S = 60.0  # for a reply, besides the CPU time that it may take


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
        command = [sys.executable, "-P", "-m", "stemma.constrained.serving.worker"]
        # Reserved address space counts as memory: an arena per thread is 64 MB of it.
        try:
            self._process = PipedProcess(
                command, niceness, MALLOC_ARENA_MAX="1", RAYON_NUM_THREADS="1"
            )
        except OSError as error:  # no descriptors, processes or memory left
            raise WorkerLost(f"the compiler's process cannot be started: {error}") from error
        try:
            is_ready = self._process.exchange(b"", START_TIMEOUT_S) == b"ready"
        except (TimeoutError, ProcessStopped):
            is_ready = False
        if not is_ready:
            self.end()
            raise WorkerLost("the compiler's process does not start")

    @property
    def has_ended(self) -> bool:
        return self._process.has_ended

    def ask(self, job: Job | Check) -> bytes | None:
        """The reply, or None where it would have taken more CPU time than it may. Raises
        WorkerLost; TimeoutError where no reply has come for long."""
        request = framed(pickle.dumps(job))
        try:
            reply = self._process.exchange(request, WALL_LIMIT_S + job.limit_s)
        except TimeoutError:
            self.end()
            raise
        except ProcessStopped as error:
            self.end()
            raise WorkerLost("the compiler's process was stopped") from error
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
        """See `PipedProcess.end`."""
        return self._process.end()
