"""Work on long texts beside the engine's loop: to tokenize 8 MB takes 2 to 5 s.

Two threads: one takes very long texts, and waits for the process that encodes these; the other all
below, so that these never wait for the former. `tokenizers` encodes a batch without the
interpreter's lock. Tenants take turns, so that nobody waits for all texts of another.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from ...errors import EngineError
from ...turn_queue import TurnQueue
from ..tokenizer.tokenizer import VERY_LONG_CHARS

GRACE_S = 5.0  # for a thread's current job at the end


@dataclass(slots=True, eq=False)
class TextJob:
    """Work that waits or runs. `on_done` gets what it returned or raised, on the loop. None: it
    was aborted, and keeps nothing alive until its turn comes."""

    run: Callable[[], Any] | None
    on_done: Callable[[Any], None] | None
    outcome: Any = None

    def abort(self, queue: object = None) -> None:
        """Have nothing reported; it is not begun, where it has not."""
        self.run = self.on_done = None


class TextThreads:
    """Owns the threads, which the first job starts; only the loop may call its methods.

    Lifetime: until `close`.
    """

    def __init__(self) -> None:
        self._done: deque[TextJob] = deque()  # appended to by the threads
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        self._long, self._very_long = _TextThread(self._report), _TextThread(self._report)
        self._closing = threading.Lock()
        self._is_closed = False

    def fileno(self) -> int:
        """Readable when there are results to collect: for the poller of the engine's loop."""
        return self._wake_r

    def start(
        self,
        run: Callable[[], Any],
        on_done: Callable[[Any], None],
        *,
        num_chars: int,
        tenant: Hashable,
    ) -> TextJob:
        """Have a thread call `run`; `collect` passes what it returns, or the Exception that it
        raises, to `on_done`. Raises EngineError if no thread can be started."""
        job = TextJob(run, on_done)
        lane = self._long if num_chars < VERY_LONG_CHARS else self._very_long
        lane.put(job, tenant)
        return job

    def collect(self) -> None:
        """Report the jobs done since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        while self._done:
            job = self._done.popleft()
            if job.on_done is not None:
                job.on_done(job.outcome)

    def close(self) -> None:
        """End the threads; nothing more is reported."""
        for lane in (self._long, self._very_long):
            lane.close()
        for lane in (self._long, self._very_long):
            lane.join()
        with self._closing:
            self._is_closed = True
            os.close(self._wake_r)
            os.close(self._wake_w)

    def _report(self, job: TextJob) -> None:
        self._done.append(job)
        with self._closing, contextlib.suppress(BlockingIOError):  # full of earlier wake-ups
            if not self._is_closed:
                os.write(self._wake_w, b"\0")


class _TextThread:
    """A thread and the jobs that wait for it."""

    def __init__(self, report: Callable[[TextJob], None]) -> None:
        self._report = report
        self._queue: TurnQueue[TextJob] = TurnQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: TextJob, tenant: Hashable) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="stemma-texts", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise EngineError(f"no thread for long texts can be started: {error}") from error
            self._thread = thread
        self._queue.put(job, tenant)

    def close(self) -> None:
        self._queue.close()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(GRACE_S)

    def _run(self) -> None:
        while (job := self._queue.take()) is not None:
            run = job.run
            if run is not None:
                try:
                    job.outcome = run()
                except Exception as error:  # the one who asked is told
                    job.outcome = error
                self._report(job)
            del job, run  # do not keep its text alive while waiting for the next one
