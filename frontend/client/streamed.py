"""What has been streamed of one op: its text in chunks, and what is known at the end of each.

The channel's thread adds, others read: a chunk is added last, so that whoever sees it sees the
rest.
"""

from __future__ import annotations

from typing import Any

_FIRST_FACTS = ("id", "prompt_tokens", "cached_tokens")  # of a delta with ids, if it is the first


class Streamed:
    """Only grows. `ids` and `logprobs` stay empty where the channel does not tell them."""

    __slots__ = ("_ends", "chunks", "facts", "ids", "logprobs")

    def __init__(self) -> None:
        self.chunks: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self._ends: list[int] = []  # of each chunk: how many ids there were

    def add(self, delta: str | dict[str, Any]) -> None:
        """A delta, see `wire.DELTA`."""
        text = delta
        if isinstance(delta, dict):
            text = delta["text"]
            self.ids += delta.get("token_ids") or ()
            self.logprobs += delta.get("logprobs") or ()
            self.facts.update({name: delta[name] for name in _FIRST_FACTS if name in delta})
        if text:
            self._ends.append(len(self.ids))
            self.chunks.append(str(text))

    def num_tokens_at(self, num_chunks: int) -> int:
        """Tokens that the first `num_chunks` chunks, at least one, are the text of."""
        return self._ends[num_chunks - 1]

    def meta_at(self, num_chunks: int) -> dict[str, Any]:
        """Meta info after so many chunks, at least one; empty where nothing but text was told."""
        if not self.facts:
            return {}
        num_tokens = self.num_tokens_at(num_chunks)
        return {**self.facts, "completion_tokens": num_tokens, "finish_reason": None}
