"""Hints of programs and clients about a prefix: carried out if possible, with a reported outcome.

Five actions, in the vocabulary of SGLang's RFC 36224 and vLLM's RFCs 53421 and 57103: pin, retain,
demote, prefetch, share. A hint never changes a result and never blocks admission. Knows nothing of
envelopes and protocols: a prefix is a namespace and token ids.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from ....frontend.protocol.hint_outcome import HintAnswer, outcome_payload
from ....radix.leases import Lease
from .kv_cache import KVCacheManager

DEFAULT_TTL_S = 60.0
MAX_TTL_S = 600.0  # that a hint may request (guess)
MAX_LEASE_PRIORITY = 100


class Outcome(NamedTuple):
    """The outcome of a hint. `num_tokens`: how many of the prefix it applies to."""

    outcome: HintAnswer
    reason: str = ""  # for people; empty if accepted
    num_tokens: int = 0
    lease: Lease | None = None  # of a pin or retain: the caller must release it

    def payload(self, action_id: str) -> dict[str, Any]:
        """The outcome as sent to a client."""
        return outcome_payload(action_id, self.outcome, self.reason, self.num_tokens)


NOTHING_CACHED = Outcome("missing", "nothing of this prefix is cached")


class KVHints:
    """Owns nothing: the five actions on one KVCacheManager."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache

    def pin(
        self, namespace: Hashable, token_ids: Sequence[int], ttl_s: float | None = None
    ) -> Outcome:
        """Keep what is cached of a prefix on the device, within the budget, for `ttl_s`."""
        num_cached = self._num_on_device(namespace, token_ids)
        refusal = self._refusal(num_cached)
        if refusal is not None:
            return refusal
        ttl_s, limits = _checked_ttl(ttl_s)
        lease = self._kv_cache.pin(namespace, token_ids, ttl_s=ttl_s)
        if lease is None:
            return Outcome("rejected", "the share of the pool that pins may take is used up")
        if lease.num_tokens < num_cached:
            limits.append("pins may take no more of the pool")
        return self._answer(limits, token_ids, num_cached, lease)

    def retain(
        self,
        namespace: Hashable,
        token_ids: Sequence[int],
        ttl_s: float | None = None,
        priority: int = 0,
        due_s: float | None = None,
    ) -> Outcome:
        """Keep what is cached of a prefix in preference to unleased KV. `due_s`: its next use, from
        now; if unknown, assumed to be as late as possible."""
        num_cached = self._num_known(namespace, token_ids)
        refusal = self._refusal(num_cached)
        if refusal is not None:
            return refusal
        ttl_s, limits = _checked_ttl(ttl_s)
        if abs(priority) > MAX_LEASE_PRIORITY:
            priority = max(-MAX_LEASE_PRIORITY, min(priority, MAX_LEASE_PRIORITY))
            limits.append(f"priorities end at {priority}")
        due_s = ttl_s if due_s is None else min(max(due_s, 0.0), ttl_s)
        lease = self._kv_cache.retain(
            namespace, token_ids, due_s=due_s, ttl_s=ttl_s, priority=priority
        )
        return self._answer(limits, token_ids, num_cached, lease)

    def demote(self, namespace: Hashable, token_ids: Sequence[int], tier: str = "host") -> Outcome:
        """Copy what the device has of a prefix to a colder tier; its pages are evicted next."""
        if tier == "disk":
            outcome = self.share(namespace, token_ids)
            if outcome.outcome in ("accepted", "clipped"):
                self._kv_cache.give_way(namespace, token_ids)
            return outcome
        if tier != "host":
            return Outcome("rejected", f"there is no tier {tier!r} to demote to")
        if self._kv_cache.host is None:
            return Outcome("rejected", "there is no host tier (--host-kv-tokens)")
        num_cached = self._num_on_device(namespace, token_ids)
        num_stored = self._kv_cache.demote(namespace, token_ids)
        if not num_stored:
            return NOTHING_CACHED
        if num_stored < num_cached:
            reason = "the host tier has no room for more, or the rest is being computed"
            return Outcome("clipped", reason, num_stored)
        return Outcome("accepted", "", num_stored)

    def prefetch(
        self, namespace: Hashable, token_ids: Sequence[int], tier: str = "device"
    ) -> Outcome:
        """Copy what colder tiers have of a prefix to the device, without evicting anything that is
        due earlier."""
        if tier != "device":
            return Outcome("rejected", f"there is no tier {tier!r} to prefetch to")
        num_known = self._num_known(namespace, token_ids)
        if not num_known:
            return NOTHING_CACHED
        self._kv_cache.prefetch(namespace, token_ids, self._kv_cache.clock())
        num_there = self._num_on_device(namespace, token_ids)
        if num_there < num_known:
            return Outcome("deferred", "no pages are free on the device", num_there)
        return self._answer([], token_ids, num_there, None)

    def share(self, namespace: Hashable, token_ids: Sequence[int]) -> Outcome:
        """Make what the device has of a prefix durable, for other and later workers."""
        num_shared = self._kv_cache.share(namespace, token_ids)
        if num_shared is None:
            return Outcome("rejected", "there is no KV store to share it in (--kv-store)")
        num_cached = self._num_on_device(namespace, token_ids)
        if not num_cached:
            return NOTHING_CACHED
        if num_cached - num_shared >= 2 * self._kv_cache.page_size:
            return Outcome("clipped", "the store keeps whole blocks of 256 tokens", num_shared)
        return Outcome("accepted", "", num_shared)

    def release(self, lease: Lease) -> None:
        """End a lease made by a pin or retain; does nothing if it has ended."""
        self._kv_cache.release_lease(lease)

    def _num_on_device(self, namespace: Hashable, token_ids: Sequence[int]) -> int:
        return self._kv_cache.tree.match_length(namespace, token_ids)

    def _num_known(self, namespace: Hashable, token_ids: Sequence[int]) -> int:
        host = self._kv_cache.host
        on_host = 0 if host is None else host.tree.match_length(namespace, token_ids)
        return max(on_host, self._num_on_device(namespace, token_ids))

    def _refusal(self, num_cached: int) -> Outcome | None:
        if not self._kv_cache.options.has_leases:
            return Outcome("rejected", "leases are disabled (--disable-leases)")
        return None if num_cached else NOTHING_CACHED

    def _answer(
        self, limits: list[str], token_ids: Sequence[int], num_cached: int, lease: Lease | None
    ) -> Outcome:
        """Accepts a missing page: the last token has no KV yet, and only whole pages are cached."""
        if len(token_ids) - num_cached > self._kv_cache.page_size:
            limits.append("the rest is not cached")
        num_tokens = lease.num_tokens if lease is not None and lease.is_pin else num_cached
        return Outcome("clipped" if limits else "accepted", "; ".join(limits), num_tokens, lease)


def _checked_ttl(ttl_s: float | None) -> tuple[float, list[str]]:
    """The granted time, and the limits to report."""
    if ttl_s is None:
        return DEFAULT_TTL_S, []
    if ttl_s > MAX_TTL_S:
        return MAX_TTL_S, [f"leases end after {MAX_TTL_S:g} s"]
    return max(ttl_s, 0.0), []
