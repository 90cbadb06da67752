"""Sections in processes of their own, seen from outside: started ahead, asked, ended in time."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .sections import SECTIONS, Setting, ceilings_of

_LAST_CHARS = 2000
_PACKAGE = Path(__file__).resolve().parents[2]


def in_processes(
    names: Sequence[str], setting: Setting, rows: list[dict[str, Any]], time_limit_s: float
) -> Generator[tuple[str, Iterator[dict[str, Any]]]]:
    """Each section's name and messages, which the caller adds to `rows` before it asks for the
    next. A section's processes start while the one before measures."""
    end = time.monotonic() + time_limit_s
    started: list[list[SectionProcess]] = []
    try:
        for number, name in enumerate(names):
            for ahead in names[len(started) : number + 2]:
                started.append(_processes(ahead, setting))
            left_s = end - time.monotonic()
            limit_s = min(left_s, SECTIONS[name].limit_s)
            yield name, _messages(started[number], ceilings_of(rows), limit_s)
            _close(started[number])
    finally:
        for processes in started:
            _close(processes)


def _processes(name: str, setting: Setting) -> list[SectionProcess]:
    count = setting.num_shards(name)
    return [SectionProcess(name, setting, (index, count)) for index in range(count)]


def _messages(
    processes: list[SectionProcess], rates: dict[str, float], limit_s: float
) -> Iterator[dict[str, Any]]:
    """All processes work concurrently; their messages are read one process after another."""
    if limit_s < 1:
        yield {"error": "no time was left", "log": ""}
        return
    for process in processes:
        process.begin(rates, limit_s)
    for process in processes:
        yield from process.messages()


def _close(processes: list[SectionProcess]) -> None:
    while processes:
        processes.pop().close()


class SectionProcess:
    """Imports while another section measures, and waits for the ceilings. `close` ends it."""

    def __init__(self, name: str, setting: Setting, shard: tuple[int, int] = (0, 1)) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="stemma-bench-"))
        (self._folder / "stemma").symlink_to(_PACKAGE)
        command = [sys.executable, "-m", "stemma.bench.roofline.sections"]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": self._paths()},
                cwd=self._folder,
                start_new_session=True,  # so that a peer's process ends with it
            )

        self._limit: threading.Timer | None = None
        self._begun_s = 0.0
        self._tell({"section": name, "setting": asdict(setting), "shard": shard})

    def begin(self, rates: dict[str, float], limit_s: float) -> None:
        """Start measuring; it is killed after `limit_s`."""
        self._limit = threading.Timer(limit_s, self._kill)
        self._limit.start()
        self._begun_s = time.monotonic()
        self._tell(rates)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Its messages; where it is killed, or dies, the last one is an error."""
        assert self._process.stdout is not None
        is_whole, last = False, "the start"
        for line in self._process.stdout:
            message: dict[str, Any] = json.loads(line)
            is_whole = "device" in message
            last = message["row"]["case"] if "row" in message else last
            yield message
        status, took_s = self._process.wait(), time.monotonic() - self._begun_s
        if not is_whole or status != 0:
            error = f"ended with status {status} after {took_s:.0f} s, behind: {last}"
            yield {"error": error, "log": self._log()}

    def close(self) -> None:
        """End it."""
        if self._limit is not None:
            self._limit.cancel()
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended without reading the rest
                pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _paths(self) -> str:
        """This package first, then this process's own path."""
        given = os.environ.get("PYTHONPATH")
        return os.pathsep.join([str(self._folder), *([given] if given else [])])

    def _tell(self, value: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; its log says why
            print(json.dumps(value), file=self._process.stdin, flush=True)

    def _kill(self) -> None:
        """Kill a process that was not waited for, so that its pid is still its own."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-_LAST_CHARS:]
