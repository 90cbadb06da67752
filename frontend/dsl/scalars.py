"""Outputs that are one number, truth or quoted text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidProgram


@dataclass(frozen=True, slots=True)
class TypedOutput:
    """How outputs of a type are held to it (`constraint`: an argument of `constraint_of`), and
    read. `read` raises ValueError."""

    constraint: Mapping[str, Any]
    read: Callable[[str], Any]


def scalar_output(kind: object) -> TypedOutput:
    """As with `dtype=`: int, float, "True" or "False", or a text in double quotes. Raises
    InvalidProgram."""
    if not isinstance(kind, type) or kind not in _SCALARS:
        raise InvalidProgram.of("dtype", kind, "int, float, bool or str")
    return TypedOutput({"dtype": kind}, _SCALARS[kind])


def _quoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def _truth(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(f"{text!r} is neither True nor False")
    return text == "True"


_SCALARS: Mapping[type, Callable[[str], Any]] = {
    int: int, float: float, bool: _truth, str: _quoted
}  # fmt: skip
SCALARS_BY_NAME: Mapping[str, type] = {kind.__name__: kind for kind in _SCALARS}
