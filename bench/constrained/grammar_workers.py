"""Engines of masks in processes of their own: one that hangs or dies is recorded and replaced."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ...errors import EngineError

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 5.0
PEERS = ("llguidance", "xgrammar", "outlines")
_PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What to run: the engine's class ("module:name" as seen from `matchers`) and its Python."""

    name: str
    engine_class: str
    python: str = sys.executable


STEMMA = WorkerSpec("stemma", ".stemma_engine:StemmaEngine")


def peer(name: str, python: str) -> WorkerSpec:
    """One of PEERS."""
    return WorkerSpec(name, f".{name}_engine:{name.capitalize()}Engine", python)


class GrammarWorker:
    """Owns an engine's process; use as a context manager."""

    def __init__(self, spec: WorkerSpec, tokenizer: Path) -> None:
        self.spec = spec
        self._tokenizer = tokenizer
        self._folder = Path(tempfile.mkdtemp(prefix="stemma-bench-"))
        (self._folder / "stemma").symlink_to(_PACKAGE)
        self._start()

    def ask(self, timeout_s: float, **message: object) -> dict[str, Any]:
        """The reply; {"error": ...} where the engine failed, was too slow or died."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._restarted("died")
        reply = self._read(timeout_s)
        return self._restarted(reply) if isinstance(reply, str) else reply

    def restart(self) -> None:
        """Start a fresh process, in which nothing is cached."""
        self._stop()
        self._start()

    def close(self) -> None:
        """End the process."""
        self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        command = [self.spec.python, "-m", "stemma.bench.constrained.matchers.worker"]
        command += [self.spec.engine_class, str(self._tokenizer)]
        path = os.pathsep.join([str(self._folder), *_inherited_path()])
        log = self._folder / "log"
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, "PYTHONPATH": path},
            )
        self._unread = b""
        welcome = self._read(START_TIMEOUT_S)
        if isinstance(welcome, str):
            words = log.read_text(errors="replace").strip()
            self.close()
            raise EngineError(f"{self.spec.name} does not start ({welcome})\n{words[-2000:]}")
        self.version: str = welcome["version"]

    def _restarted(self, failure: str) -> dict[str, Any]:
        self.restart()
        return {"error": failure}

    def _read(self, timeout_s: float) -> dict[str, Any] | str:
        """A line's object, or "timeout" or "died"."""
        assert self._process.stdout is not None
        descriptor, deadline = self._process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                return "timeout"
            data = os.read(descriptor, 1 << 16)
            if not data:
                return "died"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _inherited_path() -> list[str]:
    given = os.environ.get("PYTHONPATH")
    return [given] if given else []
