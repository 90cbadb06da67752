"""A replica of a simulated fleet: the real engine over a modelled device, on the fleet's clock."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Protocol, cast

from ..cluster.placement.load import ProgramLoad, ReplicaLoad
from ..radix.tree import RadixTree
from ..runtime.engine import Engine
from ..runtime.memory.copies import Transfer
from ..runtime.schedule.cache.coming_prefixes import ComingPrefixes
from ..runtime.schedule.cache.kv_cache import KVCacheOptions
from ..runtime.schedule.plan import FinishedStep, Row, RowResult, StepPlan, StepResult
from ..runtime.schedule.request import FinishReason, Request
from ..runtime.speculate.drafter import Subject
from .simulated_engine import SimulatedEngine
from .traces import Call

_MAX_ALIKE = 8  # steps at once: somebody mostly comes, or ends, before so many
_SOON_S = 1e-6  # a wake that is due already is not an endless loop


class ReplicaState(Enum):
    """Where a replica is between its start and its end."""

    ABSENT = "absent"
    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"  # it gets nothing new, and ends once it has nothing


class SimulatedCall:
    """A call's listener, over all engines that it runs on. Invariant: `num_tokens` of `output` have
    been generated, whatever became of the engines."""

    __slots__ = (
        "asked_s", "call", "first_s", "is_placed", "job", "load", "num_tokens", "output", "replica",
        "request",
    )  # fmt: skip

    def __init__(
        self, call: Call, job: object, output: array[int], load: ProgramLoad, asked_s: float
    ) -> None:
        """`job`: the fleet's own record of who waits for it; `output`: what it will generate."""
        self.call = call
        self.job = job
        self.output = output
        self.load = load
        self.asked_s = asked_s
        self.first_s = 0.0
        self.num_tokens = 0
        # With it its replica was chosen, where nothing of its prompt has been computed yet.
        self.is_placed = False
        self.replica: SimulatedReplica | None = None
        self.request: Request | None = None

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        """One more token of the output is there."""
        assert self.replica is not None and request is self.request, "it runs elsewhere"
        if not self.num_tokens:
            self.first_s = self.replica.fleet.now_s
        self.num_tokens += 1
        if self.is_placed:
            self.is_placed = False
            self.replica.fleet.note_arrival(self)
        return FinishReason.STOP if self.num_tokens == len(self.output) else None

    def on_finish(self, request: Request) -> None:
        """It has ended."""
        assert self.replica is not None
        assert request.error is None, request.error
        del self.replica.calls[request.id]
        self.replica.fleet.note_finish(self)


@dataclass(frozen=True, slots=True, eq=False)
class _AlikeSteps:
    """Steps of the same rows, each with its duration and the time of its end; the first has begun.
    Invariant: until the last one's end nothing happens in the engine but these, unless somebody
    calls it. No output ends before the last step."""

    rows: Sequence[Request]
    calls: Sequence[SimulatedCall]
    steps: Sequence[tuple[float, float]]


class ReplicaFleet(Protocol):
    """What a replica needs of its fleet."""

    now_s: float

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        """Have something happen then."""

    def coming(self, number: int) -> ComingPrefixes | None:
        """Where other replicas compute prompts for this one."""

    def note_step(self, replica: SimulatedReplica, plan: StepPlan, duration_s: float) -> None:
        """A replica begins a step."""

    def note_arrival(self, call: SimulatedCall) -> None:
        """The prompt of a call is in its replica's tree."""

    def note_finish(self, call: SimulatedCall) -> None:
        """A call has all its tokens."""


class SimulatedReplica:
    """An engine that may end and begin anew; a `Candidate` of policies."""

    can_overlap = False
    segment_cost_tokens = 32

    def __init__(self, fleet: ReplicaFleet, number: int, spec: SimulatedEngine) -> None:
        self.fleet = fleet
        self.number = number
        self.spec = spec
        self.state = ReplicaState.READY
        self.prompt_token_s = spec.device.prefill_token_ms / 1000
        self._slowdown = 1.0  # of its steps: a straggler's is above 1
        self._busy_s = 0.0
        self._alike: _AlikeSteps | None = None  # its next steps
        self.num_prompt_tokens = self.num_cached_tokens = 0  # of engines that have ended
        self.present_s = 0.0  # until `_since_s`; what is paid for
        self._since_s: float | None = 0.0
        self._begin()

    def _begin(self) -> None:
        """A new engine, with nothing in it."""
        device = self.spec.device
        self.load = ReplicaLoad()
        self.calls: dict[int, SimulatedCall] = {}
        self.is_busy = False
        self._duration_s = 0.0
        self._alike = None
        coming = self.fleet.coming(self.number)
        self._engine = Engine(
            self,
            num_pages=device.num_tokens,
            page_size=1,
            max_model_len=device.num_tokens,
            token_budget=self.spec.chunking.token_budget,
            max_running_requests=device.max_running_requests,
            decode_slowdown=self.spec.chunking.decode_slowdown,
            kv_cache=KVCacheOptions(
                has_leases=self.spec.has_leases,
                num_host_pages=self.spec.host_tokens,
                coming=coming,
            ),
            drafting=self.spec.drafting(_output_of, self.number),
            clock=lambda: self.fleet.now_s,
        )

    # --- coming and going -----------------------------------------------------------------------

    def end(self) -> list[SimulatedCall]:
        """Its engine is gone, with its KV; returns the calls that had not ended."""
        self._settle()
        lost = list(self.calls.values())
        self.num_prompt_tokens, self.num_cached_tokens = self.prompt_tokens, self.cached_tokens
        self.state = ReplicaState.ABSENT
        self._count_presence()
        self._since_s = None
        self._begin()
        return lost

    def start(self, ready_s: float, then: Callable[[], None]) -> None:
        """It is there again from `ready_s` on; it is paid for from now on."""
        assert self.state is ReplicaState.ABSENT, "it is there"
        self.state, self._since_s = ReplicaState.STARTING, self.fleet.now_s

        def be_ready() -> None:
            if self.state is ReplicaState.STARTING:  # else it has failed, or is not wanted any more
                self.state = ReplicaState.READY
                then()

        self.fleet.at(ready_s, be_ready)

    def slow_down(self, factor: float) -> None:
        """Its steps take so many times as long from the next one on."""
        self._settle()
        self._slowdown = factor

    def _count_presence(self) -> None:
        if self._since_s is not None:
            self.present_s += self.fleet.now_s - self._since_s
            self._since_s = self.fleet.now_s

    @property
    def paid_s(self) -> float:
        """Seconds that it was there, or starting."""
        self._count_presence()
        return self.present_s

    # --- its engine -----------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """As it is now, with a step on its way at most: for all that may change it."""
        self._settle()
        return self._engine

    @property
    def tree(self) -> RadixTree:
        """What it has cached. Nothing enters or leaves with steps that are alike."""
        return self._engine.scheduler.kv_cache.tree

    @property
    def busy_s(self) -> float:
        """Of all steps that have begun."""
        self._settle()
        return self._busy_s

    # --- steps ----------------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> FinishedStep:
        """The modelled device."""
        moved = [len(t.device_pages) for t in plan.transfers if isinstance(t, Transfer)]
        copy_s = self.spec.device.copy_s(sum(moved)) if moved else None
        step_s = self.spec.device.step_s(plan) * self._slowdown
        self._duration_s = step_s + (copy_s or 0.0)
        self._busy_s += self._duration_s
        self.fleet.note_step(self, plan, self._duration_s)
        results = tuple([self._answer(row) for row in plan.rows])
        return FinishedStep(StepResult(plan.step_id, results, step_s, copy_s))

    def _answer(self, row: Row) -> RowResult:
        if row.sampling is None:
            return RowResult()
        call = self.calls[row.request_id]
        first, last = call.num_tokens, len(call.output) - 1
        drawn = RowResult(token_id=call.output[min(first, last)])
        if len(row.sampled_at) < 2:
            return drawn
        places = range(first + 1, first + len(row.sampled_at))
        later = tuple([RowResult(token_id=call.output[min(each, last)]) for each in places])
        return RowResult(token_id=drawn.token_id, later=later)

    def begin_step(self) -> None:
        """Make the next step, if there is one, or the next steps, if they are alike."""
        if not self.is_busy and not self._begin_alike():
            self._begin_step()

    def _begin_step(self) -> None:
        plan = self._engine.scheduler.plan()
        if plan is None:
            wake_s = self._engine.next_wake_s
            if wake_s is not None:
                self.fleet.at(max(wake_s, self.fleet.now_s + _SOON_S), self.begin_step)
            return
        self.is_busy = True
        result = self.submit(plan).result()
        ended_s = self.fleet.now_s + self._duration_s
        self.fleet.at(ended_s, partial(self._end_step, self._engine, result))

    def _end_step(self, engine: Engine, result: StepResult) -> None:
        if engine is not self._engine:
            return  # it has ended meanwhile
        self.is_busy = False
        engine.scheduler.apply(result)
        self.begin_step()

    # --- steps that are alike -------------------------------------------------------------------

    def _begin_alike(self) -> bool:
        """Whether its next steps are decode steps of the same rows, up to the first that ends an
        output: they are made once somebody looks, or when all of them have ended."""
        scheduler = self._engine.scheduler
        rows = scheduler.steady_rows()
        if not rows:
            return False
        calls = [self.calls[request.id] for request in rows]
        num_steps = min(
            _MAX_ALIKE,
            min([len(call.output) - call.num_tokens for call in calls]),
            scheduler.kv_cache.allocator.num_free // len(rows),
        )
        before = [request.num_scheduled_tokens for request in rows]
        times = self.spec.device.decode_times_s(before, num_steps)
        if not times:
            return False
        now_s, steps = self.fleet.now_s, []
        for step_s in times:
            duration_s = step_s * self._slowdown
            now_s += duration_s
            steps.append((duration_s, now_s))
        self.is_busy = True
        self._busy_s += steps[0][0]
        self._await(_AlikeSteps(rows, calls, steps))
        return True

    def _await(self, alike: _AlikeSteps) -> None:
        self._alike = alike
        self.fleet.at(alike.steps[-1][1], partial(self._end_alike, alike))

    def _end_alike(self, alike: _AlikeSteps) -> None:
        if alike is self._alike:
            self._catch_up()

    def _catch_up(self) -> None:
        """Make those of the steps that have ended. Of the others only the first has begun."""
        alike, self._alike = self._alike, None
        assert alike is not None, "there are none"
        steps, now_s = alike.steps, self.fleet.now_s
        num_ended = sum([ended_s <= now_s for _, ended_s in steps])
        for duration_s, _ in steps[1 : num_ended + 1]:
            self._busy_s += duration_s
        if num_ended < len(steps):
            self._await(_AlikeSteps(alike.rows, alike.calls, steps[num_ended : num_ended + 1]))
        else:
            self.is_busy = False
        if num_ended:
            self._repeat(alike, steps[:num_ended])
        self.begin_step()

    def _repeat(self, alike: _AlikeSteps, steps: Sequence[tuple[float, float]]) -> None:
        token_ids, ended = [], []
        for request, call in zip(alike.rows, alike.calls, strict=True):
            end = call.num_tokens + len(steps)
            token_ids.append(call.output[call.num_tokens : end])
            call.num_tokens = end
            if end == len(call.output):
                ended.append(request)
        self._engine.scheduler.repeat(alike.rows, token_ids, steps, ended)

    def _settle(self) -> None:
        """Have one step on its way at most."""
        if self._alike is not None and len(self._alike.steps) > 1:
            self._catch_up()

    # --- what a router knows of it --------------------------------------------------------------

    @property
    def num_calls(self) -> int:
        return self.load.num_calls

    @property
    def expected_tokens(self) -> float:
        return self.load.expected_tokens

    def expected_before(self, tenant: Hashable, num_tokens: float) -> float:
        return self.load.ahead_of(tenant, num_tokens)

    @property
    def room_tokens(self) -> float:
        return self.spec.device.num_tokens - self.load.held_tokens

    # --- figures --------------------------------------------------------------------------------

    @property
    def prompt_tokens(self) -> int:
        """Of all its calls."""
        return self.num_prompt_tokens + self._engine.scheduler.stats.num_prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Of these, those whose KV was there."""
        return self.num_cached_tokens + self._engine.scheduler.stats.num_cached_tokens


def _output_of(subject: Subject) -> array[int]:
    """What a request will generate: all of its call's output that is not in its prompt already."""
    request = cast(Request, subject)
    call = cast(SimulatedCall, request.listener)
    return call.output[request.num_prompt_tokens - len(call.call.prompt) :]
