"""KV hints of a program: one action on a branch's KV, and its outcome."""

from __future__ import annotations

from typing import Any

from ...errors import InvalidProgram
from ..client.program import Pending, Program
from ..protocol import ir

MAX_TTL_S = (2**31 - 1) / 1000


class HintHandle:
    """A hint that was given. It never fails a program; `outcome` has its result."""

    def __init__(self, program: Program, pending: Pending, owner: object) -> None:
        self._program = program
        self._pending = pending
        self._owner = owner  # the state that it was given for: not dropped while this lives

    @property
    def outcome(self) -> dict[str, Any]:
        """`{"action_id", "outcome", "reason", "num_tokens"}`; waits for it. The outcome is
        "accepted", "clipped", "deferred", "rejected" or "missing"."""
        return dict(self._program.wait(self._pending).value)

    async def aoutcome(self) -> dict[str, Any]:
        """`outcome` for async functions."""
        return dict((await self._program.wait_async(self._pending)).value)


def hint(
    branch: int,
    seq: int,
    source: str | None,
    action: ir.HintAction,
    *,
    ttl_s: float | None = None,
    priority: int | None = None,
    tier: ir.Tier | None = None,
) -> ir.Hint:
    """The op. Raises InvalidProgram for an invalid argument."""
    is_time = isinstance(ttl_s, int | float) and not isinstance(ttl_s, bool)
    if ttl_s is not None and not (is_time and 0.001 <= ttl_s <= MAX_TTL_S):
        raise InvalidProgram.of("ttl_s", ttl_s, f"seconds in [0.001, {MAX_TTL_S:.0f}], or None")
    is_int = isinstance(priority, int) and not isinstance(priority, bool)
    if priority is not None and not (is_int and 0 <= priority <= 100):
        raise InvalidProgram.of("priority", priority, "an integer in [0, 100], or None")
    allowed = {"demote": ir.TIERS[1:], "prefetch": ir.TIERS[:2]}.get(action)
    if allowed is not None and tier not in allowed:
        raise InvalidProgram.of("tier", tier, f"one of {allowed}")
    ttl_ms = None if ttl_s is None else round(ttl_s * 1000)
    return ir.Hint(branch, seq, source, action, ttl_ms, priority, tier)
