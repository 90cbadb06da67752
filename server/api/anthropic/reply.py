"""Responses of /v1/messages: content blocks, whole or as the events that build them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from ...parsers.call_arguments import object_of
from ...protocol.anthropic_errors import error_body
from ...protocol.failures import failure_of
from ...protocol.pieces import GenerationFailed, Outcome, Piece
from ...protocol.server_sent_events import event
from ..openai.message_reader import Delta, MessageReader

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesReply:
    """One message. A streamed block stays open until another kind of content begins."""

    def __init__(self, model: str, reader: MessageReader, *, max_model_len: int) -> None:
        """`max_model_len`: tokens that fit; an output cut off at that limit reports it."""
        self.id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._reader = reader
        self._max_model_len = max_model_len
        self._has_begun = False
        self._blocks = _OpenBlocks()

    def whole(self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None) -> dict[str, Any]:
        (outcome,) = outcomes
        message, reason = self._reader.message(outcome)
        body = self._message(_blocks_of(message), self._usage(outcome))
        body |= self._ending(outcome, reason)
        return body if hints is None else {**body, "kv_hints": hints}

    def piece(self, piece: Piece) -> bytes:
        begin = self._begin(piece.prompt_tokens, piece.cached_tokens)
        deltas = self._reader.feed(piece.text)
        return begin + b"".join([self._blocks.say(delta) for delta in deltas])

    def end(self, outcome: Outcome) -> bytes:
        said = self._begin(outcome.meta["prompt_tokens"], outcome.meta["cached_tokens"])
        deltas, reason = self._reader.finish(outcome)
        said += b"".join([self._blocks.say(delta) for delta in deltas]) + self._blocks.close()
        last = {"type": "message_delta", "delta": self._ending(outcome, reason)}
        return said + _event({**last, "usage": self._usage(outcome)})

    def close(self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None) -> bytes:
        extra = {} if hints is None else {"kv_hints": hints}
        return _event({"type": "message_stop", **extra})

    def failed(self, error: GenerationFailed) -> bytes:
        return _event(error_body(failure_of(error).status, str(error)))

    def _begin(self, prompt_tokens: int | None, cached_tokens: int) -> bytes:
        """`message_start`, once. If the prompt's length is not known yet, the end reports it."""
        if self._has_begun:
            return b""
        self._has_begun = True
        used = _usage(prompt_tokens or 0, cached_tokens, 0)
        message = self._message([], used) | {"stop_reason": None, "stop_sequence": None}
        return _event({"type": "message_start", "message": message})

    def _message(self, blocks: list[dict[str, Any]], used: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "usage": used,
        }

    def _ending(self, outcome: Outcome, reason: str) -> dict[str, Any]:
        matched = outcome.meta.get("matched_stop")
        if reason == "stop" and matched:
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        num_tokens = outcome.meta["prompt_tokens"] + outcome.meta["completion_tokens"]
        if reason == "length" and num_tokens == self._max_model_len:  # a stream may have more
            return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
        return {"stop_reason": _STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}

    def _usage(self, outcome: Outcome) -> dict[str, Any]:
        meta = outcome.meta
        return _usage(meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"])


class _OpenBlocks:
    """The content blocks of a stream; only the last may be open."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None

    def say(self, delta: Delta) -> bytes:
        """The events of a delta from a `MessageReader`."""
        said = b""
        if thought := delta.get("reasoning_content"):
            said += self._ensure("thinking", {"thinking": "", "signature": ""})
            said += self._delta({"type": "thinking_delta", "thinking": thought})
        if text := delta.get("content"):
            said += self._ensure("text", {"text": ""})
            said += self._delta({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls", ()):
            function = call.get("function", {})
            if call.get("id"):
                said += self.close()
                block = {"id": call["id"], "name": function["name"], "input": {}}
                said += self._ensure("tool_use", block)
            if arguments := function.get("arguments"):
                said += self._delta({"type": "input_json_delta", "partial_json": arguments})
        return said

    def close(self) -> bytes:
        """End the open block, if there is one."""
        if self._open is None:
            return b""
        self._open = None
        return _event({"type": "content_block_stop", "index": self._index})

    def _ensure(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        said = self.close()
        self._open = kind
        self._index += 1
        start = {"type": "content_block_start", "index": self._index}
        return said + _event({**start, "content_block": {"type": kind, **block}})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})


def _event(payload: dict[str, Any]) -> bytes:
    """One event, named by its type."""
    return event(payload, payload["type"])


def _blocks_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A whole message of a `MessageReader` as content blocks."""
    blocks: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if text := message.get("content"):
        blocks.append({"type": "text", "text": text})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        blocks.append({**block, "input": object_of(function["arguments"])})
    return blocks


def _usage(prompt: int, cached: int, output: int) -> dict[str, Any]:
    """Token counts; Anthropic counts cached tokens separately from the input."""
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": output,
    }
