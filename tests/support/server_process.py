"""`stemma serve` as a test's own process, and what the system reports of its processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
from waiting import PATIENCE_S, wait_until

COMPLETIONS = "/v1/completions"


class ServerProcess:
    """One `stemma serve` on the embedded model, at a port that it chose itself."""

    def __init__(
        self, folder: Path, *flags: str, max_files: int | None = None, has_engine: bool = True
    ) -> None:
        """`max_files`: its limit of open files; `has_engine`: it starts one."""
        folder.mkdir(exist_ok=True)
        self.endpoint = f"ipc://{folder}/programs.ipc"
        self._log = folder / "log"
        command = [sys.executable, "-m", "stemma", "serve", "--port", "0"]
        command += ["--endpoint", self.endpoint]
        command += [*(("--max-total-tokens", "32768") if has_engine else ()), *flags]
        if max_files is not None:
            command = ["prlimit", f"--nofile={max_files}", *command]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        wait_until(lambda: self.process.poll() is not None or "Ctrl-C" in self.log)
        found = re.search(r"base_url (\S+)/v1", self.log)
        assert found, self.log
        self.url = found[1]

    @property
    def log(self) -> str:
        """Everything it has printed."""
        return self._log.read_text()

    @property
    def engine_pid(self) -> int:
        """The process id of the running engine."""
        (pid,) = children(self.process.pid)
        return pid

    def generate(self, max_tokens: int = 3, **fields: object) -> httpx.Response:
        """One completion, not streamed."""
        return httpx.post(
            self.url + COMPLETIONS, json=_body(max_tokens, **fields), timeout=PATIENCE_S
        )

    @contextlib.contextmanager
    def stream(self, max_tokens: int, **fields: object) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of a streamed completion, as they come, once the first one has arrived."""
        body = _body(max_tokens, stream=True, **fields)
        with httpx.stream(
            "POST", self.url + COMPLETIONS, json=body, timeout=PATIENCE_S
        ) as response:
            assert response.status_code == 200, response.read()
            events = _events(response)
            first = next(events)
            assert "choices" in first, first
            yield itertools.chain([first], events)

    def status(self, path: str) -> int:
        """The status of a GET."""
        return httpx.get(self.url + path, timeout=PATIENCE_S).status_code

    def wait_healthy(self) -> None:
        """Wait until the engine steps."""
        wait_until(lambda: self.status("/health") == 200)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(PATIENCE_S) == 0, self.log


def _body(max_tokens: int, **fields: object) -> dict[str, object]:
    return {"prompt": "Hi", "max_tokens": max_tokens, "ignore_eos": True, **fields}


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line == "data: [DONE]":
            yield {"done": True}
        elif line:
            yield json.loads(line.removeprefix("data: "))


def children(pid: int) -> list[int]:
    """The running child processes of a process (Linux); none of one that has ended."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, parent = status.read_text().rpartition(") ")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(status.parent.name))
    return sorted(found)


def num_files(pid: int) -> int:
    """Number of file descriptors that a process has open (Linux)."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def is_alive(pid: int) -> bool:
    """Whether the process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
