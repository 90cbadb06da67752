"""The wire format of a KV hint's outcome."""

from __future__ import annotations

from typing import Any, Literal

HintAnswer = Literal["accepted", "clipped", "deferred", "rejected", "missing"]


def outcome_payload(
    action_id: str, outcome: HintAnswer, reason: str = "", num_tokens: int = 0
) -> dict[str, Any]:
    """`reason`: for people, empty if accepted; `num_tokens`: length of the prefix it holds for."""
    return {
        "action_id": action_id,
        "outcome": outcome,
        "reason": reason,
        "num_tokens": num_tokens,
    }
