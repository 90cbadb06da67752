"""What stands between a tag's `begin` and its `end`: a document of a schema, parameters one by one,
fixed texts, regular ones, and these in sequence, by choice or repeated.

The notation is xgrammar's, for what it has of this:

    {"type": "json_schema", "json_schema": {..}}       {"type": "const_string", "value": ".."}
    {"type": "sequence", "elements": [..]}             {"type": "regex", "pattern": ".."}
    {"type": "or", "elements": [..]}                   {"type": "star", "content": {..}}
    {"type": "tag", "begin": "..", "content": {..}, "end": ".."}
    {"type": "parameters", "json_schema": {..}, "style": {..}}    ours, see ParameterStyle
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ..errors import InvalidGrammar
from .grammar import Expression, Grammar, Literal, concat
from .lark import LarkWriter, regex_of_text
from .regular.regex_parser import parse_regex

if TYPE_CHECKING:
    from .schema.parameters import Parameter, ParameterStyle

MAX_DEPTH = 16  # llguidance refuses more than 32 brackets in each other


@dataclass(frozen=True, slots=True)
class Text:
    """Just this text."""

    value: str


@dataclass(frozen=True, slots=True)
class Pattern:
    """The texts of a regex, in Python's syntax."""

    source: str


@dataclass(frozen=True, slots=True)
class SchemaDocument:
    """A JSON document of the schema."""

    schema: object


@dataclass(frozen=True, slots=True)
class Parameters:
    """An object's properties one by one."""

    schema: object
    style: ParameterStyle


@dataclass(frozen=True, slots=True)
class InSequence:
    """All of these, one after another."""

    parts: tuple[Content, ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """Any one of these."""

    parts: tuple[Content, ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    """This any number of times, or not at all."""

    part: Content


Content: TypeAlias = Text | Pattern | SchemaDocument | Parameters | InSequence | OneOf | Repeated


class Schemas(Protocol):
    """Compiles what contents say of schemas."""

    def document(self, schema: object) -> Grammar:
        """The grammar of a schema's documents."""

    def parameters(self, schema: object, style: ParameterStyle) -> Sequence[Parameter]:
        """An object's properties."""


def parse_content(value: object, depth: int = 0) -> Content:
    """Raises InvalidGrammar."""
    given = mapping(value, "content")
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _PARSERS:
        known = ", ".join(_PARSERS)
        raise InvalidGrammar(f"content type {kind!r} is not known; known are: {known}")
    if depth > MAX_DEPTH:
        raise InvalidGrammar(f"content: nested deeper than {MAX_DEPTH}")
    return _PARSERS[kind](given, depth)


class ContentWriter:
    """Writes contents as right sides of rules; what is made of the same schema is written once."""

    def __init__(self, writer: LarkWriter, schemas: Schemas) -> None:
        self._writer = writer
        self._schemas = schemas
        self._known: dict[str, str] = {}

    def written(self, content: Content) -> str:
        """The right side; "" for the empty text."""
        match content:
            case Text(value):
                return lark_text(value)
            case Pattern(source):
                expression = parse_regex(source, dialect="python", anchored=True)
                return self._writer.regular(Grammar.of(expression))
            case SchemaDocument(schema):
                return self._once(schema, "", lambda: self._document(schema))
            case Parameters(schema, style):
                return self._once(schema, repr(style), lambda: self._parameters(schema, style))
            case InSequence(parts):
                return " ".join(filter(None, map(self.written, parts)))
            case OneOf(parts):
                return one_of([self.written(part) for part in parts])
            case Repeated(part):
                inner = self.written(part)
                return f"({inner})*" if inner else ""

    def _document(self, schema: object) -> str:
        return self._writer.json_rules(self._schemas.document(schema))

    def _parameters(self, schema: object, style: ParameterStyle) -> str:
        found = self._schemas.parameters(schema, style)
        return _Parameters(self._writer, style).written(found)

    def _once(self, schema: object, how: str, write: Callable[[], str]) -> str:
        key = json.dumps([how, schema])
        if key not in self._known:
            self._known[key] = write()
        return self._known[key]


def lark_text(text: str) -> str:
    """A terminal of just this text; "" for the empty one."""
    return f"/{regex_of_text(text)}/" if text else ""


def one_of(choices: Sequence[str]) -> str:
    """Any of these right sides, of which some may be empty."""
    there = list(dict.fromkeys(filter(None, choices)))
    if not there:
        return ""
    joined = f"({' | '.join(there)})"
    return f"{joined}?" if "" in choices else joined


class _Parameters:
    """Writes parameters, those that are required and any of the others, in their order."""

    def __init__(self, writer: LarkWriter, style: ParameterStyle) -> None:
        self._writer = writer
        self._style = style

    def written(self, parameters: Sequence[Parameter]) -> str:
        """The right side; "" where there are none."""
        items = [self._item(each) for each in parameters]
        behind, choices = "", [""]  # what may come behind an item; how the whole may begin
        separator = lark_text(self._style.separator)
        for item, each in zip(reversed(items), reversed(parameters), strict=True):
            first = f"{item} {behind}".strip()
            choices = [first] if each.is_required else [first, *choices]
            more = f"{separator} {item}".strip()
            behind = self._rule(f"{more if each.is_required else f'({more})?'} {behind}".strip())
        return self._rule(one_of(choices)) if items else ""

    def _rule(self, body: str) -> str:
        name = self._writer.new_rule()
        self._writer.line(name, body)
        return name

    def _item(self, parameter: Parameter) -> str:
        style, writer = self._style, self._writer
        begin = lark_text(f"{style.key_begin}{parameter.name}{style.key_end}")
        values = []
        if parameter.flat is not None:
            values.append(writer.regular(_followed(parameter.flat, style.value_end)))
        if parameter.nested is not None:
            rules = writer.json_rules(parameter.nested)
            values.append(f"{rules} {lark_text(style.value_end)}".strip())
        return self._rule(f"{begin} {one_of(values)}")


def _followed(grammar: Grammar, text: str) -> Grammar:
    """The texts of a grammar, each with `text` behind it."""
    rules: dict[str, Expression] = dict(grammar.rules)
    rules[grammar.start] = concat(rules[grammar.start], Literal(text))
    return Grammar(rules, grammar.start)


# --- reading the notation -------------------------------------------------------------------------


def mapping(value: object, what: str) -> Mapping[str, object]:
    """Raises InvalidGrammar for what is no object."""
    if not isinstance(value, dict):
        raise InvalidGrammar(f"{what}: an object is expected")
    return value


def items(given: Mapping[str, object], name: str) -> Sequence[object]:
    """Raises InvalidGrammar for a field that is no array."""
    value = given.get(name)
    if not isinstance(value, list):
        raise InvalidGrammar(f"{name}: an array is expected")
    return value


def string(given: Mapping[str, object], name: str) -> str:
    """Raises InvalidGrammar for a field that is no text."""
    value = given.get(name)
    if not isinstance(value, str):
        raise InvalidGrammar(f"{name}: a text is expected")
    return value


def _style(given: Mapping[str, object]) -> ParameterStyle:
    from .schema.parameters import ParameterStyle  # takes 0.1 s, needed only to compile

    values = mapping(given.get("style"), "style")
    known = {field.name for field in fields(ParameterStyle)}
    unknown = [name for name in values if name not in known]
    if unknown:
        raise InvalidGrammar(f"style: {unknown[0]!r} is not known; known are: {sorted(known)}")
    words = values.get("words", ["null", "false", "true"])
    raw = values.get("raw_strings", True)
    if not isinstance(words, list) or [type(word) for word in words] != [str] * 3:
        raise InvalidGrammar("style: words: three texts are expected")
    if not isinstance(raw, bool):
        raise InvalidGrammar("style: raw_strings: true or false is expected")
    texts = {n: string(values, n) for n in values if n not in ("words", "raw_strings")}
    return ParameterStyle(**texts, raw_strings=raw, words=tuple(words))


def _elements(given: Mapping[str, object], depth: int) -> tuple[Content, ...]:
    return tuple(parse_content(item, depth + 1) for item in items(given, "elements"))


def _tag(given: Mapping[str, object], depth: int) -> Content:
    inner = parse_content(given.get("content"), depth + 1)
    return InSequence((Text(string(given, "begin")), inner, Text(string(given, "end"))))


_PARSERS: dict[str, Callable[[Mapping[str, object], int], Content]] = {
    "json_schema": lambda given, _: SchemaDocument(given.get("json_schema")),
    "parameters": lambda given, _: Parameters(given.get("json_schema"), _style(given)),
    "const_string": lambda given, _: Text(string(given, "value")),
    "regex": lambda given, _: Pattern(string(given, "pattern")),
    "sequence": lambda given, depth: InSequence(_elements(given, depth)),
    "or": lambda given, depth: OneOf(_elements(given, depth)),
    "star": lambda given, depth: Repeated(parse_content(given.get("content"), depth + 1)),
    "tag": _tag,
}
