"""Output items of a response, built from the deltas of a `MessageReader`, and their events."""

from __future__ import annotations

import itertools
import secrets
from typing import Any

from ...protocol.server_sent_events import event
from ..openai.message_reader import Delta


class Events:
    """Encodes server-sent events with sequence numbers."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def say(self, kind: str, **payload: Any) -> bytes:
        """One event."""
        body = {"type": kind, "sequence_number": next(self._numbers), **payload}
        return event(body, kind)


class OutputItems:
    """The items so far; the last may be open."""

    def __init__(self, events: Events) -> None:
        self.items: list[dict[str, Any]] = []
        self._events = events
        self._is_open = False
        self._grown: list[str] = []  # the open item's text

    def say(self, delta: Delta) -> bytes:
        """Add a delta; returns its events."""
        said = b""
        if thought := delta.get("reasoning_content"):
            said += self._ensure("reasoning")
            said += self._grow("response.reasoning_text.delta", thought, content_index=0)
        if text := delta.get("content"):
            said += self._ensure("message")
            said += self._grow("response.output_text.delta", text, content_index=0, logprobs=[])
        for call in delta.get("tool_calls", ()):
            function = call.get("function", {})
            if call.get("id"):
                said += self.close() + self._begin_call(call["id"], function["name"])
            if arguments := function.get("arguments"):
                said += self._grow("response.function_call_arguments.delta", arguments)
        return said

    def close(self, status: str = "completed", logprobs: list[Any] | None = None) -> bytes:
        """End the open item, if there is one."""
        if not self._is_open:
            return b""
        self._is_open = False
        item, text = self.items[-1], "".join(self._grown)
        at = {"item_id": item["id"], "output_index": len(self.items) - 1}
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            kind = "response.function_call_arguments.done"
            said = self._events.say(kind, **at, arguments=text, name=item["name"])
        else:
            said = self._close_part(item, text, at, logprobs or [])
        return said + self._events.say(
            "response.output_item.done", output_index=at["output_index"], item=item
        )

    def _close_part(
        self, item: dict[str, Any], text: str, at: dict[str, Any], logprobs: list[Any]
    ) -> bytes:
        at = {**at, "content_index": 0}
        if item["type"] == "reasoning":
            part = _thought(text)
            said = self._events.say("response.reasoning_text.done", **at, text=text)
        else:
            part = _said_text(text, logprobs)
            said = self._events.say("response.output_text.done", **at, text=text, logprobs=logprobs)
        item["content"] = [part]
        return said + self._events.say("response.content_part.done", **at, part=part)

    def _ensure(self, kind: str) -> bytes:
        if self._is_open and self.items[-1]["type"] == kind:
            return b""
        said = self.close()
        prefix = "rs" if kind == "reasoning" else "msg"
        item: dict[str, Any] = {"id": _id(prefix), "type": kind, "status": "in_progress"}
        more: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        item |= {**more, "content": []}
        part = _thought("") if kind == "reasoning" else _said_text("", [])
        said += self._begin(item)
        at = {"item_id": item["id"], "output_index": len(self.items) - 1, "content_index": 0}
        return said + self._events.say("response.content_part.added", **at, part=part)

    def _begin_call(self, call_id: str, name: str) -> bytes:
        item = {"id": _id("fc"), "type": "function_call", "status": "in_progress"}
        return self._begin({**item, "call_id": call_id, "name": name, "arguments": ""})

    def _begin(self, item: dict[str, Any]) -> bytes:
        self.items.append(item)
        self._grown = []
        self._is_open = True
        index = len(self.items) - 1
        return self._events.say("response.output_item.added", output_index=index, item=item)

    def _grow(self, kind: str, text: str, **fields: Any) -> bytes:
        self._grown.append(text)
        at = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return self._events.say(kind, **at, **fields, delta=text)


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def _said_text(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}
