"""Structural tags: free text until a trigger, then a tag with JSON of a schema, then free text.

Two notations are read, xgrammar's older and its newer one:

    {"triggers": [..], "structures": [{"begin": .., "schema": {..}, "end": ..}]}
    {"format": {"type": "triggered_tags", "triggers": [..], "at_least_one": false,
                "stop_after_first": false, "tags": [{"begin": .., "end": ..,
                "content": {"type": "json_schema", "json_schema": {..}}}]}}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import InvalidGrammar
from .grammar import Grammar
from .lark import LarkWriter, regex_of_text

ANY_TEXT = "/(?s:.*)/"


@dataclass(frozen=True, slots=True)
class Tag:
    """`begin` starts with a trigger; between it and `end` is a document of the schema."""

    begin: str
    schema: object
    end: str


@dataclass(frozen=True, slots=True)
class StructuralTags:
    """Tags, and how often they may occur."""

    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]
    at_least_one: bool = False
    stop_after_first: bool = False

    def trigger_of(self, tag: Tag) -> str:
        """The trigger with which its `begin` starts. Raises InvalidGrammar."""
        for trigger in self.triggers:
            if tag.begin.startswith(trigger):
                return trigger
        raise InvalidGrammar(f"begin {tag.begin!r} starts with none of the triggers")


def parse_tags(value: object) -> StructuralTags:
    """Raises InvalidGrammar."""
    fields = _mapping(value, "a structural tag")
    if "structures" in fields:
        tags = tuple(map(_older_tag, _list(fields, "structures")))
        return _checked(StructuralTags(_triggers(fields), tags))
    body = _mapping(fields.get("format"), "format")
    if body.get("type") != "triggered_tags":
        raise InvalidGrammar(f"format type {body.get('type')!r}: only triggered_tags is known")
    return _checked(
        StructuralTags(
            _triggers(body),
            tuple(map(_newer_tag, _list(body, "tags"))),
            _flag(body, "at_least_one"),
            _flag(body, "stop_after_first"),
        )
    )


def tags_to_lark(tags: StructuralTags, grammar_of: Callable[[object], Grammar]) -> str:
    """`grammar_of` returns the grammar of a schema's documents.

    A trigger ends the free text as soon as it is written (a lazy terminal), so the text between
    tags contains none.
    """
    writer = LarkWriter()
    writer.line("TEXT", ANY_TEXT)
    writer.line("rest", "TEXT")
    names = []
    for trigger in tags.triggers:
        mine = [tag for tag in tags.tags if tags.trigger_of(tag) == trigger]
        if mine:
            names.append(_tag_rule(writer, trigger, mine, grammar_of))
    tag = f"({' | '.join(names)})"
    if tags.stop_after_first:
        writer.line("start", tag if tags.at_least_one else f"{tag} | rest")
    else:
        writer.line("start", f"{tag}{'+' if tags.at_least_one else '*'} rest")
    return writer.text()


def _tag_rule(
    writer: LarkWriter,
    trigger: str,
    tags: Sequence[Tag],
    grammar_of: Callable[[object], Grammar],
) -> str:
    head, name = writer.new_rule(), writer.new_rule()
    writer.line(f"{head}[lazy]", f"TEXT {_text(trigger)}")
    bodies = []
    for tag in tags:
        document = writer.json_rules(grammar_of(tag.schema))
        bodies.append(f"{_text(tag.begin[len(trigger) :])} {document} {_text(tag.end)}")
    writer.line(name, f"{head} ({' | '.join(bodies)})")
    return name


def _text(text: str) -> str:
    return f"/{regex_of_text(text)}/" if text else ""


def _checked(tags: StructuralTags) -> StructuralTags:
    if not tags.tags or not tags.triggers or not all(tags.triggers):
        raise InvalidGrammar("tags and triggers are expected, none of them empty")
    for tag in tags.tags:
        tags.trigger_of(tag)
    return tags


def _older_tag(value: object) -> Tag:
    fields = _mapping(value, "a structure")
    return Tag(_string(fields, "begin"), fields.get("schema", True), _string(fields, "end"))


def _newer_tag(value: object) -> Tag:
    fields = _mapping(value, "a tag")
    content = _mapping(fields.get("content"), "content")
    if content.get("type") != "json_schema":
        raise InvalidGrammar(f"content type {content.get('type')!r}: only json_schema is known")
    return Tag(_string(fields, "begin"), content.get("json_schema"), _string(fields, "end"))


def _triggers(fields: Mapping[str, object]) -> tuple[str, ...]:
    triggers = _list(fields, "triggers")
    if not all(isinstance(trigger, str) for trigger in triggers):
        raise InvalidGrammar("triggers: texts are expected")
    return tuple(str(trigger) for trigger in triggers)


def _mapping(value: object, what: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise InvalidGrammar(f"{what}: an object is expected")
    return value


def _list(fields: Mapping[str, object], name: str) -> Sequence[object]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise InvalidGrammar(f"{name}: an array is expected")
    return value


def _string(fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise InvalidGrammar(f"{name}: a text is expected")
    return value


def _flag(fields: Mapping[str, object], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise InvalidGrammar(f"{name}: true or false is expected")
    return value
