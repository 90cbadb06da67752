"""What one client has asked the KV cache for: its hints carried out, and the leases they made."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...radix.leases import Lease
from ..schedule.hints import KVHints, Outcome

DEFAULT_PRIORITY = 50  # above what is derived from programs
MAX_STATED = 1024  # leases that one client may hold by hints, the oldest released first


@dataclass(frozen=True, slots=True)
class Action:
    """What is asked for, as in `ir.Hint`."""

    action: str
    ttl_ms: int | None = None
    priority: int | None = None
    tier: str | None = None


@dataclass(slots=True)
class AskedHint:
    """A hint on a prefix that is not computed yet: it waits for its branch's next call. Its prefix
    has `num_tokens`; None: `num_chars` of the open text segment, which is not tokenized yet."""

    action: Action
    num_tokens: int | None
    num_chars: int = 0


@dataclass(slots=True, eq=False)
class StatedLeases:
    """The leases that a client's hints have made; they outlive its programs, to their expiry."""

    hints: KVHints
    namespace: Hashable = ""
    _leases: OrderedDict[int, Lease] = field(default_factory=OrderedDict)
    _num_made: int = 0

    def carry_out(self, action: Action, token_ids: Sequence[int]) -> Outcome:
        """Do it, as far as it can be done."""
        outcome = self._outcome(action, token_ids)
        if outcome.lease is not None:
            self._remember(outcome.lease)
        return outcome

    def release_all(self) -> None:
        """The client has gone."""
        for lease in self._leases.values():
            self.hints.release(lease)
        self._leases.clear()

    def _outcome(self, action: Action, token_ids: Sequence[int]) -> Outcome:
        hints, namespace = self.hints, self.namespace
        ttl_s = None if action.ttl_ms is None else action.ttl_ms / 1000
        match action.action:
            case "pin":
                return hints.pin(namespace, token_ids, ttl_s)
            case "retain":
                priority = DEFAULT_PRIORITY if action.priority is None else action.priority
                return hints.retain(namespace, token_ids, ttl_s, priority)
            case "demote":
                return hints.demote(namespace, token_ids, action.tier or "host")
            case "prefetch":
                return hints.prefetch(namespace, token_ids, action.tier or "device")
            case "share":
                return hints.share(namespace, token_ids)
        raise AssertionError(f"{action.action} is none of the actions")

    def _remember(self, lease: Lease) -> None:
        for number in [n for n, held in self._leases.items() if not held.is_active]:
            del self._leases[number]
        self._num_made += 1
        self._leases[self._num_made] = lease
        if len(self._leases) > MAX_STATED:
            self.hints.release(self._leases.popitem(last=False)[1])


def outcome_payload(action_id: str, outcome: Outcome) -> dict[str, Any]:
    """As it travels to a client."""
    return {
        "action_id": action_id,
        "outcome": outcome.outcome,
        "reason": outcome.reason,
        "num_tokens": outcome.num_tokens,
    }
