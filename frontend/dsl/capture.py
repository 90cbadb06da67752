"""Captures what a program sends before its first wait, without a runtime.

The function really runs, with a `Recorder` in place of a runtime, and is stopped where it would
wait for its first value. So the author's own code up to there also runs.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from traceback import extract_tb, format_exception_only
from types import FrameType
from typing import Any

from ...errors import InvalidProgram, Picklable
from ..client.channel import EventSink
from ..client.program import Pending, Program
from ..protocol import ir
from ..trace.graph import Graph
from ..trace.op_graph import Wait
from .state import ProgramState

_PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Waits(Picklable, BaseException):
    """The program waits for a value. Not an Exception: the author's handlers must not catch it."""

    def __init__(self, wait: Wait) -> None:
        super().__init__(f"{wait.reading} at {wait.source}")
        self.wait = wait


class Recorder:
    """A channel that records the ops up to the first wait, and returns nothing."""

    def __init__(self) -> None:
        self.ops: list[ir.Op] = []
        self.wait: Wait | None = None

    @property
    def info(self) -> dict[str, Any]:
        """There is no model."""
        return {"model": "none: a capture"}

    def open_program(self, sink: EventSink, create: dict[str, object]) -> int:
        """Any number; a recorder serves one program."""
        return 0

    def send_op(self, program: int, op: ir.Op) -> None:
        """Record it, unless the program continued past its first wait (by a bare `except:`)."""
        if self.wait is None:
            self.ops.append(op)

    def flush(self, program: int, *, end: bool = False) -> None:
        """No effect: all ops are recorded."""

    def close_program(self, program: int) -> None:
        """No effect: nothing runs."""

    def call_soon(self, work: Callable[[], None]) -> None:
        """Run it at once: there is no other thread, and nothing here takes a lock."""
        work()

    def close(self) -> None:
        """No effect."""


class CapturedProgram(Program):
    """A program whose waits stop it."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        super().__init__(recorder, seed=0, name=name)

    def begin_wait(self, pending: Pending | None) -> None:
        """Raises Waits."""
        recorder = self._recorder
        if recorder.wait is None:
            reading, source = _reading("" if pending is None else pending.name or "")
            recorder.wait = Wait(reading, 0 if pending is None else pending.branch, source)
        raise Waits(recorder.wait)


def trace_of(
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Graph:
    """Run `fn(state, *args, **kwargs)`, also an `async def`, up to its first wait.

    A missing parameter without a default becomes the string "{name}". Raises InvalidProgram when
    the function raises before it waits, with its exception as the cause.
    """
    name = getattr(fn, "__name__", "program")
    recorder = Recorder()
    state = ProgramState(CapturedProgram(recorder, name))
    given, invented = _with_placeholders(fn, args, dict(kwargs or {}))
    try:
        _run(fn, (state, *args), given)
    except Waits:
        pass
    except Exception as error:
        raise InvalidProgram(_failure(fn, name, error, invented)) from error
    finally:
        state._program.end()
    return Graph(name, recorder.ops, recorder.wait)


def _run(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    result = fn(*args, **kwargs)
    if inspect.iscoroutine(result):
        # On its own thread: the caller's may already run an event loop.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, result).result()


def _with_placeholders(
    fn: Callable[..., Any], args: Sequence[Any], given: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Keyword arguments completed with placeholders, and the names of the missing ones."""
    parameters = list(inspect.signature(fn).parameters.values())[1:]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    taken = {p.name for p in positional[: len(args)]}
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and p.name not in taken
        and p.name not in given
    ]
    return {**given, **{name: f"{{{name}}}" for name in missing}}, missing


def _failure(fn: Callable[..., Any], name: str, error: Exception, invented: list[str]) -> str:
    message = f"{name} raised {format_exception_only(error)[-1].rstrip()}, before its first wait"
    file = getattr(getattr(fn, "__code__", None), "co_filename", None)
    lines = [line for line in extract_tb(error.__traceback__) if line.filename == file]
    if lines:
        message += f" (at {file}:{lines[-1].lineno})"
    if invented:
        message += f" (not given, so placeholders: {', '.join(invented)})"
    return message


def _reading(name: str) -> tuple[str, str | None]:
    """How the author's code reads the value that it waits for, and on which line."""
    frame: FrameType | None = sys._getframe(2)
    method = ""
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE_DIR):
        if not frame.f_code.co_name.startswith("<"):
            method = frame.f_code.co_name
        frame = frame.f_back
    source = None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    if method in ("__str__", "__format__"):
        method = "text"
    named = repr(name) if name and method not in _READS_ALL else ""
    if method in ("__getitem__", "get_var"):
        return f"s[{named}]", source
    if method in ("outcome", "aoutcome"):
        return "a hint's outcome", source
    if method in _WAITS_WITHIN:
        return f"{named or 'a value'} in {_WAITS_WITHIN[method]}", source
    return f"s.{method}({named})", source


# Methods that wait for what they have appended themselves.
_WAITS_WITHIN = dict.fromkeys(
    ("append", "aappend", "__iadd__"), "a gen that is checked, or a choice made here"
) | {"__call__": "a tool loop"}
# Methods that read a whole branch; their first wait is not what they read.
_READS_ALL = ("text", "messages", "sync", "atext", "amessages", "adone")
