"""Prefixes of which only a part of the KV is kept, and how requests name them.

    a prompt      t0 t1 t2 ........................ tc | rest ...
    a request     -9 -9 -9 -9 | rest ...         the same, with its prefix kept in 4 slots
    positions     of the rest: its index in the request + rope_shift

A compressed prefix has one id below 0, as an image has, which stands in a request's tokens as often
as it has slots. So whatever compares prefixes (the tree, its tiers, leases) keeps it apart from the
exact KV of the same text, and from that of another policy, and forks and preemption carry it as
they carry tokens. What it is made of is computed by a request of its own (`compressions.py`).
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from ...errors import InvalidRequest
from ...frontend.protocol.kv_policy import MAX_WINDOW, KVPolicy

MAX_KNOWN = 1 << 16  # prefixes with an id
_FIRST, _LAST = -(1 << 31), -(1 << 30) - 1  # token ids; images have those above


@dataclass(frozen=True, slots=True, eq=False)
class CompressedPrefix:
    """What is kept of a prefix's KV, in `num_slots` slots.

    `source`: the tokens that it is made of, which may begin with another one's.
    """

    token_id: int
    policy: KVPolicy
    num_slots: int
    source: array[int] = field(repr=False)
    behind: CompressedPrefix | None = None  # with which `source` begins
    # Of `source`: what may be dropped, ascending; all else is kept. None: all may be.
    candidates: tuple[tuple[int, int], ...] | None = None

    # Of all that it stands for: tokens of the text, less its slots; by how much the positions of
    # what follows are above its places among the slots; the most positions while it was made.
    num_dropped: int = 0
    rope_shift: int = 0
    num_positions: int = 0

    @property
    def ids(self) -> array[int]:
        """The tokens that stand for it."""
        return array("i", [self.token_id]) * self.num_slots


@dataclass(slots=True, eq=False)
class Compaction:
    """What a request makes: a prefix of which all its tokens are the source. `pages`: for what is
    kept, once its last chunk is planned, until they are the tree's."""

    prefix: CompressedPrefix
    pages: array[int] = field(default_factory=lambda: array("i"))

    @property
    def has_queries(self) -> bool:
        """Whether the queries of its last chunk are looked at, so that they are in one chunk."""
        return self.prefix.policy.kind == "snapkv"

    @property
    def first_observed(self) -> int:
        """What is before may be cached: where its last chunk begins, at the latest."""
        if self.prefix.policy.kind == "h2o":  # of all that it has queries of
            return 0 if self.prefix.behind is None else self.prefix.behind.num_slots
        return max(0, len(self.prefix.source) - self.prefix.policy.num_observed)


@dataclass(frozen=True, slots=True, eq=False)
class Recompression:
    """What is kept of a request's tokens as they become more."""

    prefixes: CompressedPrefixes
    policy: KVPolicy

    @property
    def is_endless(self) -> bool:
        """Whether positions do not grow with the text."""
        return self.policy.kind == "streaming"

    @property
    def num_more(self) -> int:
        """As many tokens more come, at most, before the oldest are dropped."""
        return self.policy.num_dropped_at_once

    def of(
        self, ids: array[int], behind: CompressedPrefix | None
    ) -> tuple[CompressedPrefix | None, int]:
        """See `CompressedPrefixes.of`."""
        return self.prefixes.of(ids, self.policy, behind)


class CompressedPrefixes:
    """Gives compressed prefixes their ids. Invariant: an id stands for one policy's choice from one
    text, for ever. Thread-safe."""

    def __init__(
        self,
        page_size: int = 1,
        max_observed: int = MAX_WINDOW,
        max_tokens: int = sys.maxsize,
        max_pages: int = sys.maxsize,
        refusal: str | None = None,
        window: KVPolicy | None = None,
    ) -> None:
        """max_observed: tokens of a chunk. max_tokens: of a context. max_pages: of the pool.
        refusal: why none can be made here; None: they can. window: the engine's own policy, which
        can in any case."""
        self._page_size = page_size
        self._max_tokens = max_tokens
        self._max_pages = max_pages
        self._max_observed = max_observed
        self.refusal = refusal
        self.window = window
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._next_id = _FIRST
        self._lock = threading.Lock()

    def of(
        self,
        ids: array[int],
        policy: KVPolicy,
        behind: CompressedPrefix | None = None,
        candidates: Sequence[tuple[int, int]] | None = None,
    ) -> tuple[CompressedPrefix | None, int]:
        """What the policy keeps of a text, in whole pages, and how many of `ids` that stands for;
        (behind, its slots) where it keeps all, or fewer tokens follow that than are observed.
        `ids`: begin with those of `behind`. Raises InvalidRequest."""
        self.require(policy)
        if policy.is_stream:
            return self._streamed(ids, policy, behind)
        if behind is not None and len(ids) - behind.num_slots < policy.num_observed:
            return behind, behind.num_slots  # slots have no queries that could be looked at
        num_slots = policy.num_kept(len(ids))
        ranges = None if candidates is None else tuple(candidates)
        if ranges is not None:
            num_droppable = sum(last - first for first, last in ranges)
            num_slots = len(ids) - num_droppable + policy.num_kept(num_droppable)
        num_slots += -num_slots % self._page_size
        if num_slots >= len(ids):
            return behind, 0 if behind is None else behind.num_slots
        self._require_room(policy, len(ids), num_slots)
        return self._prefix(policy, num_slots, ids, behind, ranges), len(ids)

    def _streamed(
        self, ids: array[int], policy: KVPolicy, behind: CompressedPrefix | None
    ) -> tuple[CompressedPrefix | None, int]:
        """One prefix made of the other, each of as many tokens more: a text that goes on shares all
        of them."""
        if behind is not None and behind.policy.kind != policy.kind:
            allowed = f"left out: this branch's KV was compressed by {behind.policy.kind} before"
            raise InvalidRequest.of("kv_policy", policy.kind, allowed)
        num_slots = int(policy.keep)
        num_slots += -num_slots % self._page_size
        step = policy.num_dropped_at_once
        num_replaced = 0 if behind is None else behind.num_slots
        num_taken = max(num_slots, num_replaced) + step
        source = ids[:num_taken]
        while num_taken <= len(ids):
            behind = self._prefix(policy, num_slots, source, behind, None)
            num_replaced, num_taken = num_taken, num_taken + step
            source = behind.ids + ids[num_replaced:num_taken]
        return behind, num_replaced

    def _prefix(
        self,
        policy: KVPolicy,
        num_slots: int,
        source: array[int],
        behind: CompressedPrefix | None,
        candidates: tuple[tuple[int, int], ...] | None,
    ) -> CompressedPrefix:
        name = repr((candidates, policy.to_wire())).encode()
        digest = blake2b(name + b"\0" + source.tobytes(), digest_size=32).digest()
        num_dropped = len(source) - num_slots
        num_before = shift = num_positions = 0
        if behind is not None:
            num_before, shift = behind.num_dropped, behind.rope_shift
            num_positions = behind.num_positions
        return CompressedPrefix(
            self._id_of(digest),
            policy,
            num_slots,
            source,
            behind,
            candidates,
            num_dropped=num_before + num_dropped,
            rope_shift=0 if policy.kind == "streaming" else shift + num_dropped,
            num_positions=max(num_positions, shift + len(source)),
        )

    def require(self, policy: KVPolicy) -> None:
        """Raises InvalidRequest where it cannot be done here."""
        if policy.keeps_all or policy == self.window:
            return
        refusal = "engines ask for it by themselves" if policy.kind == "window" else self.refusal
        if refusal is not None:
            raise InvalidRequest.of("kv_policy", policy.kind, f"left out: {refusal}")
        if policy.num_observed > self._max_observed:
            allowed = f"at most {self._max_observed}, a chunk (chunked_prefill_size)"
            raise InvalidRequest.of("kv_policy.window", policy.window, allowed)
        if policy.is_stream:
            self._require_stream_fits(policy)

    def fits(self, policy: KVPolicy) -> bool:
        """Whether the pool, and a context, can have what a stream keeps, and what it is made of."""
        try:
            self._require_stream_fits(policy)
        except InvalidRequest:
            return False
        return True

    def _require_stream_fits(self, policy: KVPolicy) -> None:
        """Raises InvalidRequest."""
        most = int(policy.keep) + policy.num_dropped_at_once + self._page_size
        if most > self._max_tokens:
            allowed = f"so few that half as many more fit the context of {self._max_tokens}"
            raise InvalidRequest.of("kv_policy.keep", policy.keep, allowed)
        num_slots = int(policy.keep) + -int(policy.keep) % self._page_size
        self._require_room(policy, num_slots + policy.num_dropped_at_once, num_slots)

    def _require_room(self, policy: KVPolicy, num_tokens: int, num_slots: int) -> None:
        """Raises InvalidRequest where the pool cannot have the tokens that a prefix is made of and
        what is kept of them at once."""
        num_tokens += -num_tokens % self._page_size
        most = self._max_pages * self._page_size
        if num_tokens + num_slots > most:
            allowed = (
                f"so few that these {num_slots} fit the pool of {most} (max_total_tokens) beside "
                f"the {num_tokens} of which they are kept"
            )
            raise InvalidRequest.of("kv_policy.keep", policy.keep, allowed)

    def _id_of(self, digest: bytes) -> int:
        with self._lock:
            known = self._known.get(digest)
            if known is None:
                if self._next_id > _LAST:
                    raise InvalidRequest("kv_policy: too many prefixes were compressed: restart it")
                known = self._known[digest] = self._next_id
                self._next_id += 1
                if len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
            self._known.move_to_end(digest)
            return known
