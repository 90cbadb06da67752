"""What a run has become, apart from its program and its connection: it can be pickled and kept."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import InvalidProgram, StemmaError
from ..client.program import TokenCounts
from .state import ProgramState


@dataclass(frozen=True, slots=True)
class Result:
    """A run's values and texts, read as from its state: `result["x"]`, `result.text()`.

    `index`: its place in its batch; `is_stored`: it was not run, but found in a store; `tokens`:
    what all its calls took.
    """

    ret_value: Any = None
    index: int = 0
    is_stored: bool = False
    tokens: TokenCounts = field(default_factory=TokenCounts)
    latency_s: float = 0.0
    _values: Mapping[str, Any] = field(default_factory=dict)
    _texts: Mapping[str, str] = field(default_factory=dict)  # by name; "": all of it
    _metas: Mapping[str, Any] = field(default_factory=dict)
    _unread: Mapping[str, Exception] = field(default_factory=dict)  # values that cannot be read
    _messages: Sequence[Mapping[str, Any]] = ()
    _error: BaseException | None = None

    def __getitem__(self, name: str) -> Any:
        """The value called `name`. Raises KeyError, and what the run or this value failed of."""
        if self._error is not None:
            raise self._error
        if name in self._unread:
            raise self._unread[name]
        if name not in self._values:
            raise KeyError(f"no value called {name!r}; there are {sorted(self._values)}")
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values or name in self._unread

    def __str__(self) -> str:
        """The same as `text()`."""
        return self.text()

    def names(self) -> list[str]:
        """Names of all values, in the order in which they were made."""
        return [*self._values, *self._unread]

    def generated(self) -> list[str]:
        """Those of `names` that were generated or selected: the ones `get_meta_info` knows."""
        return list(self._metas)

    def text(self, name: str | None = None) -> str:
        """All text, or that of the value `name`."""
        if self._error is not None:
            raise self._error
        if name is not None and name not in self._texts:
            raise KeyError(f"no value called {name!r} with a text; see names()")
        return self._texts["" if name is None else name]

    def messages(self) -> list[dict[str, Any]]:
        """The chat messages, as `{"role", "content", ...}`."""
        if self._error is not None:
            raise self._error
        return [dict(message) for message in self._messages]

    def get_meta_info(self, name: str) -> Any:
        """Meta info of the gen or select called `name`, see `ProgramState.get_meta_info`."""
        if self._error is not None:
            raise self._error
        if name not in self._metas:
            raise InvalidProgram.of("name", name, f"one of {sorted(self._metas)}")
        return self._metas[name]

    def error(self) -> BaseException | None:
        """What the run failed of; None: it has not."""
        return self._error

    def numbered(self, index: int, *, is_stored: bool) -> Result:
        """The same at this place of a batch."""
        return replace(self, index=index, is_stored=is_stored)


def result_of(state: ProgramState, index: int = 0) -> Result:
    """Of a program that has ended well."""
    values: dict[str, Any] = {}
    texts, metas, unread = {"": state.text()}, dict[str, Any](), dict[str, Exception]()
    for name in state.names():
        try:
            values[name] = state[name]
        except StemmaError as error:
            unread[name] = error
        with contextlib.suppress(StemmaError):
            texts[name] = state.text(name)
        with contextlib.suppress(StemmaError):
            metas[name] = state.get_meta_info(name)
    program = state._program
    ended_s = program.started_s if program.ended_s is None else program.ended_s
    return Result(
        None if isinstance(state.ret_value, ProgramState) else state.ret_value,
        index,
        tokens=program.token_counts(),
        latency_s=ended_s - program.started_s,
        _values=values,
        _texts=texts,
        _metas=metas,
        _unread=unread,
        _messages=state.messages(),
    )


def failed_result(state: ProgramState | None, error: BaseException, index: int) -> Result:
    """Of a program that has failed, or could not be started."""
    tokens = TokenCounts() if state is None else state._program.token_counts()
    return Result(None, index, tokens=tokens, _error=error)
