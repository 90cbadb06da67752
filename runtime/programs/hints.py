"""Actions on the KV cache that programs and HTTP clients ask for, each with an outcome.

The vocabulary is that of SGLang's RFC 36224 and vLLM's RFCs 53421 and 57103: `pin`, `retain`,
`demote`, `prefetch`, `share`. A hint changes no result, blocks nothing and fails nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...radix.leases import Lease
from ..schedule.hint_outcome import HintOutcome
from .keeping import KVLeases

DEFAULT_TTL_MS = 60_000
MAX_TTL_MS = 3_600_000
DEFAULT_PRIORITY = 50
MAX_STATED = 1024  # leases that one client may hold by hints, the oldest released first


class KVHints(KVLeases, Protocol):
    """The cache, as hints see it."""

    def pin(self, namespace: Hashable, token_ids: Sequence[int], *, ttl_s: float) -> Lease | None:
        """Keep a prefix until then; None where nothing of it is there or the budget is used up."""

    def demote(self, namespace: Hashable, token_ids: Sequence[int], tier: str) -> HintOutcome:
        """Move a prefix to a colder tier."""

    def prefetch(self, namespace: Hashable, token_ids: Sequence[int], tier: str) -> HintOutcome:
        """Move a prefix to a hotter tier."""

    def share(self, namespace: Hashable, token_ids: Sequence[int]) -> HintOutcome:
        """Make a prefix available to other workers."""

    def cached_tokens(self, namespace: Hashable, token_ids: Sequence[int]) -> int:
        """How many leading tokens are in the device's cache; changes nothing."""


@dataclass(frozen=True, slots=True)
class Action:
    """What is asked for."""

    action: str
    ttl_ms: int | None = None
    priority: int | None = None
    tier: str | None = None


@dataclass(slots=True, eq=False)
class StatedLeases:
    """The leases that one client's hints have made; they outlive its programs, to their expiry."""

    kv: KVHints
    namespace: Hashable = ""
    _leases: OrderedDict[int, Lease] = field(default_factory=OrderedDict)
    _num_made: int = 0

    def carry_out(self, action: Action, token_ids: Sequence[int]) -> HintOutcome:
        """Do it, as far as it can be done."""
        match action.action:
            case "pin" | "retain":
                return self._keep(action, token_ids)
            case "demote":
                return self.kv.demote(self.namespace, token_ids, action.tier or "host")
            case "prefetch":
                return self.kv.prefetch(self.namespace, token_ids, action.tier or "device")
            case "share":
                return self.kv.share(self.namespace, token_ids)
        return HintOutcome("rejected", 0, f"unknown action {action.action!r}")

    def release_all(self) -> None:
        """The client has gone."""
        for lease in self._leases.values():
            self.kv.release_lease(lease)
        self._leases.clear()

    def _keep(self, action: Action, token_ids: Sequence[int]) -> HintOutcome:
        cached = self.kv.cached_tokens(self.namespace, token_ids)
        if not cached:
            return HintOutcome("missing", 0, "nothing of this prefix is cached")
        asked_ms = DEFAULT_TTL_MS if action.ttl_ms is None else action.ttl_ms
        ttl_s = min(asked_ms, MAX_TTL_MS) / 1000
        if action.action == "pin":
            lease = self.kv.pin(self.namespace, token_ids, ttl_s=ttl_s)
        else:
            priority = DEFAULT_PRIORITY if action.priority is None else action.priority
            lease = self.kv.retain(
                self.namespace, token_ids, due_s=ttl_s, ttl_s=ttl_s, priority=priority
            )
        if lease is None:
            return HintOutcome("rejected", 0, "the budget for this is used up, or leases are off")
        self._remember(lease)
        if lease.num_tokens < cached:
            return HintOutcome("clipped", lease.num_tokens, "the budget ends here")
        if cached < len(token_ids) - 1:  # the last token of an output has no KV yet
            return HintOutcome("clipped", cached, "no more of it is cached")
        if asked_ms > MAX_TTL_MS:
            return HintOutcome("clipped", cached, f"for {MAX_TTL_MS} ms at most")
        return HintOutcome("accepted", cached)

    def _remember(self, lease: Lease) -> None:
        for number in [n for n, held in self._leases.items() if not held.is_active]:
            del self._leases[number]
        self._num_made += 1
        self._leases[self._num_made] = lease
        if len(self._leases) > MAX_STATED:
            self.kv.release_lease(self._leases.popitem(last=False)[1])


def outcome_payload(action_id: str, outcome: HintOutcome) -> dict[str, Any]:
    """As it travels to a client."""
    return {
        "action_id": action_id,
        "outcome": outcome.verdict,
        "reason": outcome.reason,
        "num_tokens": outcome.num_tokens,
    }
