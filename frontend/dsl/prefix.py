"""Finds the prefix that all runs of a function share, whatever their arguments.

The function runs once with unknown arguments: an argument may be appended, added to text or
formatted into it, and the text before it is known; any other use of one ends the search, and so
does the first call of the model.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ..client.channel import EventSink
from ..client.program import Program
from ..protocol import ir
from .expr import Appendable, Expr
from .options import RunOptions
from .state import ProgramState

_MARK = "\ue000\uf8ff\ue000"  # placeholder for an argument in text; private use, so in no other


class _Ends(BaseException):
    """The constant prefix ends here. Not an Exception: the author's handlers must not catch it."""


class Unknown(Expr):
    """An argument without a value."""

    __slots__ = ()

    def __str__(self) -> str:
        return _MARK

    def __format__(self, spec: str) -> str:
        return _MARK

    def _end(self, *_: object, **__: object) -> NoReturn:
        raise _Ends

    __bool__ = __len__ = __iter__ = __getitem__ = __call__ = __int__ = __float__ = _end
    __contains__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __enter__ = __getattr__ = _end
    __hash__ = None  # type: ignore[assignment]


class _PrefixState(ProgramState):
    def _append(self, other: Appendable, source: str | None) -> None:
        if isinstance(other, Unknown):
            raise _Ends
        super()._append(other, source)


class _Prefix:
    """A channel that records the first ops of the first branch, then ends the function."""

    def __init__(self) -> None:
        self.ops: list[ir.Op] = []
        self.info: dict[str, Any] = {"model": "none"}

    def open_program(self, sink: EventSink, create: dict[str, object]) -> int:
        return 0

    def send_op(self, program: int, op: ir.Op) -> None:
        if isinstance(op, ir.Text):
            known, found, _ = op.text.partition(_MARK)
            if known:
                self.ops.append(ir.Text(0, op.seq, op.source, known))
            if found:
                raise _Ends
        elif isinstance(op, ir.RoleBegin | ir.RoleEnd | ir.Tokens):
            self.ops.append(op)
        else:
            raise _Ends

    def flush(self, program: int, *, end: bool = False) -> None:
        if not end:
            raise _Ends

    def close_program(self, program: int) -> None:
        """No effect: nothing runs."""

    def call_soon(self, work: Callable[[], None]) -> None:
        """No effect: the function never waits."""

    def close(self) -> None:
        """No effect."""


def prefix_of(
    fn: Callable[..., Any], bound: Mapping[str, object], missing: Sequence[str]
) -> list[ir.Op]:
    """The ops with which every run of `fn` begins; `missing` are its varying parameters."""
    recorder = _Prefix()
    state = _PrefixState(Program(recorder, seed=0))
    unknown = {name: Unknown() for name in missing}
    with contextlib.suppress(_Ends, Exception):  # what an unknown argument breaks ends it, too
        result = fn(state, **bound, **unknown)
        if inspect.iscoroutine(result):
            with contextlib.closing(result):
                result.send(None)  # what it awaits never arrives: one step is all
    state._program.is_ended = True
    return recorder.ops


def cache_prefix(
    fn: Callable[..., Any],
    bound: Mapping[str, object],
    missing: Sequence[str],
    options: RunOptions,
) -> int:
    """Make the backend compute the prefix, by a gen of one token after it; returns its tokens."""
    ops = prefix_of(fn, bound, missing)
    if not ops:
        return 0
    program = options.start()._program
    for op in ops:
        send = program.send_silent if isinstance(op, ir.Text) else program.send
        send(op)
    last = program.send(ir.Gen(0, len(ops), None, "", ir.GenParams(max_tokens=1)))
    program.end()
    num_tokens = int(program.wait(last).meta["prompt_tokens"])
    program.wait_done()
    return num_tokens
