"""The supported keywords of JSON Schema: since when, which values they take, how enforced.

One table for the code (any other keyword is an annotation) and for the documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite

from ...errors import InvalidGrammar

MAX_COUNT = 2**31 - 1  # the largest repetition count of the automata and the parser
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


class Dialect(IntEnum):
    """A published version of JSON Schema; later ones are greater."""

    DRAFT4 = 4
    DRAFT6 = 6
    DRAFT7 = 7
    D2019 = 2019
    D2020 = 2020


DIALECTS: Mapping[str, Dialect] = {
    "http://json-schema.org/draft-04/schema": Dialect.DRAFT4,
    "http://json-schema.org/draft-06/schema": Dialect.DRAFT6,
    "http://json-schema.org/draft-07/schema": Dialect.DRAFT7,
    "https://json-schema.org/draft/2019-09/schema": Dialect.D2019,
    "https://json-schema.org/draft/2020-12/schema": Dialect.D2020,
    "http://json-schema.org/draft-05/schema": Dialect.DRAFT4,  # an editorial revision of it
    "https://spec.openapis.org/oas/3.1/dialect/base": Dialect.D2020,  # adds annotations alone
    "http://json-schema.org/schema": Dialect.D2020,  # the latest
    "draft4": Dialect.DRAFT4,
    "draft6": Dialect.DRAFT6,
    "draft7": Dialect.DRAFT7,
    "2019-09": Dialect.D2019,
    "2020-12": Dialect.D2020,
}


@dataclass(frozen=True, slots=True)
class Keyword:
    """A keyword that restricts instances, or takes part in finding schemas."""

    name: str
    is_value: Callable[[object], bool]
    allowed: str  # the allowed values, in words
    enforced: str  # how, and within which limits
    since: Dialect = Dialect.DRAFT4
    until: Dialect = Dialect.D2020

    def check(self, value: object, pointer: str) -> None:
        """Raises InvalidGrammar where the value is malformed."""
        if not self.is_value(value):
            shown = f"{value!r:.200}"
            raise InvalidGrammar(
                f"{pointer or '/'}: {self.name}={shown} is not allowed; allowed: {self.allowed}",
                "json_schema",
            )


def is_schema(value: object) -> bool:
    """Whether the value can be a schema: an object, or true or false."""
    return isinstance(value, (dict, bool))


def _is_schemas(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_schema, value))


def _is_named_schemas(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_schema, value.values()))


def _is_items(value: object) -> bool:
    return is_schema(value) or (isinstance(value, list) and all(map(is_schema, value)))


def _is_count(value: object) -> bool:
    if isinstance(value, float) and not value.is_integer():
        return False
    return is_number(value) and 0 <= value <= MAX_COUNT  # type: ignore[operator]


def is_number(value: object) -> bool:
    """Whether it is a JSON number; true, false, NaN and infinities are not."""
    if isinstance(value, float):
        return isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: object) -> bool:
    return is_number(value) and value > 0  # type: ignore[operator]


def _is_limit(value: object) -> bool:
    return is_number(value) or isinstance(value, bool)  # draft 4: whether the bound is exclusive


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_type(value: object) -> bool:
    if isinstance(value, str):
        return value in TYPES
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(name, str) and name in TYPES for name in value)
    )


def _is_names_by_name(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_names, value.values()))


def _is_dependencies(value: object) -> bool:
    return isinstance(value, dict) and all(
        is_schema(entry) or _is_names(entry) for entry in value.values()
    )


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_anything(value: object) -> bool:
    return True


_SCHEMA = (is_schema, "a schema: an object, true or false")
_SCHEMAS = (_is_schemas, "a list of schemas, not empty")
_NAMED = (_is_named_schemas, "an object of schemas")
_COUNT = (_is_count, f"a whole number from 0 to {MAX_COUNT}")
_NUMBER = (is_number, "a number")
_TEXT = (_is_text, "a text")
_FLAG = (_is_flag, "true or false")
_NAMES = (_is_names, "a list of property names")
_ITEMS = (_is_items, "a schema, or up to 2019-09 a list of schemas")

_D6, _D7, _D2019, _D2020 = Dialect.DRAFT6, Dialect.DRAFT7, Dialect.D2019, Dialect.D2020

_ROWS = (
    Keyword(
        "type",
        _is_type,
        f"one of {', '.join(TYPES)}, or a list of them",
        "exactly; an integer is written without fraction and exponent",
    ),
    Keyword("enum", _is_list, "a list of values", "exactly, by value; nested values too"),
    Keyword("const", _is_anything, "any value", "exactly, by value", _D6),
    Keyword(
        "$ref",
        *_TEXT,
        "exactly, with recursion; within the document and to the standard's own metaschemas; "
        "nothing is fetched. Up to draft 7 its siblings are ignored",
    ),
    Keyword(
        "$dynamicRef", *_TEXT, "exactly, as `$ref`, on each way by which it is reached", _D2020
    ),
    Keyword(
        "$recursiveRef",
        *_TEXT,
        "exactly, as `$ref`, on each way by which it is reached",
        _D2019,
        _D2019,
    ),
    Keyword("$id", *_TEXT, "base of references", _D6),
    Keyword("$anchor", *_TEXT, "target of references", _D2019),
    Keyword("$dynamicAnchor", *_TEXT, "target of references", _D2020),
    Keyword("$defs", *_NAMED, "target of references", _D2019),
    Keyword("definitions", *_NAMED, "target of references"),
    Keyword("allOf", *_SCHEMAS, "exactly"),
    Keyword("anyOf", *_SCHEMAS, "exactly"),
    Keyword(
        "oneOf",
        *_SCHEMAS,
        "exactly: one branch and none of the others; branches that cannot overlap cost nothing",
    ),
    Keyword("not", *_SCHEMA, "exactly, by the negation of each keyword"),
    Keyword("if", *_SCHEMA, "exactly, with `then` and `else`", _D7),
    Keyword("then", *_SCHEMA, "with `if`", _D7),
    Keyword("else", *_SCHEMA, "with `if`", _D7),
    Keyword("minLength", *_COUNT, "exactly, in code points"),
    Keyword("maxLength", *_COUNT, "exactly, in code points"),
    Keyword(
        "pattern",
        *_TEXT,
        "exactly, ECMA 262 syntax, unanchored; no backreferences, lookarounds in part",
    ),
    Keyword("format", *_TEXT, "see below"),
    Keyword("contentEncoding", *_TEXT, "`base64`; other encodings are annotations", _D7, _D7),
    Keyword(
        "contentMediaType",
        *_TEXT,
        "`application/json` is refused; other types are annotations",
        _D7,
        _D7,
    ),
    Keyword("minimum", *_NUMBER, "exactly, in decimals"),
    Keyword("maximum", *_NUMBER, "exactly, in decimals"),
    Keyword("exclusiveMinimum", _is_limit, "a number", "exactly, in decimals"),
    Keyword("exclusiveMaximum", _is_limit, "a number", "exactly, in decimals"),
    Keyword(
        "multipleOf",
        _is_positive,
        "a number above 0",
        "exactly, in decimals; moduli up to 1,000 (after all of a number's were united), any "
        "modulus where bounds leave at most 1,000 values",
    ),
    Keyword("items", *_ITEMS, "exactly"),
    Keyword("prefixItems", *_SCHEMAS, "exactly", _D2020),
    Keyword("additionalItems", *_SCHEMA, "exactly, beside a list of `items`"),
    Keyword("minItems", *_COUNT, "exactly"),
    Keyword("maxItems", *_COUNT, "exactly"),
    Keyword(
        "uniqueItems",
        *_FLAG,
        "exactly, by value: by the grammar for up to 8 values, else while the output is written",
    ),
    Keyword("contains", *_SCHEMA, "exactly, by counting", _D6),
    Keyword("minContains", *_COUNT, "with `contains`", _D2019),
    Keyword("maxContains", *_COUNT, "with `contains`", _D2019),
    Keyword(
        "unevaluatedItems",
        *_SCHEMA,
        "exactly; each branch of the applicators beside it is asserted or negated",
        _D2019,
    ),
    Keyword("properties", *_NAMED, "exactly; in the schema's order, or in any for up to 6"),
    Keyword("patternProperties", *_NAMED, "exactly; up to 6 patterns over the same keys"),
    Keyword("additionalProperties", *_SCHEMA, "exactly"),
    Keyword("required", _is_names, "a list of property names", "exactly"),
    Keyword("propertyNames", *_SCHEMA, "exactly", _D6),
    Keyword("minProperties", *_COUNT, "exactly"),
    Keyword("maxProperties", *_COUNT, "exactly"),
    Keyword(
        "dependentRequired", _is_names_by_name, "an object of lists of names", "exactly", _D2019
    ),
    Keyword("dependentSchemas", *_NAMED, "exactly", _D2019),
    Keyword("dependencies", _is_dependencies, "an object of schemas or lists of names", "exactly"),
    Keyword(
        "unevaluatedProperties",
        *_SCHEMA,
        "exactly; each branch of the applicators beside it is asserted or negated",
        _D2019,
    ),
)

KEYWORDS: Mapping[str, Keyword] = {keyword.name: keyword for keyword in _ROWS}


def keyword_table() -> str:
    """The table as Markdown, for docs/use/json-schema.md."""
    lines = ["| Keyword | Dialects | Enforced |", "| --- | --- | --- |"]
    for keyword in _ROWS:
        lines.append(f"| `{keyword.name}` | {_dialects(keyword)} | {keyword.enforced} |")
    return "\n".join(lines)


_NAMES_OF = {
    Dialect.DRAFT4: "draft 4",
    Dialect.DRAFT6: "draft 6",
    Dialect.DRAFT7: "draft 7",
    Dialect.D2019: "2019-09",
    Dialect.D2020: "2020-12",
}


def _dialects(keyword: Keyword) -> str:
    if keyword.since == keyword.until:
        return _NAMES_OF[keyword.since]
    if keyword.since == Dialect.DRAFT4 and keyword.until == Dialect.D2020:
        return "all"
    return f"from {_NAMES_OF[keyword.since]}"
