"""Parses one output as a message: reasoning, content and tool calls, whole or as a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...frontend.chat_format.call_reader import (
    Arguments,
    CallBegun,
    CallReader,
    Content,
    Event,
    Reader,
    Reasoning,
)
from ...frontend.chat_format.harmony_reader import HarmonyReader
from ...frontend.chat_format.reasoning import ReasoningSplitter, ReasoningTags, Split
from ..protocol.pieces import Outcome
from .tools import ToolUse


@dataclass(frozen=True, slots=True)
class ReasoningUse:
    """How the reasoning of one request's outputs is reported."""

    tags: ReasoningTags
    starts_inside: bool
    is_told: bool = True
    is_streamed: bool = True  # else sent in one piece, once it is over


class OutputReader:
    """Parses one sample; is fed a stream or called once, never both."""

    def __init__(
        self,
        tool_use: ToolUse,
        reasoning: ReasoningUse | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        """`warnings`: further warnings for the client about its request."""
        self._tool_use = tool_use
        self._warnings = [*warnings, *tool_use.warnings]
        self._reasoning = reasoning
        self._splitter: ReasoningSplitter | None = None
        self._channels: HarmonyReader | None = None
        channels = tool_use.chat_format.channels
        if channels is not None:
            names = [tool.function.name for tool in tool_use.tools]
            self._channels = channels.reader(names, may_call=tool_use.may_call)
        elif reasoning is not None:
            self._splitter = ReasoningSplitter(
                reasoning.tags,
                starts_inside=reasoning.starts_inside,
                calls=tool_use.beginnings,
            )
        self._calls: Reader = self._channels or tool_use.reader()
        self._untold = ""  # reasoning that waits for its end
        self._num_calls = 0

    def message(self, outcome: Outcome) -> tuple[dict[str, Any], str]:
        """The whole message without its role, and the finish reason."""
        last, reason = self._deltas_of_all(outcome)
        message: dict[str, Any] = {"content": ""}
        calls: list[dict[str, Any]] = []
        for delta in last:
            for name in ("reasoning_content", "content"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
            for part in delta.get("tool_calls", ()):
                _add_part(calls, part)
        if calls:
            message = {**message, "content": message["content"] or None, "tool_calls": calls}
        return message, reason

    def feed(self, text: str) -> Sequence[dict[str, Any]]:
        """The deltas of fresh text; empty where it has to wait for more."""
        if self._splitter is None:
            return self._of_events(self._calls.feed(text))
        return self._of_split(self._splitter.feed(text), is_over=self._splitter.has_ended)

    def finish(self, outcome: Outcome) -> tuple[Sequence[dict[str, Any]], str]:
        """The remaining deltas when the sample has ended, and the finish reason."""
        deltas: list[dict[str, Any]] = []
        if self._splitter is not None:
            deltas += self._of_split(self._splitter.finish(), is_over=True)
        deltas += self._of_events(self._calls.finish())
        if self._channels is not None:
            deltas += self._of_reasoning("", is_over=True)
        reason: str = outcome.meta["finish_reason"]
        if self._warnings:
            outcome.meta["warnings"] = [*(outcome.meta.get("warnings") or ()), *self._warnings]
        return deltas, "tool_calls" if reason == "stop" and self._num_calls else reason

    def num_reasoning_tokens(self, outcome: Outcome) -> int:
        """How many of the output's tokens were reasoning; called after `message` or `finish`."""
        splitter = self._splitter or self._channels
        if self._reasoning is None or splitter is None or not splitter.has_reasoning:
            return 0
        if self._splitter is not None and self._splitter.is_interrupted:
            return 0  # not known
        output_ids = outcome.meta["output_ids"]
        return self._reasoning.tags.num_tokens(output_ids, has_ended=splitter.has_ended)

    def _deltas_of_all(self, outcome: Outcome) -> tuple[Sequence[dict[str, Any]], str]:
        fed = self.feed(outcome.text)
        last, reason = self.finish(outcome)
        return [*fed, *last], reason

    def _of_split(self, split: Split, *, is_over: bool) -> list[dict[str, Any]]:
        deltas = self._of_reasoning(split.reasoning, is_over=is_over)
        is_interrupted = self._splitter is not None and self._splitter.is_interrupted
        if is_interrupted and self._reasoning is not None and isinstance(self._calls, CallReader):
            self._calls.leave_out(self._reasoning.tags.end)
        return [*deltas, *self._of_events(self._calls.feed(split.content))]

    def _of_reasoning(self, text: str, *, is_over: bool) -> list[dict[str, Any]]:
        if self._reasoning is None or not self._reasoning.is_told:
            return []
        text, self._untold = self._untold + text, ""
        if not self._reasoning.is_streamed and not is_over:
            self._untold, text = text, ""
        return [{"reasoning_content": text}] if text else []

    def _of_events(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        return [delta for event in events for delta in self._deltas(event)]

    def _deltas(self, event: Event) -> list[dict[str, Any]]:
        if isinstance(event, Reasoning) and self._reasoning is not None:
            return self._of_reasoning(event.text, is_over=False)
        before = self._of_reasoning("", is_over=True) if self._channels is not None else []
        return [*before, self._delta(event)]

    def _delta(self, event: Event) -> dict[str, Any]:
        match event:
            case Content() | Reasoning():  # reasoning that is not to be separated
                return {"content": event.text}
            case CallBegun():
                self._num_calls += 1
                function = {"name": event.name, "arguments": ""}
                call_id = event.id or self._tool_use.new_id()
                call = {"id": call_id, "type": "function", "function": function}
                return self._of_call(call)
            case Arguments():
                return self._of_call({"function": {"arguments": event.text}})

    def _of_call(self, part: dict[str, Any]) -> dict[str, Any]:
        return {"tool_calls": [{"index": self._num_calls - 1, **part}]}


def _add_part(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    """Add a streamed piece to the calls of a whole message."""
    if part["index"] == len(calls):
        calls.append({name: value for name, value in part.items() if name != "index"})
    else:
        calls[-1]["function"]["arguments"] += part["function"]["arguments"]
