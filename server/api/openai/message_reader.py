"""The interface that parses an output into content, tool calls and reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ...protocol.pieces import Outcome

Delta = dict[str, Any]  # a `delta` of a chunk: some of content, reasoning_content, tool_calls


class MessageReader(Protocol):
    """Parses the output of one sample; is fed a stream or called once, never both."""

    def message(self, outcome: Outcome) -> tuple[dict[str, Any], str]:
        """The whole message without its role, and the finish reason."""

    def feed(self, text: str) -> Sequence[Delta]:
        """The deltas of fresh text; empty where it has to wait for more."""

    def finish(self, outcome: Outcome) -> tuple[Sequence[Delta], str]:
        """The remaining deltas when the sample has ended, and the finish reason."""

    def num_reasoning_tokens(self, outcome: Outcome) -> int:
        """How many of the output's tokens were reasoning; called after `message` or `finish`."""


class PlainReader:
    """All output is content."""

    def message(self, outcome: Outcome) -> tuple[dict[str, Any], str]:
        return {"content": outcome.text}, outcome.meta["finish_reason"]

    def feed(self, text: str) -> Sequence[Delta]:
        return ({"content": text},) if text else ()

    def finish(self, outcome: Outcome) -> tuple[Sequence[Delta], str]:
        return (), outcome.meta["finish_reason"]

    def num_reasoning_tokens(self, outcome: Outcome) -> int:
        return 0
