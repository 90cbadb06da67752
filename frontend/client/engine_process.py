"""The engine's process: start, orders, end.

A subprocess rather than multiprocessing, so a script needs no main guard. Its standard input
connects it to its owner: each line is an order, and when the input closes the engine ends, so that
it never outlives its owner, however that dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from ...errors import InvalidRequest
from ..protocol.keys import ClientKeys
from .passed_output import PassedOutput
from .peer_process import is_stopped
from .temporary_folder import TemporaryFolder

START_TIMEOUT_S = 1800.0  # a large checkpoint takes a while to load, and longer to quantize
FETCH_TIMEOUT_S = 86_400.0  # for a model that has to be downloaded first
STOP_TIMEOUT_S = 5.0
LOG_TAIL_LINES = 15
_STDERR = 2
# The exit codes of an engine that ends with a line that says why.
REFUSED = 1  # its configuration
NOT_LOADED = 3  # its model
_REFUSAL = "error: "


class ChildProcess:
    """A `PeerProcess` that this process has started. Does not refer to its `EngineProcess`, whose
    end is the process's."""

    def __init__(
        self, process: subprocess.Popen[bytes], last_words: Callable[[], Sequence[str]]
    ) -> None:
        """`last_words`: the last lines of its output."""
        self._process = process
        self._last_words = last_words

    def death(self) -> str | None:
        """Why it has ended, with its last output; None while it runs."""
        return _death(self._process, self._last_words)

    def is_stopped(self) -> bool:
        """Whether it was stopped and may be continued."""
        return is_stopped(self._process.pid)


class EngineProcess:
    """A child process that serves one model at `endpoint`. Lifetime: until `stop`, or this
    object's."""

    def __init__(
        self,
        model: str | Path | None,
        *,
        listen: Sequence[str] = (),
        options: dict[str, object],
        has_log: bool = True,
        is_quoted: bool = False,
        module: str = "stemma.runtime",
    ) -> None:
        """As `Engine`; `has_log`: its output is captured to be quoted when it dies, else it goes to
        this process's standard error, and with `is_quoted` is quoted all the same. `module`: what
        is run, and takes these options as flags."""
        flags = _flags({"model": model, **options})  # may raise
        folder = TemporaryFolder()
        self.endpoint = folder.endpoint
        self.keys: ClientKeys | None = None  # it is a file of this user's
        command = [sys.executable, "-P", "-m", module]
        for endpoint in (self.endpoint, *listen):
            command += ["--endpoint", endpoint]
        command += ["--watch-stdin", *flags]
        log = folder.path / "engine.log" if has_log else None
        with contextlib.ExitStack() as stack:
            output: int | IO[bytes] = subprocess.PIPE if is_quoted else _STDERR
            output = output if log is None else stack.enter_context(log.open("wb"))
            errors = subprocess.STDOUT if output == subprocess.PIPE else output
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=errors, start_new_session=True
            )
        last_words: Callable[[], Sequence[str]] = partial(_last_words, log)
        if self._process.stdout is not None:
            last_words = PassedOutput(self._process.stdout, LOG_TAIL_LINES).last_lines
        self.peer = ChildProcess(self._process, last_words)
        self._finalizer = weakref.finalize(self, _stop, self._process, folder, os.getpid())

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def has_no_model(self) -> bool:
        """Whether it has ended since its model cannot be loaded."""
        return self._process.poll() == NOT_LOADED

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; False where the time is over before."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def order(self, order: bytes) -> None:
        """Send it an order, carried out between two steps; no effect where it has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(order)
            self._process.stdin.flush()

    def kill(self) -> None:
        """End it at once, with its child processes."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """End it and remove its folder; safe to call twice."""
        self._finalizer()


def start_timeout_s(model: str | Path | None) -> float:
    """How long an engine may take to start; an engine that dies is noticed at once."""
    is_here = model is None or Path(model).expanduser().exists()
    return START_TIMEOUT_S if is_here else FETCH_TIMEOUT_S


def _flags(options: dict[str, object]) -> list[str]:
    flags: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif isinstance(value, Mapping | list | tuple):
            items = value.items() if isinstance(value, Mapping) else value
            flags += [flag, *(_words(name, item) for item in items)] if value else []
        elif value is not None and value is not False:
            flags.append(f"{flag}={value}")  # in one word: a value may begin with a dash
    return flags


def _words(option: str, item: object) -> str:
    """One of an option's values; a pair as "name=value". Raises InvalidRequest for a name that
    contains an "="."""
    if not isinstance(item, tuple):
        return str(item)
    name, value = item
    if "=" in str(name):
        raise InvalidRequest.of(option, name, "names without '='")
    return f"{name}={value}"


def _death(process: subprocess.Popen[bytes], last_words: Callable[[], Sequence[str]]) -> str | None:
    if process.poll() is None:
        return None
    code, words = process.returncode, last_words()
    for index, line in enumerate(words):
        is_refusal = line.startswith(_REFUSAL)  # with its reason, not a crash
        if code in (REFUSED, NOT_LOADED) and is_refusal:
            return "\n".join([line.removeprefix(_REFUSAL), *words[index + 1 :]])
    name = f", {signal.Signals(-code).name}" if code < 0 else ""
    return "\n  ".join(
        [f"the engine's process ended (exit code {code}{name}){':' if words else ''}", *words]
    )


def _last_words(log: Path | None) -> list[str]:
    try:
        text = "" if log is None else log.read_text(errors="replace")
    except OSError:
        return []
    return text.strip().splitlines()[-LOG_TAIL_LINES:]


def _stop(process: subprocess.Popen[bytes], folder: TemporaryFolder, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a fork of the owner ends: the engine is not its child
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # it has ended before reading the order
            process.stdin.close()
    process.terminate()  # it may not read its orders yet
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    folder.remove()
