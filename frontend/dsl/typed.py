"""Outputs as Python values: what a type allows of a text, and the text read as one.

A pydantic model, dataclass, TypedDict, list, dict, union and so on is written as JSON of its
schema; Literal and Enum of texts alone as one of these texts, without quotes.
"""

from __future__ import annotations

import enum
import functools
import typing
from collections.abc import Callable
from typing import Any, Literal

import pydantic

from ...errors import InvalidProgram
from .scalars import TypedOutput, scalar_output


def typed_output(kind: Any) -> TypedOutput:
    """Raises InvalidProgram for what is no type of data."""
    try:
        return _remembered(kind)
    except TypeError as error:  # it cannot be hashed
        raise InvalidProgram.of("type", kind, "a type") from error


@functools.lru_cache(256)
def _remembered(kind: Any) -> TypedOutput:
    if kind is str:
        return TypedOutput({}, str)
    if kind in (int, float, bool):
        return scalar_output(kind)
    try:
        adapter = pydantic.TypeAdapter(kind)
        choices = _texts_of(kind)
        if choices is not None:
            return TypedOutput({"choices": list(choices)}, _reading(adapter.validate_python))
        schema = adapter.json_schema()
    except (pydantic.errors.PydanticUserError, TypeError, NameError, SyntaxError) as error:
        shown = f"a type whose values are JSON ({error})"
        raise InvalidProgram.of("type", kind, shown) from error
    return TypedOutput({"json_schema": _Described(schema)}, _reading(adapter.validate_json))


def _texts_of(kind: Any) -> tuple[str, ...] | None:
    """The texts that a Literal or an Enum consists of; None where there is anything else."""
    values: tuple[Any, ...] = ()
    if typing.get_origin(kind) is Literal:
        values = typing.get_args(kind)
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        values = tuple(member.value for member in kind)
    return values if values and all(isinstance(v, str) and v for v in values) else None


def problems_of(error: pydantic.ValidationError) -> str:
    """What is wrong, in a line."""
    problems = []
    for problem in error.errors(include_url=False, include_context=False):
        place = ".".join(map(str, problem["loc"]))
        problems.append(f"{place}: {problem['msg']}" if place else problem["msg"])
    return "; ".join(problems)


def _reading(validate: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return validate(text)
        except pydantic.ValidationError as error:
            raise ValueError(problems_of(error)) from error

    return read


class _Described:
    """A schema of pydantic's: objects are closed, as those of a model's."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema

    def model_json_schema(self) -> dict[str, Any]:
        return self._schema
