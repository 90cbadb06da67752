"""Plain functions of a program's author on threads beside an event loop, whatever they raise."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

# What ends a coroutine that awaits, or never reaches it, in place of failing it.
_CONTROL = (StopIteration, GeneratorExit, asyncio.CancelledError)


async def run_beside(
    work: Callable[..., Any],
    /,
    *args: Any,
    threads: ThreadPoolExecutor | None = None,
    **kwargs: Any,
) -> Any:
    """`work(*args, **kwargs)` on a thread, of `threads` or of the loop's own. Raises what it
    raises, but RuntimeError for what has a meaning of its own in a coroutine, as Python itself
    does (PEP 479): a future cannot have StopIteration, and its waiter would wait forever."""
    run = partial(contextvars.copy_context().run, _called, work, args, kwargs)
    return await asyncio.get_running_loop().run_in_executor(threads, run)


def as_failure(error: BaseException) -> BaseException:
    """The same, or a RuntimeError for what would end a coroutine that raises it."""
    if not isinstance(error, _CONTROL):
        return error
    failure = RuntimeError(f"the function raised {type(error).__name__}: {error}".rstrip(": "))
    failure.__cause__ = error
    return failure


def _called(work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return work(*args, **kwargs)
    except _CONTROL as error:
        raise as_failure(error) from error
