"""What the answers of OpenAI's completion endpoints have in common."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import orjson

from ..failures import failure_of
from ..generation.pieces import GenerationFailed, Outcome


def usage(outcomes: Sequence[Outcome], n: int = 1) -> dict[str, Any]:
    """Token counts; a prompt counts once, however many samples (`n`) were drawn from it."""
    prompt = sum(outcome.meta["prompt_tokens"] for outcome in outcomes[::n])
    cached = sum(outcome.meta["cached_tokens"] for outcome in outcomes[::n])
    completion = sum(outcome.meta["completion_tokens"] for outcome in outcomes)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class CompletionReply:
    """Id, model and time that all bodies of one answer share."""

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(self, model: str, *, n: int = 1, includes_usage: bool = False) -> None:
        """`n`: samples of a prompt."""
        self._n = n
        self._includes_usage = includes_usage
        created = int(time.time())
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._head = {"id": self.id, "created": created, "model": model}

    def whole(self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None) -> dict[str, Any]:
        choices = [self.choice(outcome) for outcome in outcomes]
        body = {**self._head, "object": self.whole_object, "choices": choices}
        body["usage"] = usage(outcomes, self._n)
        return body if hints is None else {**body, "kv_hints": hints}

    def close(self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None) -> bytes:
        head = {**self._head, "object": self.chunk_object, "choices": []}
        last = b"" if hints is None else event({**head, "kv_hints": hints})
        if self._includes_usage:
            last += event({**head, "usage": usage(outcomes, self._n)})
        return last + b"data: [DONE]\n\n"

    def failed(self, error: GenerationFailed) -> bytes:
        return event(failure_of(error).body)

    def choice(self, outcome: Outcome) -> dict[str, Any]:
        """A finished choice."""
        raise NotImplementedError

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": [choice]}


def event(payload: object) -> bytes:
    """A server-sent event."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def warnings_of(outcome: Outcome) -> dict[str, Any]:
    """What of a schema was not enforced, or not fulfilled; an extra field, where there is any."""
    found = outcome.meta.get("warnings")
    return {"warnings": found} if found else {}
