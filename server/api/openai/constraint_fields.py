"""Request fields that constrain the output, under each name that clients use.

OpenAI's `response_format`; SGLang's `regex`, `ebnf`, `json_schema`, `structural_tag`; vLLM's
`guided_*` and `structured_outputs`. Exactly one of them may be given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from ....errors import InvalidProgram, InvalidRequest
from ....frontend.protocol.constraint import (
    Constraint,
    Formats,
    PropertyOrder,
    Whitespace,
    constraint_of,
)
from ...protocol.constraint_words import ConstraintWords
from ...protocol.known_fields import MAX_SHOWN_CHARS, Items, few

NO_NAMES: Mapping[str, str] = MappingProxyType({})


def _object(value: object) -> object:
    """Accepts what a schema may be. Raises ValueError."""
    if isinstance(value, dict | bool) or value is None:
        return value
    written = ", not its text: leave out json.dumps" if isinstance(value, str) else ""
    raise ValueError(f"a JSON object is wanted{written}")


SchemaObject = Annotated[dict[str, Any] | bool | None, BeforeValidator(_object)]


class JsonSchemaFormat(BaseModel):
    """`response_format.json_schema`; `strict` false: enforce what can be, and warn."""

    model_config = ConfigDict(extra="allow")  # none is taken, but a schema may lie among them

    name: str | None = None
    description: str | None = None
    schema_: SchemaObject = Field(default=None, alias="schema")
    strict: bool | None = None

    def asked(self, field: str) -> dict[str, Any]:
        """The arguments for `constraint_of`. Raises InvalidRequest."""
        other = _other_field(self)
        if self.schema_ is None:
            where = f"; {other} lies right in {field}" if other is not None else ""
            message = f"{field}.schema is missing: {field} is {_NESTED}{where}"
            raise InvalidRequest(message, f"{field}.schema")
        if other is not None:
            message = f"{field}.{other} is not allowed; allowed: left out, or in {field}.schema"
            raise InvalidRequest(message, f"{field}.{other}")
        return {"json_schema": self.schema_, "lenient": True if self.strict is False else None}


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`, with SGLang's structural tags, and with the `schema` that
    llama.cpp, Together and Fireworks have right beside the type."""

    model_config = ConfigDict(extra="allow")  # the fields of a structural tag

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: SchemaObject = Field(default=None, alias="schema")

    def asked(self, field: str) -> dict[str, Any]:
        """The arguments for `constraint_of`; `field`: the client's name of this one. Raises
        InvalidRequest for what the type does not have."""
        self._refuse_misplaced(field)
        if self.type == "structural_tag":
            return {"structural_tag": {"type": self.type, **(self.model_extra or {})}}
        if self.json_schema is not None:
            return self.json_schema.asked(f"{field}.json_schema")
        if self.type == "json_object" and self.schema_ in (None, True, {}):
            return {"is_json_object": True}
        if self.schema_ is not None:
            return {"json_schema": self.schema_}
        if self.type == "json_schema":
            name = f"{field}.json_schema"
            raise InvalidRequest(f"{name} is missing: {_NESTED}", name)
        return {}

    def _refuse_misplaced(self, field: str) -> None:
        enforced = 'left out, or with type "json_schema", which enforces it'
        if self.json_schema is not None and self.type != "json_schema":
            raise self._misplaced(f"{field}.json_schema", enforced)
        if self.schema_ is not None and self.json_schema is not None:
            raise self._misplaced(f"{field}.schema", f"left out beside {field}.json_schema")
        if self.schema_ is not None and self.type not in ("json_object", "json_schema"):
            raise self._misplaced(f"{field}.schema", enforced)
        if self.type != "structural_tag" and (other := _other_field(self)) is not None:
            allowed = f"left out; a schema belongs in {field}.schema"
            raise self._misplaced(f"{field}.{other}", allowed)

    def _misplaced(self, field: str, allowed: str) -> InvalidRequest:
        message = f'{field} is not allowed with type "{self.type}"; allowed: {allowed}'
        return InvalidRequest(message, field)


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`; `disable_any_whitespace` is our `whitespace`. Nothing here ever
    falls back to another compiler, or adds to a schema what it does not say."""

    model_config = ConfigDict(extra="forbid")

    json_: str | dict[str, Any] | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None

    def asked(self) -> dict[str, Any]:
        """The arguments for `constraint_of`, which refuses more than one. Raises InvalidRequest."""
        if self.disable_additional_properties:
            name = "structured_outputs.disable_additional_properties"
            raise InvalidRequest.of(name, True, 'false; the schema says "additionalProperties"')
        return {
            "whitespace": self._whitespace,
            "json_schema": self.json_,
            "regex": self.regex,
            "choices": self.choice,
            "ebnf": self.grammar,
            "structural_tag": self.structural_tag,
            "is_json_object": bool(self.json_object),
        }

    @property
    def _whitespace(self) -> Whitespace | None:
        """Only where the constraint is JSON: clients send it with anything."""
        has_json = self.json_ is not None or self.json_object or self.structural_tag is not None
        if self.disable_any_whitespace is None or not has_json:
            return None
        return "compact" if self.disable_any_whitespace else "flexible"


class GrammarFields(BaseModel):
    """SGLang's, which `/generate` has too."""

    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    _names: Mapping[str, str] = PrivateAttr(default_factory=lambda: NO_NAMES)

    @property
    def constraint_field(self) -> str | None:
        """The field that gives the constraint, if one does, by the client's name."""
        return next(map(self.client_name, self._asked()), None)

    def named(self, names: Mapping[str, str]) -> Self:
        """The same, whose errors call fields what the API that the client speaks calls them."""
        self._names = names
        return self

    def client_name(self, field: str) -> str:
        """What the client calls a field."""
        return self._names.get(field, field)

    def words(self, constraint: Constraint) -> ConstraintWords:
        """In which the client is told of `constraint`, which is this one's or has it within."""
        return ConstraintWords(constraint, self._own_schemas, self._names.get("lenient"))

    def _own_schemas(self) -> Sequence[tuple[str, object]]:
        own = self.constraint()
        is_schema = own is not None and own.kind == "json_schema"
        return [("", json.loads(own.source))] if own is not None and is_schema else []

    def constraint(self) -> Constraint | None:
        """What the output must be. Raises InvalidRequest that names the field."""
        asked = self._asked()
        if len(asked) > 1:
            names = list(map(self.client_name, asked))
            raise InvalidRequest(f"{' and '.join(names)}: only one can be asked for", names[1])
        values = vars(self)
        options = {n: value for n in _OPTIONS if (value := values.get(n)) is not None}
        field, wanted = next(iter(asked.items()), (None, {}))
        try:
            return constraint_of(**{**wanted, **options})
        except InvalidProgram as error:
            given = None if field is None else self.client_name(field)
            at_fault = error.field if error.field in _OPTIONS else given or error.field
            raise InvalidRequest(str(error), at_fault) from error

    def _asked(self) -> dict[str, dict[str, Any]]:
        """By field, what is asked for in the words of `constraint_of`."""
        values = vars(self)
        return {f: {n: value} for f, n in _NAMES.items() if (value := values.get(f)) is not None}


class ConstraintFields(GrammarFields):
    """Mixed into the bodies of both endpoints. `whitespace`, `property_order`, `formats` and
    `lenient` are ours and go with any JSON."""

    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structured_outputs: Annotated[StructuredOutputs, BeforeValidator(few)] | None = None
    whitespace: Whitespace | None = None
    property_order: PropertyOrder | None = None
    formats: Formats | None = None
    lenient: bool | None = None
    jump_forward: bool | None = None

    def constraint(self) -> Constraint | None:
        nested = self.structured_outputs
        patterns = {
            "guided_whitespace_pattern": self.guided_whitespace_pattern,
            "structured_outputs.whitespace_pattern": nested and nested.whitespace_pattern,
        }
        for name, value in patterns.items():
            if value is not None:
                allowed = 'left out; see whitespace, "compact" or "flexible"'
                raise InvalidRequest.of(name, value, allowed)
        return super().constraint()

    def _asked(self) -> dict[str, dict[str, Any]]:
        asked = super()._asked()
        given, name = self.response_format, self.client_name("response_format")
        if given is not None and (wanted := given.asked(name)):
            asked["response_format"] = wanted
        if self.structured_outputs is not None and (wanted := self.structured_outputs.asked()):
            asked["structured_outputs"] = wanted
        return asked


def _other_field(body: BaseModel) -> str | None:
    """One that is given and that its model does not have."""
    others = (n for n, value in (body.model_extra or {}).items() if value is not None)
    other = next(others, None)
    return None if other is None else other[:MAX_SHOWN_CHARS]


_NESTED = '{"name": .., "schema": {..}}, with the JSON Schema in "schema"'
_OPTIONS = ("whitespace", "property_order", "formats", "lenient")
_NAMES = {
    "regex": "regex",
    "ebnf": "ebnf",
    "json_schema": "json_schema",
    "structural_tag": "structural_tag",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choices",
    "guided_grammar": "ebnf",
}
