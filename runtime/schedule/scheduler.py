"""Which request computes how many tokens in the next step.

There is no prefill phase and no decode phase: every request has tokens and computed tokens that
catch up with them (as in vLLM's v1 scheduler). A step has a token budget; running requests take
theirs first, those that decode before those with a prompt to compute, so that decoding never stalls
behind a long prompt. The rest goes to chunks of waiting prompts, in the order of the policy. When
pages run out all the same, the policy's victim is preempted: what it computed stays cached while
there is room, and it waits at the head of the queue.

The scheduler decides the order of these things; each has a collaborator that knows how:

    who waits, in which order     queue/waiting_queue.py, by queue/policy.py
    who begins to run             queue/admission.py; by adapter queue/adapter_slots.py
    whose program has its KV      queue/working_set.py
    who gives way to another      queue/claims.py
    who is refused, or too late   queue/deadlines.py
    how long a chunk may be       queue/prompt_limits.py, by queue/step_costs.py
    who runs, in which row        running.py
    a step as rows, then a plan   rows.py
    what lacks its grammar        grammar_uptake.py
    which drafts are verified     speculation.py
    what a row has generated      outputs.py
    what a step has cost, whom    step_accounts.py
    which hypotheses go on        beams.py
    which images are encoded      image_encodings.py
    what lacks its compressed KV  compressions.py

A plan may be made while others are computed (`in_flight.py`); nobody is preempted then. Who
simulates a device may have steps that decide nothing made at once (`repeat`).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import (
    Callable,
    Container,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)

from ...errors import OutOfPages
from ..speculate.drafting import Drafting
from .beams import Beams
from .cache.coming_prefixes import Here
from .cache.kv_cache import KVCacheManager
from .compressions import Compressions
from .draft_tree import exchanges, exchanges_by_draws, right_drafts
from .grammar_uptake import GrammarUptake, begin_output
from .image_encodings import ImageEncodings
from .in_flight import Held, InFlight, InFlightStep
from .outputs import Outputs, note_lost
from .plan import EncodeSlice, Row, RowResult, StepPlan, StepResult
from .program_record import ProgramRecord
from .queue.adapter_slots import AdapterSlots
from .queue.admission import Admission, CutPrompt, NewTokenEstimate, shares_with
from .queue.claims import Claims
from .queue.deadlines import Deadlines
from .queue.fairness import TenantShares
from .queue.policy import DEFAULT_POLICY, OutputShare, PolicyContext, policy_of
from .queue.prompt_limits import DEFAULT_SLOWDOWN, PromptLimits, share_of_stage
from .queue.step_costs import StepCosts
from .queue.waiting_queue import MAX_OVERTAKES, NOBODY, WaitingQueue
from .queue.working_set import WorkingSet
from .request import FinishReason, Request, RequestState
from .rows import StepDraft
from .running import RunningRequests
from .speculation import Speculation
from .stats import Latencies, SchedulerStats
from .step_accounts import StepAccounts
from .tree_order import TreeOrder


class Scheduler:
    """Owns all requests that have not finished, and the order in which they run.

    Invariant: at most `max_running_requests` run; each has a table row of its own; at most
    `max_plans_in_flight` are. `running` is in the policy's order: the last is the next to be
    preempted.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        token_budget: int,
        max_running_requests: int,
        policy: str = DEFAULT_POLICY,
        max_overtakes: int | None = MAX_OVERTAKES,
        segment_cost_tokens: int = 32,
        decode_slowdown: float = DEFAULT_SLOWDOWN,
        vocab_size: int = 0,
        tenant_weights: Mapping[Hashable, float] | None = None,
        has_overlap: bool = False,
        adapters: AdapterSlots | None = None,
        clock: Callable[[], float] = time.perf_counter,
        drafting: Drafting | None = None,
        images: ImageEncodings | None = None,
        num_layers: int = 1,
        num_stages: int = 1,
    ) -> None:
        """`segment_cost_tokens`: see `TreeOrder.segments`; the executor knows it.
        `decode_slowdown`: see `prompt_limits`. `vocab_size`: needed for grammars.
        `tenant_weights`: see `fairness`. `has_overlap`: a plan may be made while one is in flight.
        `adapters`: needed where requests have any. `clock`: that of requests' deadlines, in
        seconds. `drafting`: there is no overlap then. `images`: needed where requests have any;
        `num_layers`: the decoder's, by which what an image costs is measured. `num_stages`: of a
        pipeline, which compute a plan each; a model that sees or has recurrent states goes one plan
        at a time."""
        self.kv_cache = kv_cache
        self._clock = clock
        self._mask_words = -(-vocab_size // 32)
        self.token_budget = token_budget
        self.segment_cost_tokens = segment_cost_tokens
        self.costs = StepCosts()
        self.limits = PromptLimits(self.costs, kv_cache.page_size, decode_slowdown)
        self.stats = SchedulerStats()
        self.latencies = Latencies()
        self.output_share = OutputShare()
        around = PolicyContext(kv_cache.tree, self.output_share)
        self.shares = TenantShares(tenant_weights)
        self.waiting = WaitingQueue(policy_of(policy), around, max_overtakes, self.shares, adapters)
        self.working_set = WorkingSet(kv_cache, self.costs, clock)
        self.deadlines = Deadlines(self.costs, self.output_share, self.stats, clock)
        self._open: set[Request] = set()  # that were added and have not finished
        self.new_tokens = NewTokenEstimate(self.output_share)
        self._accounts = StepAccounts(self.costs, self.shares, self.new_tokens, self.stats)
        self._running = RunningRequests(max_running_requests, self.new_tokens, adapters)
        self.images = images
        self._num_layers = num_layers
        self.admission = Admission(
            kv_cache,
            self.waiting,
            self.working_set,
            self.new_tokens,
            self.limits,
            self.stats,
            images,
        )
        num_tokens = kv_cache.num_pages * kv_cache.page_size
        self.claims = Claims(self.shares, self.new_tokens, max_running_requests, num_tokens)
        self.grammars = GrammarUptake()
        self.outputs = Outputs(self.stats, self.new_tokens)
        self.speculation: Speculation | None = None
        if drafting is not None:
            assert not has_overlap, "drafts need the tokens before them"
            self.speculation = Speculation(drafting, self._mask_words, self.stats)
        self.beams = Beams(kv_cache, self.new_tokens, self.stats, self)
        self.compressions = Compressions(kv_cache, self)
        if images is not None or kv_cache.states is not None:
            num_stages = 1
        self._num_stages = num_stages
        self._step_tokens = share_of_stage(token_budget, num_stages, max_running_requests)
        self._tree_order = TreeOrder(kv_cache.tree)
        self._in_flight = InFlight(has_overlap=has_overlap, num_stages=num_stages)
        self._step_id = 0
        self._is_short = False  # of pages, so that who needs them is to be planned first
        self._is_stalled = False  # the last plan was empty: they all wait
        self._wake_s: float | None = None  # when a plan may have rows though nothing has happened
        self._num_free_pages = 0  # when the last plan was empty
        self.adapters = adapters

    @property
    def running(self) -> list[Request]:
        """The requests that run, in the policy's order: the last is the next to be preempted."""
        return self._running.requests

    @property
    def max_plans_in_flight(self) -> int:
        """Plans that may be made before the first one's result is in."""
        return self._in_flight.max_plans

    @property
    def num_waiting(self) -> int:
        """Requests that do not run, those among them whose KV is being fetched or compressed."""
        return len(self.waiting) + self.kv_cache.num_held + self.compressions.num_held

    @property
    def num_free_rows(self) -> int:
        """Requests that could run beside those that do, if there were pages for them."""
        return self._running.num_free_rows

    @property
    def in_flight(self) -> tuple[Request, ...]:
        """The requests of the last plan while it is neither applied nor failed, row by row."""
        newest = self._in_flight.newest
        return () if newest is None else newest.requests

    def num_adapter_users(self, load_id: str) -> int:
        """Requests that wait or run with the adapter as it was loaded then, under that name."""
        adapters = [request.adapter for request in self._open]
        return sum(a is not None and a.load_id == load_id for a in adapters)

    def is_behind_prefix(self, request: Request) -> bool:
        """Whether a request that waits shares more with a prompt that is being computed than is
        there of it yet: it is admitted once that has come further."""
        cut = [(r, r.num_scheduled_tokens) for r in self.running if r.num_ready > 1]
        return shares_with(request, cut)

    @property
    def has_work(self) -> bool:
        """Whether a plan would have rows or copies between tiers, or a request is to be ended, or
        a plan is in flight."""
        if self._in_flight or self.kv_cache.has_transfers or self.kv_cache.has_fetched:
            return True
        if self.grammars.has_arrived or self.beams.has_ready:
            return True
        if self._is_stalled:
            return self._is_awake()
        awaits_grammar = self.grammars or self.beams.awaits_grammar
        if self.waiting or (self.running and not awaits_grammar):
            return True
        if any(r.num_ready > 0 for r in self.running):
            return True
        next_s = self.deadlines.next_s  # of those whose KV is being fetched
        return next_s is not None and self._clock() >= next_s

    @property
    def next_wake_s(self) -> float | None:
        """By the clock: when there may be work again though nothing has happened; None: never."""
        return self._wake_s if self._is_stalled else self.deadlines.next_s

    def _is_awake(self) -> bool:
        if self._wake_s is not None and self._clock() >= self._wake_s:
            return True
        return self.admission.has_parked and self.kv_cache.num_free_pages > self._num_free_pages

    @property
    def policy(self) -> str:
        """The policy's name; setting it takes effect at the next plan.

        Raises InvalidRequest with the names there are.
        """
        return self.waiting.policy.name

    @policy.setter
    def policy(self, name: str) -> None:
        policy = policy_of(name)
        self.waiting.policy = policy
        self._is_stalled = False
        self._order_running()

    def _order_running(self) -> None:
        self.running.sort(key=self.waiting.policy.keep)

    def add(self, request: Request) -> None:
        """Queue a request. The caller has checked that alone it fits the pool.

        Raises DeadlineExceeded where its output is not expected in time.
        """
        self.deadlines.add(request)
        if request.program is not None and not request.program.number:
            request.program.number = request.id
        self.join(request)
        if request.beam is not None:
            self.beams.add(request)
        num_ahead = self.deadlines.num_waiting_tokens - request.num_prompt_tokens
        here = Here(self.costs.prompt_token_s, num_ahead, len(self.running))
        if not self.compressions.must_wait(request) and not self.kv_cache.look_up(request, here):
            self.waiting.add(request)
        self.grammars.add(request)
        self._is_stalled = False

    def end_program(self, program: ProgramRecord) -> None:
        """A program will have no more requests."""
        self.working_set.end(program)

    def abort(self, request: Request) -> None:
        """End a request now, whatever its state; nothing happens if it has already ended. What a
        plan in flight names of it is given back with that."""
        if not request.is_finished:
            self._finish(request, FinishReason.ABORT)

    # --- planning -------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run, or none should before the results are in; its
        pages are reserved, prompts published."""
        if self._in_flight.is_closed:
            return None
        if self.speculation is not None:
            self.speculation.begin_step()
        self.kv_cache.begin_step()
        if self.images is not None:
            self.images.begin_step()
        for request in self.kv_cache.take_fetched():
            self.waiting.add(request)
        self._take_grammars()
        self.beams.advance()
        for request in self.deadlines.expire():
            self._finish(request, FinishReason.ERROR)
        draft = StepDraft(
            self.kv_cache, self._tree_order, self.segment_cost_tokens, self._mask_words
        )
        continued = self._in_flight.continued
        draft.fill(self._share_out(continued), continued)
        while not draft.rows and self._preempt_reported():
            draft.fill(self._share_out(continued), continued)
        if self.speculation is not None:
            draft.add_drafts(self.speculation, self._step_tokens)
            if self.speculation.has_model:
                draft.guess_ahead(self.speculation)
        self._is_stalled = False
        dropped, encodes = self._image_work()
        if not draft.rows and not encodes and not self._in_flight:
            self._sleep()
        transfers, unsettled = self.kv_cache.take_transfers()
        saves = self.kv_cache.states is not None and self.kv_cache.states.has_saves
        if not (draft.rows or transfers or saves or dropped or encodes):
            return None
        self._step_id += 1
        planned = draft.finish(self._step_id, transfers, unsettled, dropped, encodes)
        self._accounts.note_plan(planned, is_overlapped=bool(self._in_flight))
        self._in_flight.add(planned)
        return planned.plan

    def _image_work(self) -> tuple[tuple[int, ...], tuple[EncodeSlice, ...]]:
        """Images to drop, and so much of others as costs what is left of a step for prompts."""
        if self.images is None:
            return (), ()
        return self.images.take(self.limits.num_left * self._num_layers)

    def _computable(self, request: Request, num_tokens: int, cut: list[CutPrompt]) -> int:
        """How many of a running request's next tokens can be computed; one that waits for an image
        makes those wait that share it."""
        if self.images is None or not request.images:
            return num_tokens
        num_tokens = self.images.computable(request, min(num_tokens, request.num_ready))
        if num_tokens == 0:
            cut.append((request, request.num_scheduled_tokens))
        return num_tokens

    def _sleep(self) -> None:
        """Nothing can run: until something happens, or until a time that is known."""
        self._is_stalled = (
            bool(self.grammars or self.beams.awaits_grammar or self.admission.has_parked)
            and not self.admission.has_unasked
        )
        times = [self.deadlines.next_s]
        if self.admission.has_parked:
            times.append(self.working_set.opens_s)
        self._wake_s = min((time_s for time_s in times if time_s is not None), default=None)
        self._num_free_pages = self.kv_cache.num_free_pages

    def _take_grammars(self) -> None:
        """Go on with the outputs whose grammars, or positions in them, have come since the last
        plan."""
        for request in self.grammars.take():
            self._finish_or_hold(request, begin_output(request) or self.outputs.resume(request))

    def _share_out(self, continued: Container[Request]) -> Iterator[tuple[Request, int]]:
        """Requests with the number of tokens each computes; pages are reserved when yielded."""
        budget = self._step_tokens
        claimant = self._make_way()
        self.admission.begin_step()
        num_preemptions = self.stats.num_preemptions
        planned: list[Request] = []
        cut: list[CutPrompt] = []
        by_level = self.waiting.policy.has_working_set
        if by_level:  # levels change while requests run
            self._order_running()
        decoding, filling = self._ready(continued)
        beside = decoding
        if self._num_stages > 1:  # a step is in the way of those in the other plans as well
            beside = [request for request in self.running if request.num_ready <= 1]
        self.limits.begin_step(budget, beside, by_level=by_level, num_stages=self._num_stages)
        is_trial = bool(decoding and (filling or self.waiting)) and self.limits.take_trial(
            len(decoding), by_level=by_level
        )
        for request in (*decoding, *filling):
            if budget <= 0 or (is_trial and planned and request.num_ready > 1):
                return
            if request.state is not RequestState.RUNNING:
                continue  # preempted a moment ago
            num_tokens = 1
            if request.num_ready > 1:
                self.kv_cache.catch_up(request)
                most = self.kv_cache.max_chunk(request, budget)
                num_tokens = self.limits.take(request, self._computable(request, most, cut))
                if num_tokens == 0:
                    continue
            end = request.num_scheduled_tokens + num_tokens
            if self._reserve_or_preempt(request, end, planned):
                if end < request.num_ready_tokens:
                    cut.append((request, end))
                planned.append(request)
                yield request, num_tokens
                budget -= num_tokens
            elif self._in_flight:
                return
        if not self.waiting or budget <= 0 or (is_trial and planned):
            return
        if self.stats.num_preemptions != num_preemptions:
            return  # pages are short: admitting now would only preempt again
        num_waiting = self.waiting.num_of(claimant)
        for request, num_tokens in self.admission.round(
            budget,
            self.num_free_rows,
            self.running,
            cut,
            first=claimant,
            may_break_pins=not self._in_flight,
        ):
            self._run(request)
            if num_tokens:
                yield request, num_tokens
        for request in self.admission.uncompressed:
            self.waiting.remove(request)
            self.enqueue(request, is_first=request.is_admitted)
        was_asked = num_waiting and self.admission.unplaced is None
        if was_asked and self.waiting.num_of(claimant) == num_waiting:
            self.claims.note_vain(claimant)

    def _make_way(self) -> Hashable:
        """Preempt for a tenant that waits and has a claim; returns it, to be asked first, or
        NOBODY."""
        if not self.waiting.policy.is_fair or not self.waiting:
            return NOBODY
        unplaced = self.admission.unplaced
        if unplaced is not None and unplaced not in self.waiting:
            unplaced = None
        claim = self.claims.find(self.waiting.tenants, self.running, self.num_free_rows, unplaced)
        if claim is None:
            return NOBODY
        if claim.victim is not None:
            if self._in_flight:  # it gives back nothing before that has ended
                self._in_flight.close()
                return NOBODY
            self._preempt(claim.victim)
        return claim.tenant

    def _ready(self, continued: Container[Request]) -> tuple[list[Request], list[Request]]:
        """The running requests with one token to compute, and those with more."""
        filling = [r for r in self.running if r.num_ready > 1]
        is_mixed = filling or self.grammars or self._in_flight or self.beams
        if not is_mixed and self._num_stages == 1:
            return self.running[:], filling
        decoding = [r for r in self.running if r.num_ready == 1 or r in continued]
        if self._num_stages > 1 and not self._is_short:  # so many for each of them
            decoding = decoding[: -(-(len(self.running) - len(filling)) // self._num_stages)]
        self._is_short = False
        return decoding, filling

    def _reserve_or_preempt(self, request: Request, end: int, planned: list[Request]) -> bool:
        """Reserve pages for `end` tokens; False when the request had to be preempted itself, or,
        beside a plan in flight, would have to wait for what it will give back.

        Victims are those that this step has not planned yet.
        """
        while True:
            try:
                self.kv_cache.reserve(request, end)
                return True
            except OutOfPages:
                if self._in_flight:
                    self._in_flight.close()
                    self._is_short = True
                    return False
                if len(self.running) == 1 and self.kv_cache.break_pins(request, end):
                    continue
                victim = next(r for r in reversed(self.running) if r not in planned)
                self.new_tokens.note_preemption()
                self._preempt(victim)
                if victim is request:
                    return False

    def _run(self, request: Request) -> None:
        """A waiting request, whose pages are reserved, begins to run."""
        self.kv_cache.forget_preempted(request)
        self.kv_cache.forget_fetched(request)
        self.waiting.remove(request)
        self._running.add(request, self.waiting.policy.keep)
        if request.is_admitted:
            return
        request.is_admitted = True
        request.admitted_s = time.perf_counter()
        num_here = min(request.num_computed_tokens, request.num_prompt_tokens)
        request.num_cached_tokens = num_here + request.num_dropped - request.num_to_compress
        if request.is_call:
            self.stats.num_prompt_tokens += request.num_text_tokens
            self.stats.num_cached_tokens += request.num_cached_tokens
        if self.speculation is not None:
            request.is_followed = self.speculation.follows(request)
        self.deadlines.note_admission(request)
        self.working_set.note_admission(request)

    def _preempt(self, victim: Request) -> None:
        assert not self._in_flight, "what a victim gives back is of use at once"
        self.stats.num_preemptions += 1
        victim.num_preemptions += 1
        kept = victim.token_ids[: victim.num_computed_tokens]
        self._leave(victim)
        self.kv_cache.keep_preempted(victim, kept)
        if victim.beam is None or not victim.beam.has_reported(victim):
            self.waiting.put_back(victim)

    def _preempt_reported(self) -> bool:
        """Have a request that waits for others of its beam search give way, since nobody can run;
        whether there was any."""
        if not self.beams or not self.waiting or self._in_flight:
            return False
        for request in reversed(self.running):
            if request.beam is not None and request.beam.has_reported(request):
                self._preempt(request)
                return True
        return False

    # --- results --------------------------------------------------------------------------------

    def apply(self, result: StepResult) -> None:
        """Take in what the executor made of the oldest plan in flight; finished requests leave."""
        planned = self._in_flight.take(result.step_id)
        self._give_back(planned.held)
        self.kv_cache.unpublish(planned.suspects)
        self.kv_cache.settle(planned.plan, result)
        self.kv_cache.prove(planned.publications)
        for key, error in result.image_errors:
            self._fail_image(key, error)
        if not planned.requests:
            return
        self._accounts.note(planned, result, self._clock())
        errors: dict[Request, str] = {}
        for row, request, outcome in zip(
            planned.plan.rows, planned.requests, result.rows, strict=True
        ):
            if outcome.error is not None:
                errors[request] = outcome.error
            elif request.state is RequestState.RUNNING:  # else its row is void
                end = request.num_computed_tokens = row.known_end
                if request.stream is not None:
                    request.stream.prove(end)
                self._accounts.charge(request, row)
        if errors:
            self._fail_rows(planned, errors)
        for request, checkpoint in zip(planned.requests, planned.checkpoints):
            if checkpoint is not None and self.kv_cache.states is not None:
                self.kv_cache.states.settle(checkpoint, request.state is RequestState.RUNNING)
        for row, request, outcome in zip(planned.plan.rows, planned.requests, result.rows):
            if request.state is not RequestState.RUNNING:
                continue
            if request.beam is not None:
                if outcome.token_id is not None:
                    request.beam.report(request, outcome.best)
                continue
            reason = self.outputs.take(request, row, outcome)
            has_guesses = row.num_drafts or row.num_ahead or row.branches
            if has_guesses and request.state is RequestState.RUNNING:
                self._take_back(request, row, outcome, is_over=reason is not None)
            self._finish_or_hold(request, reason)
            if request.recompression is not None and request.state is RequestState.RUNNING:
                self._recompress(request)
        self.beams.advance()
        if self.speculation is not None:
            self.speculation.end_step(planned.plan, result)

    def _recompress(self, request: Request) -> None:
        """A request may have so many tokens by now that it is to go on from fewer of them."""
        assert request.recompression is not None
        prefix, num_replaced = request.recompression.of(request.token_ids[:-1], request.compressed)
        if prefix is None or prefix is request.compressed:
            return
        self._leave(request)
        request.state = RequestState.WAITING
        request.begin_with(prefix, num_replaced)
        self.enqueue(request, is_first=True)

    def _take_back(self, request: Request, row: Row, outcome: RowResult, *, is_over: bool) -> None:
        """What a row computed of wrong drafts never was; what the draft model guesses stays for the
        next plan, in the pages that it has."""
        assert self.speculation is not None
        if row.branches:
            right = right_drafts(row, request.token_ids[row.known_end :])
            told = exchanges_by_draws(row, outcome)
            self.kv_cache.exchange(request, exchanges(row, right), told, row.known_end)
        if row.num_drafts or row.branches:
            num_right = request.num_computed_tokens - row.known_end
            follows = request.token_ids[row.known_end :]
            self.speculation.note(request, follows, num_right, is_over)
            if self.kv_cache.states is not None:
                self.kv_cache.states.accept_drafts(request, num_right)
            request.num_scheduled_tokens = request.num_computed_tokens
        if outcome.ahead:
            self.speculation.offer(request, outcome)
        self.kv_cache.trim(request, len(outcome.ahead))

    def _finish_or_hold(self, request: Request, reason: FinishReason | None) -> None:
        if reason is not None:
            self._finish(request, reason)
        elif request.awaits_grammar:
            self.grammars.add(request)
            if self.speculation is not None:
                self.speculation.expect(request)

    def fail(self, error: str) -> None:
        """The oldest plan in flight could not be executed: its requests end, its inserts are
        undone. So are those of plans behind it, whose other requests begin again.

        NOTE: the device must be done with all of them.
        """
        plans = self._in_flight.take_all()
        if self.images is not None:
            self.images.reset()
        first = plans[0]
        errors = {r: error for r in first.requests if r not in first.void}
        for request in self.running[:]:
            self._leave(request, keep=False)  # it may read what the plan was to write
            if request not in errors:
                self._begin_again(request)
        for planned in plans:
            self._give_back(planned.held)
        if self.kv_cache.states is not None:
            for planned in plans:
                written = (*planned.checkpoints, *planned.written)
                self.kv_cache.undo_states(planned.plan.state_loads, written)
            pending = self.kv_cache.states.take_copies()
            self.kv_cache.undo_states(pending.loads, pending.written)
        for planned in plans:
            self.kv_cache.unpublish((*planned.suspects, *planned.publications_of(planned.requests)))
            self.kv_cache.undo_transfers(planned.plan.transfers, planned.unsettled)
        self.kv_cache.undo_transfers(*self.kv_cache.take_transfers())  # they may go on from those
        self._end_failed(errors)

    def _fail_rows(self, planned: InFlightStep, errors: Mapping[Request, str]) -> None:
        """End the requests whose rows have an error, but for those whose rows are void; whoever may
        have gone on from what they published, and is not known to be well, begins again."""
        ended = [request for request in errors if request.state is RequestState.RUNNING]
        for request in ended:
            self._leave(request, keep=False)
        newest = self._in_flight.newest
        bad = [p for plan in (planned, *self._in_flight) for p in plan.publications_of(errors)]
        if bad:
            for request in [r for r in self.running if not self._in_flight.is_proven(r, planned)]:
                self._leave(request, keep=False)
                self._begin_again(request)
            if newest is None:
                self.kv_cache.unpublish(bad)
            else:
                newest.suspects += bad
                self.kv_cache.suspect(bad)
                self._in_flight.close()
        self._end_failed({request: errors[request] for request in ended})

    def _fail_image(self, key: int, error: str) -> None:
        """An image could not be encoded: those who need it end."""
        assert self.images is not None, "nobody asked for images"
        for request in self.images.fail(key):
            if not request.is_finished:
                request.error = f"an image could not be encoded: {error}"
                self._finish(request, FinishReason.ERROR)

    def _begin_again(self, request: Request) -> None:
        if request.beam is not None:
            request.beam.forget(request)
        if request.stream is not None:
            request.stream.begin_again()
        self.waiting.put_back(request)

    def _end_failed(self, errors: Mapping[Request, str]) -> None:
        """NOTE: all pages are settled before the first listener hears of it: it may abort
        others."""
        for request, error in errors.items():
            if not request.is_finished:
                request.error = error
                note_lost(request)
                self._finish(request, FinishReason.ERROR)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        assert request.finish_reason is None, f"request {request.id} ended twice"
        if request.state is RequestState.RUNNING:
            if request.compaction is not None and reason is FinishReason.STOP:
                self.kv_cache.publish_compressed(request)
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.kv_cache.forget_preempted(request)
        self.kv_cache.forget_fetched(request)
        self.beams.end(request)
        self.compressions.forget(request)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.output_share.note(request)
        if self.speculation is not None and request.is_call:
            self.speculation.end(request)
        self.grammars.forget(request)
        self._is_stalled = False
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.finished_s = time.perf_counter()
        if request.is_call:
            self.stats.num_finished += 1
            self.latencies.note(request)
        if request in self._open:  # one of a call that was refused as a whole may never have come
            self._open.remove(request)
            self.shares.leave(request)
            self.deadlines.note_finish(request)
            self.working_set.note_finish(request)
            if request.program is not None and request.is_call:
                request.program.note_used(request.num_prompt_tokens, request.num_output_tokens)
        request.listener.on_finish(request)

    def _leave(self, request: Request, *, keep: bool = True) -> None:
        """Give back pages and table row, once no plan in flight names them."""
        remains = self.kv_cache.detach(request, keep=keep)
        held = Held(remains, self._running.remove(request))
        naming = self._in_flight.leave(request)
        if naming is None:
            self._give_back((held,))
        else:
            naming.held.append(held)

    def _give_back(self, held: Iterable[Held]) -> None:
        for remains, table_row in held:
            if remains is not None:
                self.kv_cache.give_back(remains)
            self._running.free_row(table_row)

    # --- many steps at once ---------------------------------------------------------------------

    def steady_rows(self) -> Sequence[Request]:
        """All that runs, in the order of rows, if until somebody comes or ends each step will
        differ from the one before by one more token of each of them: all decode, and nothing waits
        or is on its way. Else nobody. As at the beginning of any step, leases expire."""
        if self.waiting or self.grammars or self.beams or self._in_flight:
            return ()
        if self.speculation is not None or self.images is not None or self._num_stages > 1:
            return ()
        if not self.kv_cache.is_plain or self.compressions.num_held:
            return ()
        if self.deadlines.next_s is not None or len(self.running) > self._step_tokens:
            return ()
        if not all(map(_decodes_plainly, self.running)):
            return ()
        self.kv_cache.leases.expire(self._clock())
        return [self.running[index] for index in self._tree_order.depth_first(self.running)]

    def repeat(
        self,
        rows: Sequence[Request],
        token_ids: Sequence[array[int]],
        steps: Sequence[tuple[float, float]],
        ended: Iterable[Request] = (),
    ) -> None:
        """As if `steady_rows` had been planned and applied so often from then on, each step with
        its duration and the time of its end, and each row with the next one of its tokens: for who
        simulates a device. There are free pages for all of it, and no listener is told of tokens.
        `ended`: of the rows, those whose outputs the last step has ended, by now."""
        num_steps = len(steps)
        starts = [request.num_scheduled_tokens for request in rows]
        segments = self._tree_order.segments(starts, self.segment_cost_tokens)
        for request, tokens in zip(rows, token_ids, strict=True):
            request.num_computed_tokens += num_steps
            request.num_scheduled_tokens += num_steps
            request.token_ids.extend(tokens)
        self.kv_cache.reserve_free(rows)
        has_levels = self.waiting.policy.has_working_set
        num_saved = sum(each.num_saved_tokens for each in segments)
        self._accounts.repeat(rows, steps, num_saved, self._order_running if has_levels else None)
        self._step_id += num_steps
        self._is_stalled = False
        for request in ended:
            self._finish(request, FinishReason.STOP)
        self.kv_cache.leases.expire(steps[-1][1])

    # --- for beam searches, and for compressed prefixes -----------------------------------------

    def enqueue(self, request: Request, *, is_first: bool) -> None:
        if self.compressions.must_wait(request):
            return
        if is_first:
            self.waiting.put_back(request)
        else:
            self.waiting.add(request)
        self._is_stalled = False

    def join(self, request: Request) -> None:
        if request.compaction is not None and not request.is_admitted:
            self.deadlines.add(request)  # others wait for its tokens
        self._open.add(request)
        self.shares.enter(request)

    def queue_first(self, request: Request) -> None:
        self.waiting.put_back(request)
        self._is_stalled = False

    def vacate(self, request: Request, *, keep: bool) -> None:
        if request.state is RequestState.RUNNING:
            self._leave(request, keep=keep)
        self.kv_cache.forget_preempted(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        self._finish(request, reason)

    # --- checks ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises when pages, locks or table rows do not add up (tests call it after each step)."""
        held = self._in_flight.held
        self.kv_cache.check(self.running, [left.remains for left in held if left.remains])
        self._in_flight.check(self.running)
        self._running.check([left.table_row for left in held])


def _decodes_plainly(request: Request) -> bool:
    """Whether one more token is all that a step changes of a running request."""
    return (
        request.num_ready == 1
        and request.num_output_tokens > 0
        and request.grammar is None
        and request.beam is None
        and request.stream is None
        and request.compaction is None
        and request.recompression is None
        and not request.begun
        and not request.is_ahead
    )
