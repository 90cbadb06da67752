"""Responses of /api/chat and /api/generate: one object, or a stream of objects, one a line."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from ...parsers.call_arguments import object_of
from ...protocol.failures import failure_of
from ...protocol.ollama_errors import error_body
from ...protocol.pieces import GenerationFailed, Outcome, Piece
from ...protocol.stream_format import StreamFormat
from ..openai.chat import chat_logprobs
from ..openai.message_reader import Delta, MessageReader

MEDIA_TYPE = "application/x-ndjson"
_NS = 1e9
_REASONS = {"tool_calls": "stop"}


class OllamaReply:
    """One answer of a chat, in the words of `message`."""

    def __init__(self, model: str, reader: MessageReader, num_logprobs: int | None = None) -> None:
        """`model`: as the client named it; `num_logprobs`: alternatives told of each token."""
        self.id = f"ollama-{secrets.token_hex(12)}"
        self._model = model
        self._reader = reader
        self._num_logprobs = num_logprobs
        self._logprobs: list[dict[str, Any]] = []  # that wait for their text
        self._call: dict[str, Any] | None = None  # is written; a call is told whole
        self._num_calls = 0

    @property
    def stream_format(self) -> StreamFormat:
        """Lines; there are no comments in it, so an empty text says that the stream lives."""
        return StreamFormat(MEDIA_TYPE, self._line(self.words("")))

    def words(
        self, text: str, thought: str = "", calls: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        """What the model has said, in the format of the endpoint."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = list(calls)
        return {"message": message}

    def whole(self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None) -> dict[str, Any]:
        (outcome,) = outcomes
        message, reason = self._reader.message(outcome)
        calls = [
            _called(call["id"], index, call["function"])
            for index, call in enumerate(message.get("tool_calls", ()))
        ]
        said = self.words(
            message.get("content") or "", message.get("reasoning_content") or "", calls
        )
        self._logprobs = outcome.meta.get("logprobs") or []
        return {**self._head(), **said, **self._take_logprobs(), **_ending(outcome, reason)}

    def piece(self, piece: Piece) -> bytes:
        self._logprobs += piece.logprobs or ()
        return b"".join(self._said(delta) for delta in self._reader.feed(piece.text))

    def end(self, outcome: Outcome) -> bytes:
        deltas, reason = self._reader.finish(outcome)
        said = b"".join(self._said(delta) for delta in deltas) + self._end_call()
        last = {**self.words(""), **self._take_logprobs(), **_ending(outcome, reason)}
        return said + orjson.dumps({**self._head(), **last}) + b"\n"

    def close(self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None) -> bytes:
        return b""

    def failed(self, error: GenerationFailed) -> bytes:
        return orjson.dumps(error_body(failure_of(error).message)) + b"\n"

    def _said(self, delta: Delta) -> bytes:
        text, thought = delta.get("content"), delta.get("reasoning_content")
        said = self._line(self.words(text or "", thought or "")) if text or thought else b""
        for part in delta.get("tool_calls", ()):
            if part.get("id"):
                said += self._end_call()
                self._call = {"id": part["id"], **part["function"]}
            elif self._call is not None:
                self._call["arguments"] += part["function"].get("arguments", "")
        return said

    def _end_call(self) -> bytes:
        """The line of the call that was being written, if one was."""
        call, self._call = self._call, None
        if call is None:
            return b""
        told = _called(call["id"], self._num_calls, call)
        self._num_calls += 1
        return self._line(self.words("", calls=[told]))

    def _line(self, said: dict[str, Any]) -> bytes:
        body = {**self._head(), **said, "done": False, **self._take_logprobs()}
        return orjson.dumps(body) + b"\n"

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": timestamp()}

    def _take_logprobs(self) -> dict[str, Any]:
        entries, self._logprobs = self._logprobs, []
        if self._num_logprobs is None or not entries:
            return {}
        return {"logprobs": chat_logprobs(entries, self._num_logprobs)}


class GenerateReply(OllamaReply):
    """The same of a completion, in the words of `response`."""

    def words(
        self, text: str, thought: str = "", calls: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        return {"response": text, "thinking": thought} if thought else {"response": text}


def about_model(reply: OllamaReply, model: str) -> dict[str, Any]:
    """The answer to a request that only asks for the model to be there, as it always is."""
    head = {"model": model, "created_at": timestamp()}
    return {**head, **reply.words(""), "done": True, "done_reason": "load"}


def timestamp(seconds: float | None = None) -> str:
    """Now, or a time since the epoch, as RFC 3339 has it."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _ending(outcome: Outcome, reason: str) -> dict[str, Any]:
    """Counts, and times in nanoseconds."""
    meta = outcome.meta
    return {
        "done": True,
        "done_reason": _REASONS.get(reason, reason),
        "total_duration": int(meta["latency_s"] * _NS),
        "load_duration": 0,
        "prompt_eval_count": meta["prompt_tokens"],
        "prompt_eval_duration": int(meta["prefill_s"] * _NS),
        "eval_count": meta["completion_tokens"],
        "eval_duration": int(meta["decode_s"] * _NS),
    }


def _called(call_id: str, index: int, function: dict[str, Any]) -> dict[str, Any]:
    arguments = object_of(function["arguments"])
    told = {"index": index, "name": function["name"], "arguments": arguments}
    return {"id": call_id, "function": told}
