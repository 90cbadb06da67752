"""The wording of Ollama's answers: lines that add up to the whole answer, with whole calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from stemma.server.api.ollama.reply import GenerateReply, OllamaReply
from stemma.server.api.openai.message_reader import Delta, PlainReader
from stemma.server.protocol.pieces import GenerationFailed, Outcome, Piece

META: dict[str, Any] = {
    "finish_reason": "stop", "prompt_tokens": 7, "completion_tokens": 3, "cached_tokens": 2,
    "latency_s": 0.5, "prefill_s": 0.125, "decode_s": 0.25,
}  # fmt: skip


class ScriptedReader:
    """Says what it was made of, whatever it is fed."""

    def __init__(self, deltas: Sequence[Delta], message: dict[str, Any]) -> None:
        self._deltas = list(deltas)
        self._message = message

    def message(self, outcome: Outcome) -> tuple[dict[str, Any], str]:
        return self._message, "tool_calls"

    def feed(self, text: str) -> Sequence[Delta]:
        return [self._deltas.pop(0)] if self._deltas else ()

    def finish(self, outcome: Outcome) -> tuple[Sequence[Delta], str]:
        return self._deltas, "tool_calls"

    def num_reasoning_tokens(self, outcome: Outcome) -> int:
        return 0


def part(index: int, arguments: str, name: str | None = None) -> Delta:
    begun = {"id": f"call_{index}", "type": "function"} if name else {}
    function = {"arguments": arguments, **({"name": name} if name else {})}
    return {"tool_calls": [{"index": index, **begun, "function": function}]}


DELTAS: list[Delta] = [
    {"reasoning_content": "Hm."},
    {"content": "I look. "},
    part(0, "", "weather"),
    part(0, '{"city": '),
    part(0, '"Rome"}'),
    part(1, "", "time"),
    part(1, "{}"),
]
CALLS = [
    {"id": "call_0", "function": {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}},
    {"id": "call_1", "function": {"index": 1, "name": "time", "arguments": {}}},
]
MESSAGE = {
    "content": "I look. ", "reasoning_content": "Hm.",
    "tool_calls": [
        {"id": "call_0", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
        {"id": "call_1", "function": {"name": "time", "arguments": "{}"}},
    ],
}  # fmt: skip


def lines(data: bytes) -> list[dict[str, Any]]:
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def test_a_streams_lines_add_up_and_have_each_call_whole() -> None:
    reply = OllamaReply("m", ScriptedReader(DELTAS, MESSAGE))
    data = b"".join(reply.piece(Piece(0, "x")) for _ in range(4))
    told = lines(data + reply.end(Outcome(0, "", META)) + reply.close([], None))
    messages = [line["message"] for line in told]
    assert "".join(message["content"] for message in messages) == "I look. "
    assert "".join(message.get("thinking", "") for message in messages) == "Hm."
    calls = [message["tool_calls"] for message in messages if "tool_calls" in message]
    assert calls == [[CALLS[0]], [CALLS[1]]]
    assert [line["done"] for line in told] == [False] * (len(told) - 1) + [True]
    assert told[-1]["done_reason"] == "stop" and told[-1]["eval_duration"] == 250_000_000


def test_a_whole_answer_has_arguments_as_objects_and_times_in_nanoseconds() -> None:
    told = OllamaReply("m", ScriptedReader([], MESSAGE)).whole([Outcome(0, "", META)], None)
    assert told["message"] == {
        "role": "assistant", "content": "I look. ", "thinking": "Hm.", "tool_calls": CALLS,
    }  # fmt: skip
    counts = {"prompt_eval_count": 7, "eval_count": 3, "total_duration": 500_000_000}
    assert counts.items() <= told.items()
    assert (told["model"], told["done"], told["created_at"][-1]) == ("m", True, "Z")


@pytest.mark.parametrize(("kind", "said"), [(OllamaReply, "message"), (GenerateReply, "response")])
def test_silence_is_broken_by_a_line_that_says_nothing(kind: Any, said: str) -> None:
    stream_format = kind("m", PlainReader()).stream_format
    (line,) = lines(stream_format.ping)
    assert stream_format.media_type == "application/x-ndjson"
    assert not line["done"] and line[said] in ("", {"role": "assistant", "content": ""})


def test_a_failure_is_a_line_with_an_error() -> None:
    error = GenerationFailed("late", "DeadlineExceeded")
    assert lines(OllamaReply("m", PlainReader()).failed(error)) == [{"error": "late"}]
