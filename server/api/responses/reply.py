"""Responses of /v1/responses: a response object, whole or as the events that build it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...protocol.pieces import GenerationFailed, Outcome, Piece
from ..openai.chat import chat_logprobs
from ..openai.message_reader import MessageReader
from .items import Events, OutputItems

OnDone = Callable[[dict[str, Any], dict[str, Any]], None]


class ResponsesReply:
    """One response. Streamed or not, the same code builds its items."""

    def __init__(
        self,
        model: str,
        reader: MessageReader,
        echo: dict[str, Any],
        on_done: OnDone,
        *,
        num_logprobs: int | None = None,
    ) -> None:
        """`echo`: fields repeated from the request; `on_done` receives the body and the assistant's
        message in chat format; `num_logprobs`: alternatives reported with each token."""
        self.id = f"resp_{secrets.token_hex(16)}"
        self._reader = reader
        self._on_done = on_done
        self._has_logprobs = num_logprobs is not None
        self._num_top = num_logprobs or 0
        self._head = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            **echo,
        }
        self._has_begun = False
        self._events = Events()
        self._items = OutputItems(self._events)
        self._body: dict[str, Any] = {}

    def whole(self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None) -> dict[str, Any]:
        (outcome,) = outcomes
        message, reason = self._reader.message(outcome)
        self._items.say({key: value for key, value in message.items() if value})
        self._finish(outcome, reason)
        return self._body if hints is None else {**self._body, "kv_hints": hints}

    def piece(self, piece: Piece) -> bytes:
        deltas = self._reader.feed(piece.text)
        return self._begin() + b"".join([self._items.say(delta) for delta in deltas])

    def end(self, outcome: Outcome) -> bytes:
        said = self._begin()
        deltas, reason = self._reader.finish(outcome)
        said += b"".join([self._items.say(delta) for delta in deltas])
        return said + self._finish(outcome, reason)

    def close(self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None) -> bytes:
        body = self._body if hints is None else {**self._body, "kv_hints": hints}
        return self._events.say(f"response.{body['status']}", response=body)

    def failed(self, error: GenerationFailed) -> bytes:
        failure = {"code": "server_error", "message": str(error)}
        body = {**self._head, "status": "failed", "output": self._items.items, "usage": None}
        return self._events.say("response.failed", response={**body, "error": failure})

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        body = {**self._head, "status": "in_progress", "output": [], "usage": None}
        created = self._events.say("response.created", response=body)
        return created + self._events.say("response.in_progress", response=body)

    def _finish(self, outcome: Outcome, reason: str) -> bytes:
        is_cut = reason == "length"
        status = "incomplete" if is_cut else "completed"
        entries = outcome.meta.get("logprobs") if self._has_logprobs else None
        said = self._items.close(status, chat_logprobs(entries or (), self._num_top))
        self._body = {
            **self._head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items.items,
            "usage": self._usage(outcome),
        }
        self._on_done(self._body, _chat_message(self._items.items))
        return said

    def _usage(self, outcome: Outcome) -> dict[str, Any]:
        meta = outcome.meta
        prompt, output = meta["prompt_tokens"], meta["completion_tokens"]
        reasoning = self._reader.num_reasoning_tokens(outcome)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": meta["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": prompt + output,
        }


def _chat_message(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The items as the assistant's turn of a chat."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for item in items:
        if item["type"] == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        else:
            field = "content" if item["type"] == "message" else "reasoning_content"
            message[field] = (message.get(field) or "") + item["content"][0]["text"]
    if message["content"] is None and "tool_calls" not in message:
        message["content"] = ""
    return message
