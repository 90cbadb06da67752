"""What structural tags are made of, as their notation says it: xgrammar's, for what is a language
of characters.

    {"type": "json_schema", "json_schema": {..}, "style": "json" | "qwen_xml"}
    {"type": "qwen_xml_parameter", "json_schema": {..}}          the same as that style
    {"type": "parameters", "json_schema": {..}, "style": {..}}   ours, see ParameterStyle
    {"type": "const_string", "value": ".."}          {"type": "regex", "pattern": ".."}
    {"type": "grammar", "grammar": "root ::= .."}    {"type": "any_text", "excludes": [".."]}
    {"type": "sequence", "elements": [..]}           {"type": "or", "elements": [..]}
    {"type": "star", "content": {..}}                {"type": "plus", "content": {..}}
    {"type": "optional", "content": {..}}
    {"type": "repeat", "min": 1, "max": -1, "content": {..}}     -1: any number
    {"type": "tag", "begin": "..", "content": {..}, "end": ".." or [..]}
    {"type": "tags_with_separator", "tags": [..], "separator": "..", "at_least_one": false,
     "stop_after_first": false}
    {"type": "triggered_tags", "triggers": [..], "tags": [..], "at_least_one": false,
     "stop_after_first": false, "excludes": [..]}
    {"type": "dispatch", "rules": [["..", {..}]], "loop": true, "excludes": [..]}

With `at_least_one`, triggered tags begin with a tag, as in xgrammar; ours is `text_first`: true, by
which text may come before.

Source: xgrammar 0.2, structural_tag.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, TypeAlias

from ..errors import InvalidGrammar

if TYPE_CHECKING:
    from .schema.parameters import ParameterStyle

MAX_DEPTH = 16  # of contents in each other
MAX_CHARS = 100_000  # that `any_text` may be bounded to
_OF_TOKENS = ("token", "exclude_token", "any_tokens", "token_triggered_tags", "token_dispatch")


@dataclass(frozen=True, slots=True)
class Text:
    """Just this text."""

    value: str


@dataclass(frozen=True, slots=True)
class Pattern:
    """The texts of a regex, in Python's syntax."""

    source: str


@dataclass(frozen=True, slots=True)
class Rules:
    """The texts of a grammar in GBNF."""

    source: str


@dataclass(frozen=True, slots=True)
class AnyText:
    """Any text in which none of these occurs, of at most so many characters."""

    excludes: tuple[str, ...] = ()
    max_chars: int | None = None


@dataclass(frozen=True, slots=True)
class SchemaDocument:
    """A JSON document of the schema, which stands at `pointer`."""

    schema: object
    pointer: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Parameters:
    """An object's properties one by one; its schema stands at `pointer`."""

    schema: object
    style: ParameterStyle
    pointer: str = field(default="", compare=False)


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
    """This so many times; `most` None: any number."""

    part: Content
    least: int = 0
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Tag:
    """`begin`, a content, and one of `ends`. Text in the content that nothing else bounds goes no
    further than to the first of the ends."""

    begin: str
    content: Content
    ends: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Free text up to the first of the triggers, then what the trigger begins, and so on.

    `rules`: by trigger, what may come behind it. `is_required`: one has to come, and if not
    `begins_free`, at the very beginning; `is_repeated`: others may follow.
    """

    rules: tuple[tuple[str, Content], ...]
    excludes: tuple[str, ...] = ()
    is_required: bool = False
    begins_free: bool = False
    is_repeated: bool = True


Content: TypeAlias = (
    Text
    | Pattern
    | Rules
    | AnyText
    | SchemaDocument
    | Parameters
    | InSequence
    | OneOf
    | Repeated
    | Tag
    | Dispatched
)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a content stands: its JSON pointer, and how many others it is in."""

    pointer: str
    depth: int = 0

    def at(self, name: str, index: int) -> _Place:
        """An item of one of its arrays."""
        return _Place(f"{self.pointer}/{name}/{index}", self.depth)

    def within(self, below: str) -> _Place:
        """A content in it, at a pointer from here."""
        return _Place(f"{self.pointer}/{below}", self.depth + 1)

    @property
    def of_schema(self) -> str:
        """The pointer to its schema."""
        return f"{self.pointer}/json_schema"


def parse_tags(value: object) -> Content:
    """Of a whole structural tag, in the notation above or in the older one:

        {"structures": [{"begin": .., "schema": {..}, "end": ..}], "triggers": [..]}
        {"format": {"type": .., ..}}

    Raises InvalidGrammar.
    """
    given = mapping(value, "a structural tag")
    if "structures" in given:
        tags = [
            _older_tag(item, f"/structures/{index}")
            for index, item in enumerate(items(given, "structures"))
        ]
        return _dispatched(given, tags)
    if "format" not in given:
        raise InvalidGrammar('"format", or "structures" and "triggers", are expected')
    return _content(given["format"], _Place("/format"))


def _content(value: object, place: _Place) -> Content:
    """Raises InvalidGrammar."""
    given = mapping(value, "content")
    kind = given.get("type")
    if kind in _OF_TOKENS:
        raise InvalidGrammar(f"content type {kind!r} is of tokens, which is not supported")
    if not isinstance(kind, str) or kind not in _PARSERS:
        known = ", ".join(_PARSERS)
        raise InvalidGrammar(f"content type {kind!r} is not known; known are: {known}")
    if place.depth > MAX_DEPTH:
        raise InvalidGrammar(f"content: nested deeper than {MAX_DEPTH}")
    return _PARSERS[kind](given, place)


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


def _string(given: Mapping[str, object], name: str) -> str:
    return _text(given.get(name), name)


def _text(value: object, name: str) -> str:
    if isinstance(value, dict) and value.get("type") == "token":
        raise InvalidGrammar(f"{name}: a token is not supported, but its text is")
    if not isinstance(value, str):
        raise InvalidGrammar(f"{name}: a text is expected")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidGrammar(f"{name}: lone surrogates are no text")
    return value


def _texts(given: Mapping[str, object], name: str) -> tuple[str, ...]:
    """Texts that are looked for, none of them empty; () where the field is missing."""
    values = items(given, name) if name in given else ()
    if not all(isinstance(value, str) and value for value in values):
        raise InvalidGrammar(f"{name}: texts are expected, none of them empty")
    return tuple(_text(value, name) for value in values)


def _flag(given: Mapping[str, object], name: str, *, otherwise: bool = False) -> bool:
    value = given.get(name, otherwise)
    if not isinstance(value, bool):
        raise InvalidGrammar(f"{name}: true or false is expected")
    return value


def _count(given: Mapping[str, object], name: str, least: int, most: int) -> int:
    value = given.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidGrammar(f"{name}: a number from {least} to {most} is expected")
    return value


def _style(given: Mapping[str, object]) -> ParameterStyle:
    from .schema.parameters import ParameterStyle  # takes 0.1 s, needed only to compile

    values = mapping(given.get("style"), "style")
    known = {each.name for each in fields(ParameterStyle)}
    unknown = [name for name in values if name not in known]
    if unknown:
        raise InvalidGrammar(f"style: {unknown[0]!r} is not known; known are: {sorted(known)}")
    words = values.get("words", ["null", "false", "true"])
    raw = values.get("raw_strings", True)
    if not isinstance(words, list) or [type(word) for word in words] != [str] * 3:
        raise InvalidGrammar("style: words: three texts are expected")
    if not isinstance(raw, bool):
        raise InvalidGrammar("style: raw_strings: true or false is expected")
    texts = {n: _string(values, n) for n in values if n not in ("words", "raw_strings")}
    return ParameterStyle(**texts, raw_strings=raw, words=tuple(words))


def _schema(given: Mapping[str, object], place: _Place) -> Content:
    style = given.get("style", "json")
    if given.get("excludes"):
        raise InvalidGrammar("json_schema: excludes are not supported; say it by a pattern")
    if style == "qwen_xml":
        return _qwen(given, place)
    if style != "json":
        raise InvalidGrammar(f"json_schema: style {style!r} is not known; known: json, qwen_xml")
    return SchemaDocument(given.get("json_schema"), place.of_schema)


def _qwen(given: Mapping[str, object], place: _Place) -> Content:
    """As Qwen's models write parameters; with the line ends that they write, or without."""
    from .schema.parameters import ParameterStyle

    style = ParameterStyle("<parameter=", ">", "</parameter>", gap="\n", excludes="</parameter>")
    return Parameters(given.get("json_schema"), style, place.of_schema)


def _parameters(given: Mapping[str, object], place: _Place) -> Content:
    return Parameters(given.get("json_schema"), _style(given), place.of_schema)


def _rules(given: Mapping[str, object], _: _Place) -> Content:
    if given.get("syntax", "ebnf") != "ebnf":
        raise InvalidGrammar("grammar: syntax: only ebnf is supported, by rules `name ::= ..`")
    return Rules(_string(given, "grammar"))


def _any_text(given: Mapping[str, object], _: _Place) -> Content:
    if given.get("max_tokens") is not None:
        raise InvalidGrammar("any_text: max_tokens is not supported; max_chars is")
    most = given.get("max_chars")
    most = None if most is None else _count(given, "max_chars", 0, MAX_CHARS)
    return AnyText(_texts(given, "excludes"), most)


def _elements(given: Mapping[str, object], place: _Place) -> tuple[Content, ...]:
    found = enumerate(items(given, "elements"))
    return tuple(_content(item, place.within(f"elements/{index}")) for index, item in found)


def _inner(given: Mapping[str, object], place: _Place) -> Content:
    return _content(given.get("content"), place.within("content"))


def _repeated(given: Mapping[str, object], place: _Place) -> Content:
    least = _count(given, "min", 0, 2**31 - 1)
    most = None if given.get("max") == -1 else _count(given, "max", least, 2**31 - 1)
    return Repeated(_inner(given, place), least, most)


def _tag(value: object, place: _Place) -> Tag:
    given = mapping(value, "a tag")
    end = given.get("end")
    ends = end if isinstance(end, list) else [end]
    if not ends:
        raise InvalidGrammar("end: at least one text is expected")
    found = tuple(_text(item, "end") for item in ends)
    return Tag(_string(given, "begin"), _inner(given, place), found)


def _tags(given: Mapping[str, object], place: _Place) -> list[Tag]:
    found = enumerate(items(given, "tags"))
    tags = [_tag(item, place.at("tags", index)) for index, item in found]
    if not tags:
        raise InvalidGrammar("tags: at least one is expected")
    return tags


def _older_tag(value: object, pointer: str) -> Tag:
    given = mapping(value, "a structure")
    name = "schema" if "schema" in given else "structural_tag_schema"
    schema = given.get(name, True)
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise InvalidGrammar(f"schema: not JSON: {error}") from error
    document = SchemaDocument(schema, f"{pointer}/{name}")
    return Tag(_string(given, "begin"), document, (_string(given, "end"),))


def _dispatched(given: Mapping[str, object], tags: Sequence[Tag]) -> Content:
    """Triggered tags. Raises InvalidGrammar for a tag without just one trigger."""
    triggers = _texts(given, "triggers")
    if not tags or not triggers:
        raise InvalidGrammar("tags and triggers are expected, none of them empty")
    by_trigger: dict[str, list[Content]] = {}
    for tag in tags:
        mine = [trigger for trigger in triggers if tag.begin.startswith(trigger)]
        if len(set(mine)) != 1:
            which = f"with several triggers: {mine}" if mine else "with none of the triggers"
            raise InvalidGrammar(f"begin {tag.begin!r} starts {which}")
        rest = Tag(tag.begin[len(mine[0]) :], tag.content, tag.ends)
        by_trigger.setdefault(mine[0], []).append(rest)
    return Dispatched(
        tuple((trigger, OneOf(tuple(by_trigger.get(trigger, ())))) for trigger in triggers),
        _texts(given, "excludes"),
        is_required=_flag(given, "at_least_one"),
        begins_free=_flag(given, "text_first"),
        is_repeated=not _flag(given, "stop_after_first"),
    )


def _dispatch(given: Mapping[str, object], place: _Place) -> Content:
    rules = []
    for index, rule in enumerate(items(given, "rules")):
        if not isinstance(rule, list) or len(rule) != 2 or not _text(rule[0], "rules"):
            raise InvalidGrammar("rules: pairs of a text, not empty, and a content are expected")
        content = _content(rule[1], place.within(f"rules/{index}/1"))
        rules.append((_text(rule[0], "rules"), content))
    if not rules or len(dict(rules)) < len(rules):
        raise InvalidGrammar("rules: at least one is expected, each with a text of its own")
    is_repeated = _flag(given, "loop", otherwise=True)
    return Dispatched(tuple(rules), _texts(given, "excludes"), is_repeated=is_repeated)


def _separated(given: Mapping[str, object], place: _Place) -> Content:
    tag = OneOf(tuple(_tags(given, place)))
    more = Repeated(InSequence((Text(_string(given, "separator")), tag)))
    found = tag if _flag(given, "stop_after_first") else InSequence((tag, more))
    return found if _flag(given, "at_least_one") else Repeated(found, 0, 1)


_PARSERS: dict[str, Callable[[Mapping[str, object], _Place], Content]] = {
    "json_schema": _schema,
    "qwen_xml_parameter": _qwen,
    "parameters": _parameters,
    "const_string": lambda given, _: Text(_string(given, "value")),
    "regex": lambda given, _: Pattern(_string(given, "pattern")),
    "grammar": _rules,
    "any_text": _any_text,
    "sequence": lambda given, place: InSequence(_elements(given, place)),
    "or": lambda given, place: OneOf(_elements(given, place)),
    "star": lambda given, place: Repeated(_inner(given, place)),
    "plus": lambda given, place: Repeated(_inner(given, place), 1),
    "optional": lambda given, place: Repeated(_inner(given, place), 0, 1),
    "repeat": _repeated,
    "tag": _tag,
    "tags_with_separator": _separated,
    "triggered_tags": lambda given, place: _dispatched(given, _tags(given, place)),
    "dispatch": _dispatch,
}
