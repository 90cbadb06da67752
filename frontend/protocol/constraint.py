"""Output constraints of a gen or an HTTP request: a regex, a JSON Schema, a grammar or tags.

Every form is converted to a `Constraint` here, so that the DSL and the HTTP API mean the same by
the same words. The runtime, which compiles it, finds out whether it can be enforced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn, get_args

from ...errors import InvalidProgram
from .json_text import json_text
from .schema_words import require_schema

ConstraintKind = Literal["regex", "choices", "json_schema", "json_object", "ebnf", "structural_tag"]
Whitespace = Literal["compact", "flexible"]
PropertyOrder = Literal["schema", "any"]
Formats = Literal["enforce", "ignore"]

MAX_SOURCE_BYTES = 1024 * 1024

# As SGLang's, but bounded: no sign "+", no digits beyond 64 bits, no whitespace after.
DTYPES: dict[type, str] = {
    int: r"-?(0|[1-9][0-9]{0,17})",
    float: r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?",
    bool: r"(True|False)",
    str: r'"[^"\\\x00-\x1f]*"',
}
_SUBSCHEMA = ("items", "additionalProperties", "contains", "not", "if", "then", "else",
              "propertyNames", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_SUBSCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SUBSCHEMAS_BY_NAME = ("properties", "$defs", "definitions", "patternProperties")


@dataclass(frozen=True, slots=True)
class Constraint:
    """The language of an output. `source` is, by kind: the regex; a JSON array of texts; the schema
    as JSON; nothing; the grammar (Lark's or GBNF's syntax); the structural tag as JSON.

    Raises InvalidProgram for an unknown kind, and for a source that is too large.
    """

    kind: ConstraintKind
    source: str = ""
    whitespace: Whitespace = "compact"
    property_order: PropertyOrder = "schema"
    is_lenient: bool = False
    formats: Formats = "enforce"

    def __post_init__(self) -> None:
        _require_one_of("constraint", self.kind, get_args(ConstraintKind))
        _require_one_of("whitespace", self.whitespace, get_args(Whitespace))
        _require_one_of("property_order", self.property_order, get_args(PropertyOrder))
        _require_one_of("formats", self.formats, get_args(Formats))
        if not isinstance(self.is_lenient, bool):
            raise InvalidProgram.of("lenient", self.is_lenient, "true or false")
        _require_source(self.kind, self.source)

    @property
    def is_document(self) -> bool:
        """Whether the output is one JSON document."""
        return self.kind in ("json_schema", "json_object")

    @property
    def schema(self) -> Any:
        """The schema of that document."""
        return json.loads(self.source) if self.source else {"type": "object"}

    @classmethod
    def from_wire(cls, given: object) -> Constraint:
        """Raises InvalidProgram."""
        names = {f.name for f in fields(cls)}
        if not isinstance(given, dict) or "kind" not in given or not set(given) <= names:
            raise InvalidProgram.of("constraint", given, f"an object of {sorted(names)}")
        return cls(**given)


def constraint_of(
    *,
    regex: str | None = None,
    json_schema: object = None,
    ebnf: str | None = None,
    choices: Sequence[str] | None = None,
    dtype: type | None = None,
    structural_tag: object = None,
    is_json_object: bool = False,
    whitespace: Whitespace | None = None,
    property_order: PropertyOrder | None = None,
    formats: Formats | None = None,
    lenient: bool | None = None,
) -> Constraint | None:
    """The one constraint given, or None. Raises InvalidProgram for more than one."""
    given = {
        "regex": regex,
        "json_schema": json_schema,
        "ebnf": ebnf,
        "choices": choices,
        "dtype": dtype,
        "structural_tag": structural_tag,
        "json_object": is_json_object or None,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise InvalidProgram(f"{' and '.join(names)}: only one of them can be asked for", names[1])
    options = {
        "whitespace": whitespace,
        "property_order": property_order,
        "formats": formats,
        "lenient": lenient,
    }
    has_json = names in (["json_schema"], ["json_object"], ["structural_tag"])
    for name, value in options.items():
        if value is not None and not has_json:
            raise InvalidProgram.of(name, value, "only together with json_schema or tags")
    if not names:
        return None
    if dtype is not None:
        return Constraint("regex", _regex_of(dtype))
    if choices is not None:
        return Constraint("choices", _json("choices", _checked_choices(choices)))
    if not has_json:
        return Constraint("regex", regex) if regex is not None else Constraint("ebnf", ebnf or "")
    kind: ConstraintKind
    if json_schema is not None:
        kind, source = "json_schema", schema_text(json_schema)
    elif structural_tag is not None:
        kind, source = "structural_tag", _json("structural_tag", structural_tag)
    else:
        kind, source = "json_object", ""
    return Constraint(
        kind,
        source,
        whitespace or "compact",
        property_order or "schema",
        bool(lenient),
        formats or "enforce",
    )


def schema_text(schema: object) -> str:
    """A JSON Schema as compact text: from a dict or bool, JSON text, or a pydantic model.

    A model's objects are closed (`additionalProperties: false`) unless it sets `extra="allow"`:
    pydantic itself would ignore unknown fields. Raises InvalidProgram, also for what seems to be
    an example.
    """
    describe = getattr(schema, "model_json_schema", None)
    if callable(describe):
        return _json("json_schema", _closed(describe()))
    if isinstance(schema, str):
        _require_source("json_schema", schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidProgram(f"json_schema is not JSON: {error}", "json_schema") from error
    if not isinstance(schema, Mapping | bool):
        allowed = "a schema as dict or JSON text, or a pydantic model"
        raise InvalidProgram.of("json_schema", schema, allowed)
    text = _json("json_schema", schema)
    if isinstance(schema, Mapping):
        require_schema(schema, "json_schema")
    return text


def _closed(schema: Any) -> Any:
    """Adds `additionalProperties: false` where an object has properties and does not set it."""
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _SUBSCHEMA:
            closed[name] = _closed(value)
        elif name in _SUBSCHEMAS:
            closed[name] = [_closed(item) for item in value]
        elif name in _SUBSCHEMAS_BY_NAME:
            closed[name] = {key: _closed(item) for key, item in value.items()}
        else:
            closed[name] = value
    if "properties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def _json(field: str, value: object) -> str:
    """Compact JSON text; text stays as it is."""
    if isinstance(value, str):
        return value
    try:
        text = json_text(value, MAX_SOURCE_BYTES)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidProgram(f"{field} is not JSON: {error}", field) from error
    if text is None:
        _refuse_size(field, "more")
    return text


def _regex_of(dtype: type) -> str:
    if not isinstance(dtype, type) or dtype not in DTYPES:
        raise InvalidProgram.of("dtype", dtype, f"one of {[kind.__name__ for kind in DTYPES]}")
    return DTYPES[dtype]


def _checked_choices(choices: object) -> list[str]:
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise InvalidProgram.of("choices", choices, "at least one text")
    if not all(isinstance(choice, str) for choice in choices):
        raise InvalidProgram.of("choices", choices, "texts")
    return list(choices)


def _require_one_of(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidProgram.of(field, value, f"one of {allowed}")


def _require_source(kind: str, source: object) -> None:
    if not isinstance(source, str):
        raise InvalidProgram.of(kind, source, "a text")
    try:
        num_bytes = len(source.encode())
    except UnicodeEncodeError as error:
        raise InvalidProgram(f"{kind}: no text has a lone surrogate: {error}", kind) from error
    if num_bytes > MAX_SOURCE_BYTES:
        _refuse_size(kind, f"{num_bytes} bytes")


def _refuse_size(field: str, given: str) -> NoReturn:
    raise InvalidProgram.of(field, given, f"at most {MAX_SOURCE_BYTES} bytes")
