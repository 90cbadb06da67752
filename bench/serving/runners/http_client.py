"""A small JSON client: keep-alive connections and a thread a request.

Light on purpose, as it shares the machine's cores with the server that it measures. Standard
library only.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any
from urllib.parse import urlsplit

from ....errors import EngineError
from ...harness.descendants import kill_tree
from ...harness.workloads import PromptBook, WorkItem, Workload

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0


class HttpClient:
    """Requests to one server at `url` ("http://host:port/prefix"); thread-safe."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._idle: deque[http.client.HTTPConnection] = deque()

    def get(self, path: str) -> Any:
        """The response's JSON. Raises OSError, EngineError for a status other than 200."""
        return self._send("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The response's JSON. Raises as `get` does."""
        return self._send("POST", path, json.dumps(body, separators=(",", ":")))

    def _send(self, method: str, path: str, body: str | None) -> Any:
        try:
            return self._exchange(self._idle.pop(), method, path, body)
        except (IndexError, ConnectionError):  # no idle connection, or the server has closed it
            fresh = http.client.HTTPConnection(self._host, self._port)
            return self._exchange(fresh, method, path, body)

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: str | None
    ) -> Any:
        headers = {"Content-Type": "application/json"}
        connection.request(method, self._prefix + path, body, headers)
        response = connection.getresponse()
        text = response.read().decode()
        self._idle.append(connection)
        if response.status != 200:
            raise EngineError(f"{method} {path}: status {response.status}: {text[:500]}")
        return json.loads(text) if text else None


def wait_until_healthy(client: HttpClient, server: subprocess.Popen[bytes]) -> None:
    """Wait until GET /health returns 200. Raises EngineError if the server ends or is too slow."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise EngineError(f"the server ended with status {server.returncode}")
        try:
            client.get("/health")
            return
        except (OSError, EngineError):
            time.sleep(0.05)
    raise EngineError(f"the server was not ready within {READY_TIMEOUT_S:.0f} s")


def stop(server: subprocess.Popen[bytes]) -> None:
    """End a server started here; one that takes too long is killed with what it has started."""
    server.terminate()
    try:
        server.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        kill_tree(server.pid)
        server.wait()


def run_forest(
    workload: Workload, complete: Callable[[Workload, WorkItem, list[int]], list[int]]
) -> PromptBook:
    """Run a workload: each request in its own thread, as soon as its parent is done.

    `complete` takes the workload, a request and its prompt and returns the output's ids.
    """
    book, children = PromptBook(), workload.children()

    def carry_out(item: WorkItem) -> list[Future[Any]]:
        book.outputs[item.id] = complete(workload, item, book.prompt(item))
        return [pool.submit(carry_out, child) for child in children.get(item.id, [])]

    with ThreadPoolExecutor(len(workload.requests)) as pool:
        pending = {pool.submit(carry_out, root) for root in children[None]}
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                pending.update(future.result())
    return book
