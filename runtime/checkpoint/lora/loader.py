"""Reads adapters beside the engine's loop, one after the other, on a separate thread.

The thread has the loop's own priority: at a lower one, on a busy machine, it would hold the
interpreter's lock for long (longest pause of a stream 28 to 250 ms, instead of 19 to 22 ms).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ....errors import EngineError, InvalidRequest
from .adapter import Adapter
from .registry import AdapterRegistry

log = logging.getLogger(__name__)

MAX_WAITING = 64  # adapters that are being loaded

OnLoaded = Callable[[Adapter | Exception], None]


@dataclass(slots=True)
class _Job:
    name: str
    path: str
    on_loaded: OnLoaded
    outcome: Adapter | Exception | None = None


class AdapterLoader:
    """Owns the thread, which the first adapter starts; only the loop may call its methods.

    Lifetime: until `close`.
    """

    def __init__(self, registry: AdapterRegistry, root: Path | None = None) -> None:
        """`root`: the folder that must contain adapters; None: any folder."""
        self._registry = registry
        self._root = root
        self._num_waiting = 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: deque[_Job] = deque()  # appended to by the thread
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        """Readable when there are results to collect: for the poller of the engine's loop."""
        return self._wake_r

    def load(self, name: str, path: str, on_loaded: OnLoaded) -> None:
        """Read and register an adapter; `collect` reports the result to `on_loaded`.

        A taken name is accepted if its files are those of the same adapter, so that a client whose
        first answer was lost can ask again. Raises InvalidRequest for a name that is not
        available, EngineError if too many wait.
        """
        if not self._registry.has(name):
            self._registry.require_free(name)
        if self._num_waiting >= MAX_WAITING:
            raise EngineError(f"{self._num_waiting} adapters wait to be loaded; try again later")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stemma-adapters", daemon=True)
            self._thread.start()
        self._num_waiting += 1
        self._jobs.put(_Job(name, path, on_loaded))

    def collect(self) -> None:
        """Register the adapters read since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        while self._done:
            job = self._done.popleft()
            self._num_waiting -= 1
            assert job.outcome is not None, "a job that is not done"
            outcome = job.outcome
            if isinstance(outcome, Adapter):
                try:
                    outcome = self._registry.add(outcome)
                except InvalidRequest as error:  # its name is another adapter's
                    outcome = error
            job.on_loaded(outcome)

    def close(self) -> None:
        """End the thread; pending adapters are dropped."""
        os.close(self._wake_r)
        if self._thread is None:
            os.close(self._wake_w)
        else:  # which may still write to it
            self._jobs.put(None)

    def _run(self) -> None:
        for job in iter(self._jobs.get, None):
            self._read(job)
            del job  # do not keep its data alive while waiting for the next job
        os.close(self._wake_w)

    def _read(self, job: _Job) -> None:
        try:
            job.outcome = self._registry.read(job.name, self._folder(job.path))
        except Exception as error:  # whatever is in the files: it is reported
            log.info("adapter %r was not loaded: %s", job.name, error)
            job.outcome = error
        self._done.append(job)
        # Full of earlier wake-ups, or closed by the loop.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._wake_w, b"\0")

    def _folder(self, path: str) -> Path:
        if "\0" in path:
            raise InvalidRequest.of("lora_path", path, "a folder's path")
        if self._root is None:
            return Path(path)
        folder = (self._root / path).resolve()
        if not folder.is_relative_to(self._root.resolve()):
            raise InvalidRequest.of("lora_path", path, "a folder within lora_root")
        return folder
