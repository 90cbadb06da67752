"""What became of a KV hint, as it travels to a client."""

from __future__ import annotations

from typing import Any, Literal

HintAnswer = Literal["accepted", "clipped", "deferred", "rejected", "missing"]


def outcome_payload(
    action_id: str, outcome: HintAnswer, reason: str = "", num_tokens: int = 0
) -> dict[str, Any]:
    """`reason`: for people, empty if accepted; `num_tokens`: of the prefix, for which it holds."""
    return {
        "action_id": action_id,
        "outcome": outcome,
        "reason": reason,
        "num_tokens": num_tokens,
    }
