"""`st.tool`: a Python function that a program calls; the runtime knows that the branch waits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

from .state import ProgramState


class Tool:
    """A function to be called from programs: `tool(s, ...)` or `s.call(tool, ...)`.

    During the call the branch is paused for about `expected_s`, labelled with the function's name.
    The call returns the function's value and propagates its exceptions, both unchanged. Called
    without a state it is the plain function.
    """

    def __init__(self, fn: Callable[..., Any], expected_s: float | None = None) -> None:
        functools.update_wrapper(self, fn)
        self.__name__: str = getattr(fn, "__name__", type(fn).__name__)
        self.fn = fn
        self.expected_s = expected_s

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], ProgramState):
            return args[0].call(self, *args[1:], **kwargs)
        return self.fn(*args, **kwargs)


@overload
def tool(fn: Callable[..., Any], expected_s: float | None = None) -> Tool: ...
@overload
def tool(
    fn: None = None, expected_s: float | None = None
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    fn: Callable[..., Any] | None = None, expected_s: float | None = None
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function, sync or async. `@tool`, `@tool(expected_s=2)` or `tool(fn)`."""
    if fn is None:
        return lambda fn: Tool(fn, expected_s)
    return Tool(fn, expected_s)
