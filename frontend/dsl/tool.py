"""`st.tool`: a Python function that a program, or its model, calls."""

from __future__ import annotations

import functools
import inspect
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, overload

from ...errors import InvalidProgram
from .state import ProgramState

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # OpenAI's
_MEMORY = 0.3  # weight of the newest measured time


class Tool:
    """A function to be called from programs: `tool(s, ...)` or `s.call(tool, ...)`.

    During the call the branch is paused for about `expected_s`, labelled with the function's name.
    The call returns the function's value and propagates its exceptions, both unchanged. Called
    without a state it is the plain function. `tool_loop` has the model call it: by its name, with
    arguments of the parameters' types, told by its docstring.

    `is_pure`: a call changes nothing, and its value depends on its arguments alone, as far as the
    program is concerned. So it may begin before it is made, and be in vain (`gen(ahead=)`, and
    `tool_loop` by itself).
    """

    TOLD_BY = ("fn", "__name__")  # in the key of a result; the time that it takes changes

    def __init__(
        self, fn: Callable[..., Any], expected_s: float | None = None, *, pure: bool = False
    ) -> None:
        functools.update_wrapper(self, fn)
        named = fn.func if isinstance(fn, functools.partial) else fn
        self.__name__: str = getattr(named, "__name__", type(named).__name__)
        self.fn = fn
        self.is_pure = pure
        self._expected_s = expected_s
        self._measured_s: float | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], ProgramState):
            return args[0].call(self, *args[1:], **kwargs)
        return self._timed_async(args, kwargs) if self.is_async else self._timed(args, kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Tool:
        """A method of an object is a tool with the object bound, as a function would be."""
        bind = getattr(self.fn, "__get__", None)
        if instance is None or bind is None:
            return self
        return Tool(bind(instance, owner), self._expected_s, pure=self.is_pure)

    @property
    def name(self) -> str:
        """What the model calls it."""
        return self.__name__

    @property
    def is_async(self) -> bool:
        """Whether a call has to be awaited."""
        return inspect.iscoroutinefunction(self.fn)

    @property
    def expected_s(self) -> float | None:
        """How long a call takes: as given, else as measured; None: not known yet."""
        return self._measured_s if self._expected_s is None else self._expected_s

    def _timed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        began_s = time.perf_counter()
        try:
            return self.fn(*args, **kwargs)
        finally:
            self._note_time(time.perf_counter() - began_s)

    async def _timed_async(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        began_s = time.perf_counter()
        try:
            return await self.fn(*args, **kwargs)
        finally:
            self._note_time(time.perf_counter() - began_s)

    def _note_time(self, duration_s: float) -> None:
        before = duration_s if self._measured_s is None else self._measured_s
        self._measured_s = before + _MEMORY * (duration_s - before)

    def bound(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments, the same however they are given. Raises TypeError where they do not
        fit."""
        bound = inspect.signature(self.fn).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args, bound.kwargs

    @functools.cached_property
    def _signature(self) -> Any:
        from .tool_schema import signature_of  # pydantic takes 0.1 s

        if not _NAME.fullmatch(self.name):
            allowed = "a function's name of 1 to 64 letters, digits, _ or -"
            raise InvalidProgram.of("tool", self.name, allowed)
        return signature_of(self.fn, self.name)

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON Schema of its arguments. Raises InvalidProgram where a model could not give one."""
        schema: dict[str, Any] = self._signature.parameters
        return schema

    @property
    def definition(self) -> dict[str, Any]:
        """As an item of `tools` in OpenAI's API. Raises InvalidProgram."""
        function = {"name": self.name, "description": self._signature.description}
        return {
            "type": "function",
            "function": {**function, "parameters": self.parameters},
        }

    def arguments(self, text: str) -> dict[str, Any]:
        """Keyword arguments from a model's JSON text. Raises InvalidRequest."""
        values: dict[str, Any] = self._signature.arguments(text)
        return values

    def invoke(self, text: str) -> Any:
        """Call it with a model's arguments, as JSON text; await what an async one returns. Raises
        InvalidRequest for other arguments than it takes, and what the function raises."""
        return self(**self.arguments(text))


@overload
def tool(
    fn: Callable[..., Any], expected_s: float | None = None, *, pure: bool = False
) -> Tool: ...
@overload
def tool(
    fn: None = None, expected_s: float | None = None, *, pure: bool = False
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    fn: Callable[..., Any] | None = None, expected_s: float | None = None, *, pure: bool = False
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function, sync or async. `@tool`, `@tool(expected_s=2)` or `tool(fn)`.

    Args:
        fn: the function.
        expected_s: how long a call takes, in seconds; None: as long as earlier ones took.
        pure: a call changes nothing, and its value depends on its arguments alone. So it may begin
            early, on a thread or, if it is async and the program too, in its event loop, and in
            vain; see `gen(ahead=)`. A tool that is not pure is never called but by the program.
    """
    if fn is None:
        return lambda fn: Tool(fn, expected_s, pure=pure)
    return Tool(fn, expected_s, pure=pure)
