"""KV hints of a program: one action on a branch's KV, and its outcome."""

from __future__ import annotations

from typing import Any

from ...errors import InvalidProgram
from ..client.program import Pending, Program
from ..protocol import ir
from ..protocol.numbers import Range

_TTLS_S = Range(0.001, (2**31 - 1) // 1000)
_PRIORITIES = Range(0, 100, is_whole=True)


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
    if ttl_s is not None:
        ttl_s = _TTLS_S.checked("ttl_s", ttl_s)
    if priority is not None:
        priority = _PRIORITIES.checked("priority", priority)
    allowed = {"demote": ir.TIERS[1:], "prefetch": ir.TIERS[:2]}.get(action)
    if allowed is not None and tier not in allowed:
        raise InvalidProgram.of("tier", tier, f"one of {allowed}")
    ttl_ms = None if ttl_s is None else round(ttl_s * 1000)
    return ir.Hint(branch, seq, source, action, ttl_ms, priority, tier)
