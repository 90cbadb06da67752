"""The output of a task, piece by piece: text, each sample's outcome, or a failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import Picklable

GRAMMAR_KINDS = ("InvalidGrammar", "UnsupportedSchema")
LOGPROBS_BYTES = 1024  # of one token with its alternatives (guess)


@dataclass(frozen=True, slots=True)
class Piece:
    """Fresh text of a streamed sample, and its tokens where these were requested: a token comes
    with the piece that completes its text."""

    index: int  # of the sample, counted over all prompts
    text: str
    token_ids: Sequence[int] | None = None
    logprobs: Sequence[dict[str, Any]] | None = None  # an entry per token, as in the meta
    prompt_tokens: int | None = None  # in a sample's first piece, with its ids
    cached_tokens: int = 0

    @classmethod
    def of(cls, index: int, payload: Any) -> Piece:
        """From a delta's payload: text, or an object of these fields."""
        if isinstance(payload, str):
            return cls(index, payload)
        get = payload.get
        text, ids, logprobs = payload["text"], get("token_ids"), get("logprobs")
        return cls(index, text, ids, logprobs, get("prompt_tokens"), get("cached_tokens", 0))

    @property
    def num_bytes(self) -> int:
        """About what is told of it."""
        return len(self.text) + LOGPROBS_BYTES * len(self.logprobs or ())

    @classmethod
    def joined(cls, pieces: Sequence[Piece]) -> Piece:
        """Joins consecutive pieces of a sample, at least one."""
        first = pieces[0]
        if len(pieces) == 1:
            return first
        return cls(
            first.index,
            "".join(piece.text for piece in pieces),
            _all([piece.token_ids for piece in pieces]),
            _all([piece.logprobs for piece in pieces]),
            first.prompt_tokens,
            first.cached_tokens,
        )


def _all(parts: Sequence[Sequence[Any] | None]) -> list[Any] | None:
    if all(part is None for part in parts):
        return None
    return [item for part in parts for item in part or ()]


class GenerationFailed(Picklable, Exception):
    """The engine refused or failed; `kind` names the class of its error."""

    def __init__(self, message: str, kind: str, field: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.field = field  # of the client's request, where that is known


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished sample: its text, and counts and times as `get_meta_info` returns them."""

    index: int
    text: str
    meta: dict[str, Any]
    error: GenerationFailed | None = None  # this sample alone failed: it has no text and no meta

    @property
    def num_bytes(self) -> int:
        """About what is told of it."""
        entries = (self.meta.get(name) or () for name in ("logprobs", "prompt_logprobs"))
        return len(self.text) + LOGPROBS_BYTES * sum(map(len, entries))


@dataclass(frozen=True, slots=True)
class Used:
    """What a program had of the engine, however it ended."""

    num_requests: int
    num_prompt_tokens: int  # over all its requests
    num_output_tokens: int

    @classmethod
    def of(cls, payload: Mapping[str, int]) -> Used:
        """From the report of its end."""
        return cls(payload["num_requests"], payload["prompt_tokens"], payload["completion_tokens"])

    @property
    def num_tokens(self) -> int:
        """What it is charged: its output, and its prompt, which its samples share, once."""
        return -(-self.num_prompt_tokens // max(1, self.num_requests)) + self.num_output_tokens
