"""What became of an action on the KV cache that somebody asked for; a hint is never an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["accepted", "clipped", "deferred", "rejected", "missing"]


@dataclass(frozen=True, slots=True)
class HintOutcome:
    """`num_tokens` of the prefix are affected. accepted: all that was asked for; clipped: part of
    it, or for a shorter time; deferred: later, when there is room; rejected: never, `reason` says
    why; missing: nothing of the prefix is there."""

    verdict: Verdict
    num_tokens: int = 0
    reason: str = ""
