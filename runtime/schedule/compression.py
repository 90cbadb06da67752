"""Prefixes of which only a part of the KV is kept, and how requests name them.

    a prompt      t0 t1 t2 ........................ tc | rest ...
    a request     -9 -9 -9 -9 | rest ...         the same, with its prefix kept in 4 slots
    positions     of the rest: its index in the request + num_dropped

A compressed prefix has one id below 0, as an image has, which stands in a request's tokens as often
as it has slots. So whatever compares prefixes (the tree, its tiers, leases) keeps it apart from the
exact KV of the same text, and from that of another policy, and forks and preemption carry it as
they carry tokens. What it is made of is computed by a request of its own (`compressions.py`).
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Hashable
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

    @property
    def ids(self) -> array[int]:
        """The tokens that stand for it."""
        return array("i", [self.token_id]) * self.num_slots

    @property
    def num_dropped(self) -> int:
        """By so many the positions of what follows are above its places among the slots."""
        before = 0 if self.behind is None else self.behind.num_dropped
        return before + len(self.source) - self.num_slots


@dataclass(slots=True, eq=False)
class Compaction:
    """What a request makes: a prefix of which all its tokens are the source. `pages`: for what is
    kept, once its last chunk is planned, until they are the tree's."""

    prefix: CompressedPrefix
    pages: array[int] = field(default_factory=lambda: array("i"))

    @property
    def first_observed(self) -> int:
        """Where its last chunk begins."""
        return max(0, len(self.prefix.source) - self.prefix.policy.num_observed)


class CompressedPrefixes:
    """Gives compressed prefixes their ids. Invariant: an id stands for one policy's choice from one
    namespace's text, for ever. Thread-safe."""

    def __init__(
        self, page_size: int = 1, max_observed: int = MAX_WINDOW, refusal: str | None = None
    ) -> None:
        """max_observed: tokens of a chunk. refusal: why none can be made here; None: they can."""
        self._page_size = page_size
        self._max_observed = max_observed
        self._refusal = refusal
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._next_id = _FIRST
        self._lock = threading.Lock()

    def of(
        self,
        source: array[int],
        policy: KVPolicy,
        namespace: Hashable = "",
        behind: CompressedPrefix | None = None,
    ) -> CompressedPrefix | None:
        """What the policy keeps of a prefix, in whole pages; None: all of it. Raises
        InvalidRequest."""
        if self._refusal is not None:
            raise InvalidRequest.of("kv_policy", policy.kind, f"left out: {self._refusal}")
        if policy.num_observed > self._max_observed:
            allowed = f"at most {self._max_observed}, a chunk (chunked_prefill_size)"
            raise InvalidRequest.of("kv_policy.window", policy.window, allowed)
        num_slots = policy.num_kept(len(source))
        num_slots += -num_slots % self._page_size
        if num_slots >= len(source):
            return None
        name = repr((namespace, policy.to_wire())).encode()
        digest = blake2b(name + b"\0" + source.tobytes(), digest_size=32).digest()
        return CompressedPrefix(self._id_of(digest), policy, num_slots, source, behind)

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
