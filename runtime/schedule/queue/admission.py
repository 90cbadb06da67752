"""Which waiting requests begin to run in a step, and what is kept free for those that run.

A request is admitted if pages remain for what it and the running ones are expected to generate. It
may generate up to max_tokens and seldom does; to keep room for all of it leaves the pool half
empty, to keep none makes requests preempt each other. Two ideas meet here. From SGLang's
scheduler, the new-token ratio: a share of what may still be generated, which decays while nothing
is preempted and rises when something is; here it decays no further than to MARGIN times the share
that ended requests really used. From the past-future scheduler (Gong et al., ASPLOS 2025,
arXiv:2507.10150), the peak: requests end at different times and give back what they hold, so what
must be free is the largest need at any of those times and not the sum.

Under policy `program` a request's program must be in the working set, or join it
(`working_set.py`); else the request is parked: it waits, and others may pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import Enum

from ....errors import OutOfPages
from ..cache.kv_cache import KVCacheManager
from ..image_encodings import ImageEncodings
from ..request import Request
from ..stats import SchedulerStats
from .policy import OutputShare
from .prompt_limits import PromptLimits
from .waiting_queue import NOBODY, WaitingQueue
from .working_set import WorkingSet

MAX_HELD_BACK = 32  # candidates that one round may pass over (guess)
INITIAL_RATIO = 0.7
MIN_RATIO = 0.1
# Preempts 0 of 800 where 1.0 preempts 5, for 1% of throughput:
# docs/decisions/0012-room-for-new-tokens.md.
MARGIN = 1.2
DECAY = 0.001  # a step: from the initial to the least ratio in 600 steps, as in SGLang
RISE = 0.1  # a preemption
MAX_RESERVED = 4096  # tokens a request, as in SGLang: a call without max_tokens asks for all

CutPrompt = tuple[Request, int]
"""A prompt of which a step computes a part, and where that part ends."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request has pages, also for its first chunk of `num_tokens`; that has none where only the
    request's grammar is missing."""

    num_tokens: int


class NotAdmitted(Enum):
    """Why a request goes on waiting; it holds no pages."""

    PARKED = "parked"  # the working set has no room for its program; others may be admitted
    NO_PAGES = "no pages"  # nobody behind it may be admitted either
    UNCOMPRESSED = "uncompressed"  # its compressed prefix is no longer cached


class NewTokenEstimate:
    """Expects each running request to generate `ratio`, in [MIN_RATIO, 1], of what it still may.

    Invariant: `num_running` is the sum of the running requests' `num_new_tokens`.
    """

    def __init__(self, output_share: OutputShare) -> None:
        self._output_share = output_share
        self._decaying = INITIAL_RATIO
        self.num_running = 0  # tokens that the running requests may still generate

    @property
    def ratio(self) -> float:
        """The share that is kept free."""
        return min(1.0, max(self._decaying, MARGIN * self._output_share.overall.value))

    def note_step(self) -> None:
        """A step went by."""
        self._decaying = max(MIN_RATIO, self._decaying - DECAY)

    def note_preemption(self) -> None:
        """The estimate was too low."""
        self._decaying = min(1.0, self.ratio + RISE)

    def end(self, request: Request) -> int:
        """The tokens that a request is expected to have at its end."""
        return request.num_tokens + _expected(request, self.ratio)

    def peak(self, requests: Iterable[Request]) -> int:
        """The most tokens that these requests will need at once beyond what they hold.

        All generate a token a step; one that ends gives back what it has generated. O(n log n).
        """
        ratio = self.ratio
        ends = sorted((_expected(r, ratio), r.num_output_tokens) for r in requests)
        peak = given_back = 0
        num_left = len(ends)
        for num_new, num_output in ends:
            peak = max(peak, num_left * num_new - given_back)
            given_back += num_output
            num_left -= 1
        return peak

    def check(self, running: Iterable[Request]) -> None:
        """Raises when the sum is wrong (tests)."""
        num_new_tokens = sum(request.num_new_tokens for request in running)
        assert self.num_running == num_new_tokens, f"{self.num_running} {num_new_tokens}"


def _expected(request: Request, ratio: float) -> int:
    return min(MAX_RESERVED, request.num_growing_tokens, int(request.num_new_tokens * ratio))


class Admission:
    """Decides who of the waiting begins to run, and reserves their first pages.

    Who is yielded has its pages; the caller takes it from the waiting queue and adds it to the
    running requests before it asks for the next. Whoever is not yielded holds nothing.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        waiting: WaitingQueue,
        working_set: WorkingSet,
        new_tokens: NewTokenEstimate,
        limits: PromptLimits,
        stats: SchedulerStats,
        images: ImageEncodings | None = None,
    ) -> None:
        self._kv_cache = kv_cache
        self._waiting = waiting
        self._working_set = working_set
        self._new_tokens = new_tokens
        self._limits = limits
        self._stats = stats
        self._images = images
        self.has_parked = False  # in this step
        self.has_unasked = False  # the step's round ended before all had been offered
        self.unplaced: Request | None = None  # for which the step's round had no pages
        self.uncompressed: list[Request] = []  # whose compressed prefix is to be made again

    def begin_step(self) -> None:
        """A step is being planned; it may have a round, or none."""
        self.has_parked = self.has_unasked = False
        self.unplaced = None
        self.uncompressed = []

    def round(
        self,
        budget: int,
        num_rows: int,
        running: Sequence[Request],
        cut: list[CutPrompt],
        *,
        first: Hashable = NOBODY,
        may_break_pins: bool,
    ) -> Iterator[tuple[Request, int]]:
        """Admit requests by policy while there are `budget` tokens, table rows and pages: each with
        the size of its first chunk. `cut` grows by the chunks that end within a prompt.

        One that shares with a prompt whose chunk was cut waits for it, unless it is due.
        `first`: whose requests are the first to be asked (`claims.py`).
        `may_break_pins`: for a request that would run alone, if it does not fit otherwise.
        """
        num_held_back = 0
        with closing(self._waiting.candidates(first)) as candidates:
            while budget > 0 and num_rows and num_held_back < MAX_HELD_BACK:
                request = next(candidates, None)
                if request is None:
                    return
                if not self._waiting.has_slot(request):
                    continue
                must_wait = shares_with(request, cut) or self._awaits_state(request)
                must_wait = must_wait and not self._waiting.is_due(request)
                if must_wait or self._limits.max_chunk(request, budget) < request.min_chunk:
                    num_held_back += 1  # a whole text waits for a step with room for it
                    continue
                outcome = self._reserve(request, budget, running, cut, may_break_pins)
                if outcome is NotAdmitted.NO_PAGES:
                    self.unplaced = request
                    return
                if outcome is NotAdmitted.PARKED or outcome is NotAdmitted.UNCOMPRESSED:
                    num_held_back += 1
                    continue
                end = request.num_computed_tokens + outcome.num_tokens
                if end < request.num_ready_tokens:
                    cut.append((request, end))
                yield request, outcome.num_tokens
                budget -= outcome.num_tokens
                num_rows -= 1
        self.has_unasked = num_held_back >= MAX_HELD_BACK

    def _reserve(
        self,
        request: Request,
        budget: int,
        running: Sequence[Request],
        cut: Sequence[CutPrompt],
        may_break_pins: bool,
    ) -> Admitted | NotAdmitted:
        """Give a request what is cached of it, and pages for its first chunk."""
        self._kv_cache.attach(request)
        if not self._may_join(request, running, cut):
            self._kv_cache.release(request)
            self._stats.num_gated += 1
            self.has_parked = True
            self._waiting.park(request)
            return NotAdmitted.PARKED
        room = self._kv_cache.num_available_pages * self._kv_cache.page_size
        if may_break_pins and not running and request.num_missing > room:
            self._kv_cache.break_pins(request, request.num_tokens)
        try:
            self._require_room(request, running, cut)
            self._kv_cache.load(request)
            prefix = request.compressed
            if prefix is not None and request.num_published < prefix.num_slots:
                self._kv_cache.release(request)
                self.uncompressed.append(request)
                return NotAdmitted.UNCOMPRESSED
            self._kv_cache.restore(request)
            self._kv_cache.begin_state(request)
            begun = self._kv_cache.find_begun_page(request)
            most = self._kv_cache.max_chunk(request, budget)
            if self._images is not None and request.images:
                most = self._images.computable(request, min(most, request.num_ready))
            num_tokens = self._limits.take(request, most)
            self._kv_cache.reserve(request, request.num_computed_tokens + num_tokens)
            self._kv_cache.fork_page(request, begun)
        except OutOfPages:
            self._kv_cache.release(request)
            return NotAdmitted.NO_PAGES
        return Admitted(num_tokens)

    def _awaits_state(self, request: Request) -> bool:
        states = self._kv_cache.states
        return states is not None and states.must_wait(request)

    def _may_join(
        self, request: Request, running: Sequence[Request], cut: Sequence[CutPrompt]
    ) -> bool:
        """Whether the working set has room for the request's program."""
        if not self._waiting.policy.has_working_set or request.is_admitted:
            return True
        if self._working_set.is_welcome(request) or self._waiting.is_due(request):
            return True
        missing = self._missing_tokens(request, cut, len(running))
        if running:
            missing += self._new_tokens.peak((*running, request))
        return self._working_set.may_join(request, missing)

    def _require_room(
        self, request: Request, running: Sequence[Request], cut: Sequence[CutPrompt]
    ) -> None:
        """Raises OutOfPages unless the request's tokens, and all that it and the running ones are
        expected to need, fit what is free; alone it may have whatever fits."""
        if not running:
            return
        room = self._kv_cache.num_available_pages * self._kv_cache.page_size
        room -= self._missing_tokens(request, cut, len(running))
        if self._new_tokens.num_running + request.num_new_tokens <= room:
            return
        if self._new_tokens.peak((*running, request)) > room:
            raise OutOfPages(f"admitting request {request.id} would soon preempt")

    def _missing_tokens(self, request: Request, cut: Sequence[CutPrompt], num_running: int) -> int:
        """Room that known tokens without pages need: the request's and those of cut prompts, and
        last pages that are not full."""
        page_size = self._kv_cache.page_size
        missing = request.num_tokens - len(request.pages) * page_size
        missing += sum(other.num_tokens - end for other, end in cut)
        return missing + (num_running + 1) * (page_size - 1)


def shares_with(request: Request, cut: Iterable[CutPrompt]) -> bool:
    """Whether the request's tokens begin with all that a cut prompt has so far, and one more."""
    return any(
        request.namespace == other.namespace
        and request.num_tokens > end
        and request.token_ids[end] == other.token_ids[end]
        and request.token_ids[:end] == other.token_ids[:end]
        for other, end in cut
    )
