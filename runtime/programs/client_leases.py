"""One client's KV cache hints: carries them out and holds the leases they made."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from ...radix.leases import Lease
from ..schedule.cache.hint_actions import KVHints, Outcome

DEFAULT_PRIORITY = 50  # above leases derived from programs
MAX_STATED = 1024  # leases that one account may hold by hints; the oldest is released first
MAX_STATED_IN_ALL = 8192  # the same for all accounts of one client
MAX_ASKED = 64  # hints that wait for one branch's next call; the oldest is forgotten first


@dataclass(frozen=True, slots=True)
class Action:
    """The requested action, as in `ir.Hint`."""

    action: str
    ttl_ms: int | None = None
    priority: int | None = None
    tier: str | None = None


@dataclass(slots=True)
class AskedHint:
    """A hint on a prefix that is not computed yet: it waits for its branch's next call. Its prefix
    has `num_tokens`, or, if None, `num_texts` of the open segment's, not yet tokenized."""

    action: Action
    num_tokens: int | None
    num_texts: int = 0


@dataclass(slots=True, eq=False)
class StatedLeases:
    """Leases made by a client's hints; they outlive its programs, to their expiry. Each account of
    the client has its own: a hint of one never releases the leases of another, unless the client as
    a whole holds too many; then the account with the most loses its oldest."""

    hints: KVHints
    _by_account: dict[Hashable, deque[Lease]] = field(default_factory=dict)

    def carry_out(
        self,
        action: Action,
        token_ids: Sequence[int],
        *,
        namespace: Hashable = "",
        account: Hashable = "",
    ) -> Outcome:
        """Carry out the action, as far as possible, on what `namespace` has of the prefix."""
        outcome = self._outcome(action, token_ids, namespace)
        if outcome.lease is not None:
            self._remember(outcome.lease, account)
        return outcome

    def release_all(self) -> None:
        """The client has gone: release all leases."""
        for leases in self._by_account.values():
            for lease in leases:
                self.hints.release(lease)
        self._by_account.clear()

    def _outcome(self, action: Action, token_ids: Sequence[int], namespace: Hashable) -> Outcome:
        hints = self.hints
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

    def _remember(self, lease: Lease, account: Hashable) -> None:
        held = [held for held in self._by_account.pop(account, ()) if held.is_active]
        self._by_account[account] = deque((*held, lease))
        if len(held) >= MAX_STATED:
            self._release_oldest_of(account)
        if sum(map(len, self._by_account.values())) > MAX_STATED_IN_ALL:
            self._release_oldest_of(max(self._by_account, key=lambda a: len(self._by_account[a])))

    def _release_oldest_of(self, account: Hashable) -> None:
        self.hints.release(self._by_account[account].popleft())
        if not self._by_account[account]:
            del self._by_account[account]
