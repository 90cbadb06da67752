"""A function's parameters one by one, for formats that do not write them as one JSON object.

Each listed property becomes a part of its own, with the languages of its values: strings as they
are (or as JSON), null, booleans and numbers in the format's words, arrays and objects as JSON.
Properties that are not listed are never written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from typing import Literal as OneOf

from ...errors import InvalidGrammar
from ..grammar import NOTHING, And, Chars, Expression, Grammar, Literal, Not, alt, concat, repeat
from ..regular.membership import matches
from ..regular.regex_parser import parse_regex
from . import strings
from .cases import Kind
from .document import FALSE, TRUE, Document, Place, Signed
from .json_text import ANY_TEXT
from .pruning import pruned
from .schema_grammar import GrammarBuilder

MAX_PARAMETERS = 256  # guess: far above what functions have
_MAX_REFERENCES = 16  # from the root to the object with the properties
_NOT_ALONE = ("allOf", "anyOf", "oneOf", "not", "if", "enum", "const", "patternProperties",
              "propertyNames", "minProperties", "maxProperties", "dependencies",
              "dependentRequired", "dependentSchemas")  # fmt: skip
_UNNAMEABLE = frozenset("<>=:,(){}[]\"'\\")
_BLANKS = repeat(Chars(((9, 10), (13, 13), (32, 32))), 0)


@dataclass(frozen=True, slots=True)
class ParameterStyle:
    """How parameters are written: KEY_BEGIN name KEY_END value VALUE_END, and SEPARATOR between.

    `raw_strings`: strings are written as they are, between two `quote`s, without the text
    `excludes`; else as JSON. `words`: of null, false and true outside of arrays and objects. `gap`
    may stand, or not, before the first key, around each value, and behind VALUE_END.
    """

    key_begin: str = ""
    key_end: str = ""
    value_end: str = ""
    separator: str = ""
    raw_strings: bool = True
    quote: str = ""
    excludes: str = ""
    gap: str = ""
    words: tuple[str, str, str] = ("null", "false", "true")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter's values: `flat` ones are regular, `nested` ones are arrays and objects. At
    least one of the two is there."""

    name: str
    is_required: bool
    flat: Grammar | None
    nested: Grammar | None


@dataclass(frozen=True, slots=True)
class ParameterOptions:
    """How strictly a schema is read, as for `schema_grammar`."""

    whitespace: OneOf["compact", "flexible"] = "compact"
    property_order: OneOf["schema", "any"] = "schema"
    is_lenient: bool = False
    asserts_format: bool = True


def parameters_of(
    schema: object, style: ParameterStyle, options: ParameterOptions = ParameterOptions()
) -> tuple[tuple[Parameter, ...], tuple[str, ...]]:
    """The parameters in their order, and warnings. Raises UnsupportedSchema for what cannot be
    enforced, InvalidGrammar for what is no object's schema."""
    reader = _Reader(Document(schema), style, options)
    return tuple(reader.parameters()), tuple(reader.warnings)


class _Reader:
    """Takes the schema of an object apart."""

    def __init__(
        self, document: Document, style: ParameterStyle, options: ParameterOptions
    ) -> None:
        self._document = document
        self._style = style
        self._options = options
        self.warnings: dict[str, None] = {}

    def parameters(self) -> Iterator[Parameter]:
        place = self._root()
        listed: Mapping[str, Any] = place.schema.get("properties", {})
        required = place.schema.get("required", ())
        names = dict.fromkeys((*listed, *required))
        if len(names) > MAX_PARAMETERS:
            raise InvalidGrammar(f"/properties: at most {MAX_PARAMETERS} are allowed")
        for name in names:
            child = TRUE
            if name in listed:
                child = self._document.child(place, "properties", name)
            found = self._parameter(place, name, child, is_required=name in required)
            if found is not None:
                yield found

    def _root(self) -> Place:
        """The object's schema, behind references."""
        signed = self._document.root
        for _ in range(_MAX_REFERENCES):
            if signed == FALSE:
                raise InvalidGrammar("/: the schema matches no document", "json_schema")
            place = self._document[signed]
            if "$ref" not in place.schema:
                break
            signed = self._document.target(place, "$ref")
        else:
            raise InvalidGrammar("/$ref: refers to itself", "json_schema")
        kind = place.schema.get("type", "object")
        if kind != "object" and "object" not in kind:
            raise InvalidGrammar(f"/type: {kind!r} is no object, as parameters are", "json_schema")
        for keyword in _NOT_ALONE:
            if keyword in place.schema:
                reason = "parameters that are written one by one have properties and required"
                self._unsupported(place, keyword, reason)
        return place

    def _parameter(
        self, place: Place, name: str, signed: Signed, *, is_required: bool
    ) -> Parameter | None:
        if not name or any(char in _UNNAMEABLE or char.isspace() for char in name):
            reason = f"{name!r} is no parameter's name in this format"
            self._unsupported(place, "required" if is_required else "properties", reason)
            return None
        builder = self._builder()
        texts = dict(builder.texts_by_kind(frozenset({signed}) - {TRUE}))
        nested = builder.grammar_of(
            alt(*(texts.pop(kind) for kind in (Kind.ARRAY, Kind.OBJECT) if kind in texts))
        )
        if Kind.STRING in texts and self._style.raw_strings:
            others = [*texts, *([] if nested is None else (Kind.ARRAY, Kind.OBJECT))]
            cases = builder.expansion.state_cases(frozenset({signed}) - {TRUE}, Kind.STRING)
            texts[Kind.STRING] = self._raw(cases, others)
        for kind, word in zip((Kind.NULL, Kind.FALSE, Kind.TRUE), self._style.words, strict=True):
            if kind in texts:
                texts[kind] = Literal(word)
        self.warnings.update(builder.expansion.warnings)
        flat = pruned(alt(*texts.values()), builder.rules)
        if flat is None and nested is None:
            if is_required:
                raise InvalidGrammar(f"/properties/{name}: no value is allowed", "json_schema")
            return None
        return Parameter(name, is_required, flat, nested)

    def _raw(self, cases: Sequence[strings.StringCase], others: Iterable[Kind]) -> Expression:
        """Strings as they are: without the closing mark, and none that reads as another kind."""
        quote, excluded = self._style.quote, list[Expression]()
        for mark in filter(None, (self._style.excludes, quote)):
            excluded.append(concat(ANY_TEXT, Literal(mark), ANY_TEXT))
        if not quote:
            excluded += [_READS_AS[kind] for kind in others if kind in _READS_AS]
        allowed = alt(*(_without(case, excluded) for case in cases))
        return concat(Literal(quote), allowed, Literal(quote))

    def _builder(self) -> GrammarBuilder:
        options = self._options
        return GrammarBuilder(
            self._document,
            options.whitespace,
            options.property_order,
            options.is_lenient,
            options.asserts_format,
        )

    def _unsupported(self, place: Place, keyword: str, reason: str) -> None:
        builder = self._builder()
        builder.expansion.unsupported(place, keyword, reason)
        self.warnings.update(builder.expansion.warnings)


def _without(case: strings.StringCase, excluded: Sequence[Expression]) -> Expression:
    """The strings of a case that are in none of these languages."""
    if case.values is not None:
        kept = [v for v in case.values if not any(matches(part, v) for part in excluded)]
        return alt(*map(Literal, sorted(kept)))
    text = strings.characters(case)
    return And((text, *map(Not, excluded))) if excluded and text != NOTHING else text


def _alone(expression: Expression) -> Expression:
    return concat(_BLANKS, expression, _BLANKS)


_NUMBER = parse_regex(r"-?[0-9]+([.][0-9]+)?([eE][-+]?[0-9]+)?", anchored=True)
# Texts that are read as another kind of value where that may stand in place of a string.
_READS_AS = {
    Kind.NULL: _alone(alt(Literal("null"), Literal("None"))),
    Kind.FALSE: _alone(alt(Literal("false"), Literal("False"))),
    Kind.TRUE: _alone(alt(Literal("true"), Literal("True"))),
    Kind.NUMBER: _alone(_NUMBER),
    Kind.ARRAY: _alone(concat(Literal("["), ANY_TEXT)),
    Kind.OBJECT: _alone(concat(Literal("{"), ANY_TEXT)),
}
