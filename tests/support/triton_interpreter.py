"""Triton's interpreter without the work that it repeats.

Before each launch, and before each call of a `@triton.jit` function by another, it searches all of
`triton.language` for what to replace by its own. A call's search takes milliseconds and finds
nothing, since the launch has replaced all of it: half of the time of a kernel with such calls.

Each sum, difference and product of integers it computes once more in 64 bits, to tell overflows by
an assertion that it never makes, as it is not in debug mode: a third of the time of an index.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def spare_repeated_work() -> None:
    """In all later launches of this process."""
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    _replace_language_once_a_launch()


def _replace_language_once_a_launch() -> None:
    replace_all, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    replaced: set[ModuleType] = set()

    def replace_once(function: Callable[..., Any]) -> Any:
        languages = _languages(function)
        if languages <= replaced:
            return interpreter._LangPatchScope()
        replaced.update(languages)
        return replace_all(function)

    def restore_all(scope: Any) -> None:
        replaced.clear()
        restore(scope)

    interpreter._patch_lang = replace_once
    interpreter._patch_builtin = _replace_builtins
    interpreter._LangPatchScope.restore = restore_all


@functools.cache
def _languages(function: Callable[..., Any]) -> frozenset[ModuleType]:
    """Those that a function names."""
    named = function.__globals__.values()  # type: ignore[attr-defined]
    return frozenset(language for language in (tl, tl.core) if any(n is language for n in named))


def _replace_builtins(language: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins(language):
        if getattr(language, name) is member:
            interpreter._patch_attr(language, name, member, builder, scope)


@functools.cache
def _builtins(language: Any) -> list[tuple[str, Any]]:
    """Of a module or a class, before any is replaced."""
    return [pair for pair in inspect.getmembers(language) if tl.core.is_builtin(pair[1])]
