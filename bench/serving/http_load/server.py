"""A `stemma serve` to measure, and what its two processes use."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from ...harness.process_meter import num_descriptors, peak_rss_bytes_of, process_cpu_s, process_tree
from ..runners.http_client import HttpClient, stop, wait_until_healthy
from ..runners.ports import free_port

SAMPLE_S = 0.2


class MeasuredServer:
    """Owns the server's process; a context manager."""

    def __init__(self, flags: Sequence[str] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="stemma-bench-")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-P", "-m", "stemma", "serve", "--port", str(self.port)]
        command += ["--endpoint", f"ipc://{self._folder.name}/serve.ipc", *flags]
        with open(f"{self._folder.name}/log", "wb") as log:  # a line per request, as in production
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until_healthy(HttpClient(self.url), self._process)
        except BaseException:
            self._close()
            raise

    @property
    def api_pid(self) -> int:
        """The process id of the HTTP server."""
        return self._process.pid

    @property
    def engine_pids(self) -> list[int]:
        """Its descendants: the engine and the engine's own children."""
        return process_tree(self.api_pid)[1:]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        stop(self._process)
        self._folder.cleanup()


class UseMeter:
    """Measures a block: CPU of both processes, peak descriptors and memory of the API process."""

    def __init__(self, server: MeasuredServer) -> None:
        self._server = server
        self.api_cpu_s = self.engine_cpu_s = 0.0
        self.max_descriptors = 0
        self._is_over = threading.Event()
        self._sampler = threading.Thread(target=self._sample)

    @property
    def peak_rss_mb(self) -> float:
        """Peak memory of the API process since its start."""
        return peak_rss_bytes_of(self._server.api_pid) / 2**20

    def __enter__(self) -> Self:
        self._sampler.start()
        self._before = self._cpu_s()
        return self

    def __exit__(self, *_: object) -> None:
        after = self._cpu_s()
        self.api_cpu_s = after[0] - self._before[0]
        self.engine_cpu_s = after[1] - self._before[1]
        self._is_over.set()
        self._sampler.join()

    def _cpu_s(self) -> tuple[float, float]:
        engine_s = sum(process_cpu_s(pid) for pid in self._server.engine_pids)
        return process_cpu_s(self._server.api_pid), engine_s

    def _sample(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            found = num_descriptors(self._server.api_pid)
            self.max_descriptors = max(self.max_descriptors, found)
