"""The blocks of a program: `with s.user():`, `with s.var_scope("x"):`, `with s.pause():`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Generic, TypeVar

from ...errors import InvalidProgram
from ..protocol.ir import MAX_OP_NAME_CHARS, MAX_PAUSE_S
from ..protocol.numbers import Range
from .expr import RoleBeginExpr, RoleEndExpr
from .writing import BranchWriter

_SECONDS = Range(0, MAX_PAUSE_S)

S = TypeVar("S", bound=BranchWriter)


class RoleScope(Generic[S]):
    """A chat message for the duration of the block."""

    def __init__(self, state: S, role: str, source: str | None) -> None:
        self._state, self._role, self._source = state, role, source

    def __enter__(self) -> S:
        self._state._append(RoleBeginExpr(self._role), self._source)
        return self._state

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._state._append(RoleEndExpr(self._role), self._source)


class VarScope(Generic[S]):
    """Binds what the block appends to a name, once the block has succeeded."""

    def __init__(self, state: S, name: str) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_OP_NAME_CHARS:
            raise InvalidProgram.of(
                "name", name, f"a string of 1 to {MAX_OP_NAME_CHARS} characters"
            )
        self._state, self._name = state, name
        self._start = 0

    def __enter__(self) -> S:
        self._start = len(self._state._pieces)
        return self._state

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._state._bind_span(self._name, self._start)


class PauseScope(Generic[S]):
    """The author's code works outside the model for the duration of the block."""

    def __init__(self, state: S, expected_s: float | None, label: str, source: str | None) -> None:
        if expected_s is not None:
            expected_s = _SECONDS.checked("expected_s", expected_s)
        self._state = state
        self._expected_s = None if expected_s is None else float(expected_s)
        self._label, self._source = label[:MAX_OP_NAME_CHARS], source
        self._released: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> S:
        self._state._send_pause(self._expected_s, self._label, self._source)
        self._released = self._state._program.released()
        self._released.__enter__()
        self._state._num_pauses += 1
        return self._state

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._state._num_pauses -= 1
        self._released.__exit__(kind, error, traceback)

    async def __aenter__(self) -> S:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, traceback)
