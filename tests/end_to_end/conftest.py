"""The embedded model, behind one engine and one `stemma serve` for all tests of this folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

import stemma as st

START_TIMEOUT_S = 60.0
FLAGS = ("--max-total-tokens", "32768")


@pytest.fixture(scope="session")
def embedded() -> Iterator[st.Engine]:
    """An engine on the embedded model."""
    with st.Engine(max_total_tokens=32_768) as engine:
        yield engine


@dataclass(frozen=True)
class Served:
    """A running `stemma serve`."""

    url: str
    endpoint: str
    process: subprocess.Popen[bytes]


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`stemma serve` on the embedded model, as a user starts it."""
    folder = tmp_path_factory.mktemp("serve")
    port, endpoint = free_port(), f"ipc://{folder}/stemma.ipc"
    command = [sys.executable, "-m", "stemma", "serve", "--port", str(port)]
    command += ["--endpoint", endpoint, *FLAGS]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, process, folder / "log")
        yield Served(url, endpoint, process)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(120) in (0, 130, -signal.SIGINT)
        assert "Traceback" not in (folder / "log").read_text()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)  # what starts needs the processor more
    raise AssertionError(f"not healthy after {START_TIMEOUT_S} s: {log.read_text()}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_stemma(
    *args: str, stdin: str = "", timeout: float = 90
) -> subprocess.CompletedProcess[str]:
    """Run the `stemma` command as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "stemma", *args],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "COLUMNS": "100"},
        check=False,
    )


@pytest.fixture(scope="session")
def stemma_command() -> object:
    """`run_stemma`, for tests that cannot import it by path."""
    return run_stemma
