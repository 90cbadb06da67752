"""A chat's earlier turns for templates that write one call a message: Llama 3's refuse several, and
harmony's also a content beside a call and reasoning."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ....frontend.protocol.chat_message import Message


def one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Several calls of one message become messages of their own, each before its result. Content
    beside calls joins the reasoning, if there is some: both become analysis."""
    fitted: list[Message] = []
    index = 0
    while index < len(messages):
        message, fields = messages[index], _fields(messages[index])
        index += 1
        calls = fields.get("tool_calls", ())
        if not calls:
            fitted.append(message)
            continue
        first = index
        while index < len(messages) and messages[index].role == "tool":
            index += 1
        fitted += _turns(message, fields, messages[first:index])
    return fitted


def _turns(
    message: Message, fields: dict[str, Any], results: Sequence[Message]
) -> Iterator[Message]:
    """A message for each call, and behind it its results; those of no call come last. Calls with
    one id have a result each, as long as there are some."""
    left, calls = list(results), fields["tool_calls"]
    later = Counter(call["id"] for call in calls)
    for number, call in enumerate(calls):
        if number == 0:
            yield _with_one_call(message, fields, call)
        else:
            yield _message("", {"tool_calls": [call], "content": None})
        own = [result for result in left if _fields(result).get("tool_call_id") == call["id"]]
        later[call["id"]] -= 1
        own = own[:1] if later[call["id"]] else own
        left = [result for result in left if not any(result is each for each in own)]
        yield from own
    yield from left


def _with_one_call(message: Message, fields: dict[str, Any], call: object) -> Message:
    fields, content = {**fields, "tool_calls": [call]}, message.content
    reasoning = fields.get("reasoning_content")
    if reasoning and content:
        fields |= {"reasoning_content": f"{reasoning}\n\n{content}", "content": None}
        content = ""
    return _message(content, fields) if content != message.content else _same(message, fields)


def _same(message: Message, fields: dict[str, Any]) -> Message:
    return message._replace(fields=json.dumps(fields, ensure_ascii=False))


def _message(content: str, fields: dict[str, Any]) -> Message:
    return Message("assistant", content, json.dumps(fields, ensure_ascii=False))


def _fields(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(message.fields or "{}")
    return fields
