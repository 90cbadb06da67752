"""A chat's messages as its template sees them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from ...errors import InvalidProgram
from ...frontend.protocol.chat_message import Message

ROLE = re.compile(r"[a-z][a-z_-]{0,31}")  # it is written among special tokens
NOTHING = object()  # stands for a content that there is not
Arguments = Literal["objects", "texts", "held texts"]
"""How templates want calls' arguments: where they are no object's JSON, a text in place of objects,
or within one."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A program's message without its content. `fields`: JSON text of its other fields."""

    role: str
    fields: str | None = None
    has_content: bool = True  # False: the whole message is part of the delimiters
    drops_content: bool = False  # the template leaves it out

    @classmethod
    def of(cls, role: str, fields: str | None) -> Turn:
        """Raises InvalidProgram for fields that are not an object, or that set role or content."""
        values = _read_fields(Message(role, "", fields), "fields")
        has_content = "content" not in values
        if not has_content and role != "assistant":
            allowed = "without content, but for assistant"
            raise InvalidProgram.of("fields", (fields or "")[:100], allowed)
        return cls(role, fields, has_content)

    def without_content(self) -> Turn:
        """The same turn, written wholly into the delimiters."""
        return Turn(self.role, self.fields, has_content=False, drops_content=True)


class TemplateMessage:
    """One message, its texts guarded. Raises InvalidProgram for a role that is no word, and for
    fields that are no object, or that set what is not theirs."""

    def __init__(
        self, message: Message, index: int, guarded: Callable[..., Any], *, takes_parts: bool
    ) -> None:
        """`guarded`: of ClientTextGuard; `takes_parts`: whether a content in parts stays so. Of the
        message's images the URLs are what the template's stand-ins are replaced with."""
        self.role = message.role
        if not ROLE.fullmatch(message.role):
            allowed = "a word such as system, user or assistant"
            raise InvalidProgram.of("role", message.role, allowed)
        self._fields = _read_fields(message, f"messages.{index}.fields")
        self._guarded = guarded
        self.is_own_word = message.role == "assistant"
        self.images = [slot for _, slot in message.images]
        self.content: Any = self._content(message, takes_parts)
        self._known: dict[Arguments, dict[str, Any]] = {}

    @property
    def has_variants(self) -> bool:
        """Whether templates expect it in different forms."""
        return self.content is NOTHING or "tool_calls" in self._fields

    def values(self, *, arguments: Arguments, nothing: object) -> dict[str, Any]:
        """What the template sees. `arguments`: calls' are so; `nothing`: in place of no content."""
        found = self._values(arguments)
        content = nothing if self.content is NOTHING else self.content
        values = {**found, "role": self.role}
        return values if content is NOTHING else {**values, "content": content}

    def holding(self, content: object) -> TemplateMessage:
        """The same with another content, as it is."""
        other = copy(self)
        other.content = content
        return other

    def followed_by(self, text: str) -> TemplateMessage:
        """The same with a text behind its content. Raises InvalidProgram where it has none."""
        if self.content is NOTHING:
            raise InvalidProgram("nothing can be generated in a message without content")
        if isinstance(self.content, list):
            last = self.content[-1]
            if "text" not in last:
                return self.holding([*self.content, {"type": "text", "text": text}])
            return self.holding([*self.content[:-1], {**last, "text": last["text"] + text}])
        return self.holding(self.content + text)

    def _content(self, message: Message, takes_parts: bool) -> Any:
        if self._fields.pop("content", "") is None:
            if message.content or not self.is_own_word:
                raise InvalidProgram.of("content", None, "left out by an assistant's message alone")
            return NOTHING
        if message.images:
            return self._with_images(message)
        if not message.parts or not takes_parts:
            return self._guarded(message.content, is_own_word=self.is_own_word)
        return self._text_parts(message)

    def _text_parts(self, message: Message) -> list[dict[str, Any]]:
        whole = [len(message.content)] if message.content else []
        ends = list(accumulate(message.parts)) or whole
        texts = [message.content[b:e] for b, e in zip([0, *ends], ends, strict=False)]
        guarded = [self._guarded(text, is_own_word=self.is_own_word) for text in texts]
        return [{"type": "text", "text": text} for text in guarded]

    def _with_images(self, message: Message) -> list[dict[str, Any]]:
        texts, parts, done = self._text_parts(message), [], 0
        for place, _ in message.images:
            parts += [*texts[done:place], {"type": "image"}]
            done = place
        return [*parts, *texts[done:]]

    def _values(self, arguments: Arguments) -> dict[str, Any]:
        calls = self._fields.get("tool_calls")
        if not isinstance(calls, list):
            arguments = "texts"
        if arguments not in self._known:
            fields = self._fields
            if arguments != "texts":
                is_held = arguments == "held texts"
                made = [_with_object(call, is_held=is_held) for call in calls or ()]
                fields = {**fields, "tool_calls": made}
            self._known[arguments] = self._guarded(fields)
        return self._known[arguments]


def _read_fields(message: Message, place: str) -> dict[str, Any]:
    """With a message's reasoning under both of the names that templates have for it."""
    if message.fields is None:
        return {}
    try:
        values = json.loads(message.fields)
    except (ValueError, RecursionError) as error:
        raise InvalidProgram(f"{place}: not JSON: {error}", place) from error
    if not isinstance(values, dict) or "role" in values or values.get("content") is not None:
        allowed = "an object without role and content, or with a content of null"
        raise InvalidProgram.of(place, message.fields[:100], allowed)
    if values.get("reasoning_content") is not None:
        values = {"thinking": values["reasoning_content"], **values}
    return values


def _with_object(call: Any, *, is_held: bool) -> Any:
    """A call with its arguments as an object, if they are the JSON text of one, or nothing, or else
    where their text `is_held` by one."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    text = function.get("arguments", "")
    if not isinstance(text, str):
        return call
    try:
        arguments: Any = json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        arguments = text
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        if not is_held:
            return call
        arguments = {"arguments": text}
    return {**call, "function": {**function, "arguments": arguments}}
