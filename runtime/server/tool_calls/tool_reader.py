"""Reads tool calls out of an output as it comes: what may be a call is held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..generation.pieces import Outcome
from .tools import BEGIN, ToolUse


class ToolReader:
    """One sample's output as content and tool calls; a stream sends calls whole."""

    def __init__(self, tool_use: ToolUse) -> None:
        self._tool_use = tool_use
        self._held = ""  # text that may be the beginning of a call

    def message(self, outcome: Outcome) -> tuple[dict[str, Any], str]:
        reason: str = outcome.meta["finish_reason"]
        content, calls = self._tool_use.read(outcome.text)
        if not calls:
            return {"content": content}, reason
        items = [call.as_openai() for call in calls]
        message = {"content": content.strip() or None, "tool_calls": items}
        return message, "tool_calls" if reason == "stop" else reason

    def feed(self, text: str) -> Sequence[dict[str, Any]]:
        held = self._held + text
        sizes = range(min(len(BEGIN), len(held)), 0, -1)
        keep = next((n for n in sizes if BEGIN.startswith(held[-n:])), 0)
        end = held.find(BEGIN) if BEGIN in held else len(held) - keep
        end = 0 if self._tool_use.is_forced else end
        self._held = held[end:]
        return ({"content": held[:end]},) if end else ()

    def finish(self, outcome: Outcome) -> tuple[Sequence[dict[str, Any]], str]:
        message, reason = self.message(outcome)
        last: list[dict[str, Any]] = []
        held, calls = self._held, message.get("tool_calls")
        if calls:
            held = self._tool_use.read(held)[0]
            last.append({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
        if held.strip() or (held and not calls):
            last.insert(0, {"content": held})
        return last, reason

    def num_reasoning_tokens(self, outcome: Outcome) -> int:
        return 0
