"""A panic of a native library, as an ordinary error.

Libraries written in Rust raise a panic as `PanicException`. Each library has its own such class,
and all derive from BaseException: `except Exception` lets them pass, and the thread or process that
called ends. So each door to such a library is decorated here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")


def panic_raises(
    kind: type[Exception], what: str
) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """Have a function raise `kind` where a library that it calls panics; `what` has failed then,
    for people."""

    def decorated(function: Callable[Params, Result]) -> Callable[Params, Result]:
        @functools.wraps(function)
        def guarded(*args: Params.args, **kwargs: Params.kwargs) -> Result:
            try:
                return function(*args, **kwargs)
            except Exception:
                raise
            except BaseException as error:
                if type(error).__name__ != "PanicException":
                    raise
                raise kind(f"{what}: {error}") from error

        return guarded

    return decorated
