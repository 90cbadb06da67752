"""A message of a chat that a client sends whole."""

from __future__ import annotations

from typing import NamedTuple


class Message(NamedTuple):
    """`fields`: JSON text of an object whose items the template sees beside role and content, such
    as `tool_calls` and `tool_call_id`; with `"content": null` in it an assistant's message has no
    content. `parts`: the content's, where it was given as a list: how many characters each has.
    `images`: how many of the parts are before each, and its URL, in order."""

    role: str
    content: str
    fields: str | None = None
    parts: tuple[int, ...] = ()
    images: tuple[tuple[int, str], ...] = ()
