"""Chat messages in OpenAI's format, converted for the chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, Literal

from pydantic import BaseModel, Field

from ....errors import InvalidRequest
from ....frontend.chat_format.chat_format import ChatFormat
from ....frontend.protocol.chat_message import Message
from ....frontend.protocol.ir import MAX_FIELDS_CHARS
from ...protocol.known_fields import FewItems, Items
from .content_parts import ContentPart, content_of, image_fields, refuse_images
from .single_calls import one_by_one

MAX_CALLS = 256  # of one message; guess


class CalledFunction(BaseModel):
    """`tool_calls[].function`; `arguments` is JSON text, as the model wrote it."""

    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCall(BaseModel):
    """An item of an assistant's `tool_calls`."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | FewItems[ContentPart] | None = None
    name: str | None = Field(default=None, max_length=256)
    tool_calls: Items[ToolCall] | None = Field(default=None, max_length=MAX_CALLS)
    tool_call_id: str | None = Field(default=None, max_length=256)
    reasoning_content: str | None = None
    function_call: Any = None

    def plain(self, index: int) -> Message:
        """The message for a template that knows all fields; "developer" is today's name of
        "system". Raises InvalidRequest; `index`: among the messages."""
        self._check(f"messages.{index}")
        given = self.content or ""
        place = f"messages.{index}.content"
        if self.role == "assistant":
            refuse_images(image_fields(given, place), "an assistant shows no images")
        texts, images = content_of(given, place)
        parts = () if isinstance(given, str) else tuple(map(len, texts))
        fields = self._fields(has_text=any(texts))
        whole = json.dumps(fields, ensure_ascii=False) if fields else None
        if whole is not None and len(whole) > MAX_FIELDS_CHARS:
            allowed = f"at most {MAX_FIELDS_CHARS} characters of tool calls and reasoning"
            raise InvalidRequest.of(f"messages.{index}", f"{len(whole)} characters", allowed)
        role = "system" if self.role == "developer" else self.role
        return Message(role, "".join(texts), whole, parts, tuple(images))

    def _fields(self, *, has_text: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                fields[name] = value
        if self.tool_calls:
            fields["tool_calls"] = [call.model_dump() for call in self.tool_calls]
            if not has_text:
                fields["content"] = None
        return fields

    def _check(self, place: str) -> None:
        is_tool, is_assistant = self.role == "tool", self.role == "assistant"
        if self.function_call is not None:
            raise InvalidRequest.of(f"{place}.function_call", "...", "left out; see tool_calls")
        if self.content is None and not (is_assistant and self.tool_calls):
            allowed = "a text, but for an assistant's message with tool_calls"
            raise InvalidRequest.of(f"{place}.content", None, allowed)
        if is_tool and self.tool_call_id is None:
            raise InvalidRequest.of(f"{place}.tool_call_id", None, "the id of the call's result")
        for name, is_fine in (("tool_calls", is_assistant), ("tool_call_id", is_tool)):
            if getattr(self, name) and not is_fine:
                raise InvalidRequest.of(f"{place}.{name}", "...", f"left out for {self.role}")


def fitting(messages: Sequence[Message], chat_format: ChatFormat) -> list[Message]:
    """The messages as this model's template can write them.

    A template without calls gets them as JSON text of the assistant, and results as a user's
    message, each led by the function's name. Raises InvalidRequest where calls are last, or the
    assistant goes on right behind them.
    """
    for message, follows in pairwise([*messages, None]):
        is_open = follows is None or follows.role == "assistant"
        if is_open and message is not None and _calls_of(message):
            allowed = "calls that are followed by their results"
            raise InvalidRequest.of("messages", "tool_calls without results", allowed)
    read = [_without_unread(message, chat_format) for message in messages]
    fitted = [_with_ids(message, chat_format) for message in _named(read)]
    if chat_format.channels is not None or chat_format.takes_one_call:
        fitted = one_by_one(fitted)
    return fitted if chat_format.knows_calls else _without_calls(fitted)


def _calls_of(message: Message) -> Sequence[Any]:
    calls: Sequence[Any] = json.loads(message.fields or "{}").get("tool_calls", ())
    return calls


def _without_unread(message: Message, chat_format: ChatFormat) -> Message:
    """Drop reasoning that the template does not write: it would only cost time."""
    if message.fields is None or chat_format.knows_reasoning:
        return message
    fields = json.loads(message.fields)
    fields.pop("reasoning_content", None)
    return _with_fields(message, fields)


def _named(messages: Sequence[Message]) -> Iterator[Message]:
    """Results with their functions' names, which some templates need and clients leave out. Of
    calls with one id, a result is that of the first that has none yet, else of the last."""
    names: dict[str, list[str]] = {}
    answered: dict[str, str] = {}
    for message in messages:
        for call in _calls_of(message):
            names.setdefault(call["id"], []).append(call["function"]["name"])
        if message.role != "tool":
            yield message
            continue
        fields = json.loads(message.fields or "{}")
        call_id = fields.get("tool_call_id", "")
        if names.get(call_id):
            answered[call_id] = names[call_id].pop(0)
        name = fields.get("name") or answered.get(call_id)
        yield message if name is None else _with_fields(message, {**fields, "name": name})


def _with_ids(message: Message, chat_format: ChatFormat) -> Message:
    """With ids of calls as the template takes them."""
    taught, fields = chat_format.tool_format, json.loads(message.fields or "{}")
    if taught is None or not fields.keys() & {"tool_calls", "tool_call_id"}:
        return message
    if "tool_call_id" in fields:
        fields["tool_call_id"] = taught.known_id(fields["tool_call_id"])
    for call in fields.get("tool_calls", ()):
        call["id"] = taught.known_id(call["id"])
    return _with_fields(message, fields)


def _with_fields(message: Message, fields: Mapping[str, Any]) -> Message:
    text = json.dumps(fields, ensure_ascii=False) if fields else None
    return message._replace(fields=text)


def _without_calls(messages: Sequence[Message]) -> list[Message]:
    fitted: list[Message] = []
    for role, group in groupby(messages, key=lambda message: message.role):
        if role == "tool":
            results = [*group]
            if any(message.images for message in results):
                allowed = "text: the chat template knows no results of tools"
                raise InvalidRequest.of("messages", "an image in a tool's message", allowed)
            fitted.append(Message("user", "\n".join(map(_result, results))))
        else:
            fitted += map(_called, group)
    return fitted


def _result(message: Message) -> str:
    name = json.loads(message.fields or "{}").get("name")
    return f"{name}: {message.content}" if name else message.content


def _called(message: Message) -> Message:
    """The message with its calls as text."""
    fields = json.loads(message.fields or "{}")
    calls = fields.pop("tool_calls", ())
    if not calls:
        return message
    fields.pop("content", None)
    texts = [message.content] if message.content else []
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        texts.append(f'{{"name":{json.dumps(name)},"arguments":{arguments}}}')
    return _with_fields(Message(message.role, "\n".join(texts)), fields)
