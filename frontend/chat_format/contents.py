"""The words of structural tags for what a call is made of, as `constrained/tag_contents.py` reads
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Content = dict[str, Any]


def text(value: str) -> Content:
    """Just this text."""
    return {"type": "const_string", "value": value}


def pattern(source: str) -> Content:
    """The texts of a regex."""
    return {"type": "regex", "pattern": source}


def document(schema: object) -> Content:
    """A JSON document of the schema."""
    return {"type": "json_schema", "json_schema": schema}


def parameters(schema: object, style: Mapping[str, Any]) -> Content:
    """An object's properties one by one."""
    return {"type": "parameters", "json_schema": schema, "style": dict(style)}


def in_sequence(*parts: Content) -> Content:
    """All of these, one after another."""
    return {"type": "sequence", "elements": [*parts]}


def one_of(parts: Sequence[Content]) -> Content:
    """Any one of these."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": [*parts]}


def separated(part: Content, separator: str, *, is_repeated: bool) -> Content:
    """This once, or any number of times from one on."""
    if not is_repeated:
        return part
    return in_sequence(part, {"type": "star", "content": in_sequence(text(separator), part)})


def tag(begin: str, content: Content, end: str) -> Content:
    """A content between two texts; also an item of triggered tags."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}
