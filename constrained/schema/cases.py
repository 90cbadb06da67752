"""Constraints on values of each JSON type, as far as all keywords share them."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Protocol, TypeAlias

from ...errors import InvalidGrammar
from . import arrays, numbers, objects, strings
from .document import Document, Place, Signed
from .keywords import is_number


class Kind(IntEnum):
    """The kinds of JSON value; true and false are separate, since each is one value."""

    NULL = 0
    FALSE = 1
    TRUE = 2
    NUMBER = 3
    STRING = 4
    ARRAY = 5
    OBJECT = 6


class Constant:
    """The only case of a kind that is one value."""

    def merged(self, other: Constant) -> Constant:
        return self


Case: TypeAlias = Any
"""Constant, NumberCase, StringCase, ArrayCase or ObjectCase, by kind."""

Cases: TypeAlias = list[Case]

CONSTANT = Constant()
ANY_OF: tuple[Case, ...] = (
    CONSTANT,
    CONSTANT,
    CONSTANT,
    numbers.ANY,
    strings.ANY,
    arrays.ANY,
    objects.ANY,
)


class Expander(Protocol):
    """What one type's keywords need from the expansion that they are part of."""

    document: Document
    asserts_format: bool
    is_lenient: bool

    def cases(self, signed: Signed, kind: Kind, is_tracked: bool = False) -> Cases:
        """The cases of one signed place. Tracked: they record what was evaluated in place."""

    def unsupported(self, place: Place, keyword: str, reason: str, remedy: str = "") -> None:
        """Strict: raises UnsupportedSchema. Lenient: notes it; the caller drops the keyword."""


def kind_of(value: object) -> Kind:
    """The kind of a value in the schema. Raises InvalidGrammar for what is not JSON."""
    if value is None:
        return Kind.NULL
    if isinstance(value, bool):
        return Kind.TRUE if value else Kind.FALSE
    if is_number(value):
        return Kind.NUMBER
    if isinstance(value, str):
        return Kind.STRING
    if isinstance(value, list):
        return Kind.ARRAY
    if isinstance(value, dict):
        return Kind.OBJECT
    raise InvalidGrammar.of("json_schema", value, "JSON values only")
