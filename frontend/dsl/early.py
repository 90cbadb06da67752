"""Calls of pure tools that begin before the program makes them: which ones, and who has their
values (`../client/early_calls.py`)."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from ...errors import InvalidProgram
from ..client.early_calls import EarlyCall, EarlyCalls, LikelyCall, ReadCalls

Ahead = Callable[[str], functools.partial[Any] | Iterable[functools.partial[Any]] | None]
"""From a gen's text to the calls of pure tools that the program makes if that is what it says."""


class PureTool(Protocol):
    """What `tool.Tool` is, with `pure=True`; `state`, on which tools stand, makes calls, too."""

    fn: Callable[..., Any]
    is_pure: bool

    @property
    def is_async(self) -> bool: ...

    def bound(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]: ...

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any: ...


def read_calls(ahead: Ahead) -> ReadCalls:
    """The same as `EarlyCalls` needs it."""
    return functools.partial(_calls_in, ahead)


def _calls_in(ahead: Ahead, text: str) -> Iterator[LikelyCall]:
    """Raises InvalidProgram for what is no call of a pure tool, and what `ahead` raises."""
    found = ahead(text)
    if found is None:
        return
    for planned in (found,) if isinstance(found, functools.partial) else found:
        tool: Any = planned.func if isinstance(planned, functools.partial) else None
        if not is_pure(tool):
            allowed = "functools.partial(tool, ...) of tools of st.tool(pure=True)"
            raise InvalidProgram.of("ahead", planned, allowed)
        yield likely_call(tool, planned.args, planned.keywords)


def is_pure(fn: object) -> bool:
    """Whether it is a tool that may be called early."""
    return getattr(fn, "is_pure", False) is True


def likely_call(tool: PureTool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LikelyCall:
    """A call that may be made of a pure tool. Raises TypeError for arguments that it lacks."""
    all_args, all_kwargs = tool.bound(args, kwargs)
    return LikelyCall(tool.fn, tool, all_args, all_kwargs, tool.is_async)


def take_early(
    calls: EarlyCalls, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> EarlyCall | None:
    """The early call that is equal to this one, which is about to be made."""
    if not calls or not is_pure(fn):
        return None
    tool: Any = fn
    try:
        all_args, all_kwargs = tool.bound(args, kwargs)
    except TypeError:  # the call itself raises it
        return None
    return calls.take(tool.fn, all_args, all_kwargs)


def expected_s(fn: Callable[..., Any], early: EarlyCall | None) -> float | None:
    """How long a call of a tool will take from now on; None: that is not known."""
    usual: float | None = getattr(fn, "expected_s", None)
    return usual if early is None else early.left_s(usual)


def wait_early(calls: EarlyCalls, early: EarlyCall | None) -> tuple[Any] | None:
    """The early call's value, on this thread; None: there is none, and the call is to be made."""
    if early is None:
        return None
    asked_s = time.perf_counter()
    outcome = early.future.result()
    calls.note_use(early, asked_s)
    return outcome


async def wait_early_async(calls: EarlyCalls, early: EarlyCall | None) -> tuple[Any] | None:
    """The same for a coroutine."""
    if early is None:
        return None
    asked_s = time.perf_counter()
    outcome = await asyncio.wrap_future(early.future)
    calls.note_use(early, asked_s)
    return outcome
