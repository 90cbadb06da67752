"""Prompts that will probably be asked for, computed while the device idles.

    branch      ...gen|  (pause: a tool runs)  |text gen...
    device      busy  | idle: likely text |    |only what was not likely
                        in pieces of PIECE_S

What a branch goes on with may be known (`../programs/likely_texts.py`). While nothing runs and
nothing waits it is computed, in pieces so short that who comes meanwhile waits for one of them at
most. Its KV is cached like any other's, under a lease that is the first to be broken; where the
branch goes on otherwise it is the first to be evicted. No output depends on it.

What it may cost is bounded: time that has brought nothing is at most SHARE of all time, and
BURST_S at once; none is spent where the work of the last seconds, counted at what one more row or
token adds to a step, nearly fills them (`StepCosts.load`), nor for pages that are not free.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from ...errors import StemmaError
from ...radix.leases import Lease
from ..engine import Engine
from ..programs.likely_texts import num_common
from ..programs.time_credit import TimeCredit
from ..schedule.plan import RowResult
from ..schedule.queue.working_set import MAX_LOAD
from ..schedule.request import FinishReason, Request, Scoring
from ..schedule.sampling_params import SamplingParams

SHARE = 0.1  # of all time, for what turns out to be of no use
BURST_S = 1.0  # of that at once
PIECE_S = 0.02  # by which who comes meanwhile may be delayed
MIN_PIECE_TOKENS = 16
FIRST_PIECE_TOKENS = 64  # while nothing is known of the device's speed
MAX_OFFERS = 256  # the oldest is withdrawn (guess)
LEASE_S = 60.0
PRIORITY = -1_000  # below all that programs ask for
FREE_SHARE = 1 / 8  # of the pool, that is to stay free beside


@dataclass(slots=True, eq=False)
class _Offer:
    """A likely prompt of `owner`, of which the first `num_done` tokens are computed."""

    owner: Hashable
    namespace: str
    ids: array[int]
    num_known: int
    num_done: int
    spent_s: float = 0.0
    request: Request | None = None  # of the piece that runs
    lease: Lease | None = None


class AheadPrefills:
    """The likely prompts of all programs. Belongs to the engine's thread. Invariant: at most one
    piece runs, and none beside a request of a program that had come before it."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: the scheduler's, in seconds."""
        self._engine = engine
        self._clock = clock
        self._offers: OrderedDict[Hashable, _Offer] = OrderedDict()
        self._credit = TimeCredit(SHARE, BURST_S, clock)
        self.num_tokens = 0  # computed
        self.num_used_tokens = 0  # of these: with which a prompt really began
        self.spent_s = 0.0
        self.used_s = 0.0  # of that: for tokens that were used

    # --- what programs say ------------------------------------------------------------------------

    def offer(self, owner: Hashable, namespace: str, ids: array[int], num_known: int) -> None:
        """See `likely_texts.Prefills`."""
        before = self._offers.get(owner)
        if before is not None:
            if before.ids == ids:
                return
            self.withdraw(owner, None)
        self._offers[owner] = _Offer(owner, namespace, ids, num_known, num_known)
        if len(self._offers) > MAX_OFFERS:
            self.withdraw(next(iter(self._offers)), None)

    def withdraw(self, owner: Hashable, prompt: array[int] | None) -> None:
        """See `likely_texts.Prefills`."""
        offer = self._offers.pop(owner, None)
        if offer is None:
            return
        if offer.request is not None:
            self._engine.abort(offer.request)
        num_used = 0
        if prompt is not None:
            num_used = max(0, num_common(prompt, offer.ids[: offer.num_done]) - offer.num_known)
        if offer.num_done > offer.num_known:
            used_s = offer.spent_s * num_used / (offer.num_done - offer.num_known)
            self.num_used_tokens += num_used
            self.used_s += used_s
            self._credit.spend(-used_s)
        kv_cache = self._engine.scheduler.kv_cache
        if offer.lease is not None:
            kv_cache.release_lease(offer.lease)
            if not num_used:
                kv_cache.give_way(offer.namespace, offer.ids[: offer.num_done])

    # --- what the engine's loop does --------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `begin` has something to begin."""
        return self._next() is not None

    def begin(self) -> None:
        """Queue the next piece, if the device idles and there is one."""
        offer = self._next()
        if offer is None:
            return
        end = min(len(offer.ids), offer.num_done + self._piece_tokens())
        request = offer.request = Request(
            self._engine.next_request_id(),
            offer.ids[:end],
            SamplingParams(temperature=0.0),
            _Listener(self, offer),
            namespace=offer.namespace,
            scoring=Scoring(end - 1, ()),
            is_ahead=True,
        )
        try:
            self._engine.submit(request)
        except StemmaError:  # longer than a context may be
            offer.request = None
            self.withdraw(offer.owner, None)

    def describe(self) -> dict[str, Any]:
        """Counters as plain data."""
        names = ("num_tokens", "num_used_tokens", "spent_s", "used_s")
        return {name: getattr(self, name) for name in names}

    def end(self, offer: _Offer, request: Request) -> None:
        """A piece has ended."""
        offer.request = None
        assert request.finished_s is not None
        duration_s = request.finished_s - (request.admitted_s or request.finished_s)
        self._credit.spend(duration_s)
        self.spent_s += duration_s
        if request.finish_reason is FinishReason.ABORT:
            return
        if request.finish_reason is not FinishReason.STOP:
            self.withdraw(offer.owner, None)
            return
        offer.spent_s += duration_s
        self.num_tokens += request.num_prompt_tokens - offer.num_done
        offer.num_done = request.num_prompt_tokens
        if self._offers.get(offer.owner) is offer:
            self._keep(offer)

    def _keep(self, offer: _Offer) -> None:
        kv_cache, before = self._engine.scheduler.kv_cache, offer.lease
        offer.lease = kv_cache.retain(
            offer.namespace,
            offer.ids[: offer.num_done],
            due_s=0.0,
            ttl_s=LEASE_S,
            priority=PRIORITY,
        )
        if before is not None:
            kv_cache.release_lease(before)

    def _next(self) -> _Offer | None:
        if not self._offers:
            return None
        scheduler = self._engine.scheduler
        if scheduler.running or scheduler.num_waiting or scheduler.has_work:
            return None
        if not self._credit.is_left or scheduler.costs.load(self._clock()) >= MAX_LOAD:
            return None
        for offer in list(self._offers.values()):
            if offer.request is not None or offer.num_done == len(offer.ids):
                continue
            if not self._is_cached(offer):
                self.withdraw(offer.owner, None)
            elif self._fits(offer):
                return offer
        return None

    def _is_cached(self, offer: _Offer) -> bool:
        """Whether what it goes on from is there, but for a last token that was only drawn."""
        kv_cache = self._engine.scheduler.kv_cache
        num_cached = kv_cache.tree.match_length(offer.namespace, offer.ids, offer.num_done)
        return num_cached >= offer.num_done - kv_cache.page_size

    def _fits(self, offer: _Offer) -> bool:
        """Whether there are pages that nobody keeps, and many others."""
        kv_cache = self._engine.scheduler.kv_cache
        num_pages = -(-(len(offer.ids) - offer.num_done) // kv_cache.page_size)
        return kv_cache.num_free_pages - num_pages >= FREE_SHARE * kv_cache.num_pages

    def _piece_tokens(self) -> int:
        scheduler = self._engine.scheduler
        token_s = scheduler.costs.prompt_token_s
        wanted = int(PIECE_S / token_s) if token_s else FIRST_PIECE_TOKENS
        return min(max(MIN_PIECE_TOKENS, wanted), scheduler.token_budget)


class _Listener:
    """Of each piece."""

    def __init__(self, prefills: AheadPrefills, offer: _Offer) -> None:
        self._prefills = prefills
        self._offer = offer

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        raise AssertionError("nothing is sampled ahead")

    def on_finish(self, request: Request) -> None:
        self._prefills.end(self._offer, request)
