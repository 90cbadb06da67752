"""The seam between an answer and what is read out of it: content, tool calls, reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ...protocol.pieces import Outcome

Delta = dict[str, Any]  # a `delta` of a chunk: some of content, reasoning_content, tool_calls


class MessageReader(Protocol):
    """Reads the output of one sample; a reader is fed a stream or asked once, never both."""

    def message(self, outcome: Outcome) -> tuple[dict[str, Any], str]:
        """The whole message without its role, and the finish reason."""

    def feed(self, text: str) -> Sequence[Delta]:
        """What a stream says of fresh text; nothing where it has to wait for more."""

    def finish(self, outcome: Outcome) -> tuple[Sequence[Delta], str]:
        """What a stream has yet to say when the sample has ended, and the finish reason."""

    def num_reasoning_tokens(self, outcome: Outcome) -> int:
        """How many of the output's tokens were reasoning; asked after `message` or `finish`."""


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
