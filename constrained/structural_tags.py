"""Structural tags: free text until a trigger, then a tag with its content, then free text.

Three notations are read, xgrammar's older and its newer one, and a content that is the whole:

    {"triggers": [..], "structures": [{"begin": .., "schema": {..}, "end": ..}]}
    {"format": {"type": "triggered_tags", "triggers": [..], "at_least_one": false,
                "stop_after_first": false, "tags": [{"begin": .., "content": {..}, "end": ..}]}}
    {"format": {"type": "tag", "begin": .., "content": {..}, "end": ..}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import InvalidGrammar
from .lark import LarkWriter
from .tag_contents import (
    Content,
    ContentWriter,
    SchemaDocument,
    Schemas,
    items,
    lark_text,
    mapping,
    one_of,
    parse_content,
    string,
)

ANY_TEXT = "/(?s:.*)/"


@dataclass(frozen=True, slots=True)
class Tag:
    """`begin` starts with a trigger; between it and `end` is a text of the content."""

    begin: str
    content: Content
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


def parse_tags(value: object) -> StructuralTags | Content:
    """Raises InvalidGrammar."""
    fields = mapping(value, "a structural tag")
    if "structures" in fields:
        tags = tuple(map(_older_tag, items(fields, "structures")))
        return _checked(StructuralTags(_triggers(fields), tags))
    body = mapping(fields.get("format"), "format")
    if body.get("type") != "triggered_tags":
        return parse_content(body)
    return _checked(
        StructuralTags(
            _triggers(body),
            tuple(map(_newer_tag, items(body, "tags"))),
            _flag(body, "at_least_one"),
            _flag(body, "stop_after_first"),
        )
    )


def tags_to_lark(tags: StructuralTags | Content, schemas: Schemas) -> str:
    """The grammar's text.

    A trigger ends the free text as soon as it is written (a lazy terminal), so the text between
    tags contains none.
    """
    writer = LarkWriter()
    contents = ContentWriter(writer, schemas)
    if not isinstance(tags, StructuralTags):
        body = contents.written(tags)
        if not body:
            raise InvalidGrammar("it matches no text but the empty one")
        writer.line("start", body)
        return writer.text()
    writer.line("TEXT", ANY_TEXT)
    writer.line("rest", "TEXT")
    names = []
    for trigger in tags.triggers:
        mine = [tag for tag in tags.tags if tags.trigger_of(tag) == trigger]
        if mine:
            names.append(_tag_rule(writer, trigger, mine, contents))
    tag = f"({' | '.join(names)})"
    if tags.stop_after_first:
        writer.line("start", tag if tags.at_least_one else f"{tag} | rest")
    else:
        writer.line("start", f"{tag}{'+' if tags.at_least_one else '*'} rest")
    return writer.text()


def _tag_rule(
    writer: LarkWriter, trigger: str, tags: Sequence[Tag], contents: ContentWriter
) -> str:
    head, name = writer.new_rule(), writer.new_rule()
    writer.line(f"{head}[lazy]", f"TEXT {lark_text(trigger)}")
    bodies = []
    for tag in tags:
        content = contents.written(tag.content)
        parts = (lark_text(tag.begin[len(trigger) :]), content, lark_text(tag.end))
        bodies.append(" ".join(filter(None, parts)))
    writer.line(name, f"{head} {one_of(bodies)}".strip())
    return name


def _checked(tags: StructuralTags) -> StructuralTags:
    if not tags.tags or not tags.triggers or not all(tags.triggers):
        raise InvalidGrammar("tags and triggers are expected, none of them empty")
    for tag in tags.tags:
        tags.trigger_of(tag)
    return tags


def _older_tag(value: object) -> Tag:
    fields = mapping(value, "a structure")
    content = SchemaDocument(fields.get("schema", True))
    return Tag(string(fields, "begin"), content, string(fields, "end"))


def _newer_tag(value: object) -> Tag:
    fields = mapping(value, "a tag")
    content = parse_content(fields.get("content"))
    return Tag(string(fields, "begin"), content, string(fields, "end"))


def _triggers(fields: Mapping[str, object]) -> tuple[str, ...]:
    triggers = items(fields, "triggers")
    if not all(isinstance(trigger, str) for trigger in triggers):
        raise InvalidGrammar("triggers: texts are expected")
    return tuple(str(trigger) for trigger in triggers)


def _flag(fields: Mapping[str, object], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise InvalidGrammar(f"{name}: true or false is expected")
    return value
