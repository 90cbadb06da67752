"""JSON texts as expressions: encoded strings, literals, whitespace between tokens.

One spelling per string: raw UTF-8 except `\\"`, `\\\\`, `\\b \\f \\n \\r \\t` and, for the other
control characters, `\\u00xx` in lower case. This code is prefix-free, so encoding commutes with
`And` and `Not`. Only unconstrained strings may use JSON's other spellings too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from json.encoder import encode_basestring

from ...errors import InvalidGrammar
from ..grammar import (
    EMPTY_WORD,
    MAX_CODE_POINT,
    SURROGATES,
    Alt,
    And,
    Chars,
    Concat,
    Expression,
    Literal,
    Not,
    Ref,
    Repeat,
    alt,
    concat,
    optional,
    repeat,
)

QUOTE = Literal('"')
ANY_CHAR = Chars(((0, SURROGATES[0] - 1), (SURROGATES[1] + 1, MAX_CODE_POINT)))
ANY_TEXT = Repeat(ANY_CHAR, 0, None)

_ESCAPED = (*range(0x20), 0x22, 0x5C)
_HEX = Chars(((48, 57), (65, 70), (97, 102)))


@dataclass(frozen=True, slots=True)
class Spacing:
    """JSON's structural tokens with the whitespace allowed around them."""

    open_array: Expression
    close_array: Expression
    open_object: Expression
    close_object: Expression
    empty_array: Expression
    empty_object: Expression
    comma: Expression
    colon: Expression


def spacing(whitespace: str) -> Spacing:
    """`compact`: none. `flexible`: at each place a line end or nothing, then up to 20 blanks."""
    space: Expression = EMPTY_WORD
    if whitespace == "flexible":
        space = concat(optional(Literal("\n")), repeat(Chars(((9, 9), (32, 32))), 0, 20))
    return Spacing(
        open_array=concat(Literal("["), space),
        close_array=concat(space, Literal("]")),
        open_object=concat(Literal("{"), space),
        close_object=concat(space, Literal("}")),
        empty_array=concat(Literal("["), space, Literal("]")),
        empty_object=concat(Literal("{"), space, Literal("}")),
        comma=concat(space, Literal(","), space),
        colon=concat(space, Literal(":"), space),
    )


def encoded(text: str) -> str:
    """The canonical JSON text of a string. Raises InvalidGrammar for invalid Unicode."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidGrammar.of("json_schema", text, "texts without lone surrogates") from error
    return encode_basestring(text)


def json_string(expression: Expression) -> Expression:
    """`"`, the canonical encoding of the expression's texts, `"`. A regular expression only."""
    return concat(QUOTE, _body(expression), QUOTE)


def _body(part: Expression) -> Expression:
    match part:
        case Literal(text):
            return Literal(encoded(text)[1:-1])
        case Chars():
            return _characters(part)
        case Concat(parts):
            return concat(*map(_body, parts))
        case Alt(parts):
            return alt(*map(_body, parts))
        case Repeat(inner, least, most):
            return Repeat(_body(inner), least, most)
        case And(parts):
            return And(tuple(map(_body, parts)))
        case Not(inner):
            return And((_body(ANY_TEXT), Not(_body(inner))))
        case Ref(name):
            raise AssertionError(f"a string's language refers to rule {name}")


@lru_cache(maxsize=1024)
def _characters(chars: Chars) -> Expression:
    raw: list[tuple[int, int]] = []
    escaped: list[int] = []
    for first, last in chars.ranges:
        escaped.extend(code for code in _ESCAPED if first <= code <= last)
        for low, high in ((0x20, 0x21), (0x23, 0x5B), (0x5D, MAX_CODE_POINT)):
            if max(first, low) <= min(last, high):
                raw.append((max(first, low), min(last, high)))
    parts: list[Expression] = [Chars(tuple(raw))] if raw else []
    return alt(*parts, *_escapes(escaped))


def _escapes(codes: list[int]) -> list[Expression]:
    """The escapes of these characters, grouped by all but their last character."""
    lasts: dict[str, list[str]] = {}
    for code in codes:
        escape = encoded(chr(code))[1:-1]
        lasts.setdefault(escape[:-1], []).append(escape[-1])
    return [
        concat(Literal(head), Chars(tuple((ord(last), ord(last)) for last in sorted(ends))))
        for head, ends in lasts.items()
    ]


def _any_json_string() -> Expression:
    """Every spelling of every string; surrogates only as pairs."""
    unescaped = Chars(
        ((0x20, 0x21), (0x23, 0x5B), (0x5D, SURROGATES[0] - 1), (SURROGATES[1] + 1, MAX_CODE_POINT))
    )
    d = Chars(((68, 68), (100, 100)))
    not_d = Chars(((48, 57), (65, 67), (69, 70), (97, 99), (101, 102)))
    low_digit = Chars(((48, 55),))
    high_half = Chars(((56, 57), (65, 66), (97, 98)))
    low_half = Chars(((67, 70), (99, 102)))
    scalar = alt(
        concat(not_d, repeat(_HEX, 3, 3)),
        concat(d, low_digit, repeat(_HEX, 2, 2)),
        concat(d, high_half, _HEX, _HEX, Literal("\\u"), d, low_half, _HEX, _HEX),
    )
    simple = Chars(tuple((ord(c), ord(c)) for c in sorted('"\\/bfnrt')))
    escape = concat(Literal("\\"), alt(simple, concat(Literal("u"), scalar)))
    return concat(QUOTE, repeat(alt(unescaped, escape), 0), QUOTE)


ANY_JSON_STRING = _any_json_string()
