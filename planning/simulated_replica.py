"""A replica of a simulated fleet: the real engine over a modelled device, on the fleet's clock."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from enum import Enum
from functools import partial
from typing import Protocol, cast

from ..cluster.placement.load import ProgramLoad, ReplicaLoad
from ..runtime.engine import Engine
from ..runtime.memory.copies import Transfer
from ..runtime.schedule.cache.coming_prefixes import ComingPrefixes
from ..runtime.schedule.cache.kv_cache import KVCacheOptions
from ..runtime.schedule.plan import FinishedStep, Row, RowResult, StepPlan, StepResult
from ..runtime.schedule.request import FinishReason, Request
from ..runtime.speculate.drafter import Subject
from .simulated_engine import SimulatedEngine
from .traces import Call

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
        self.slowdown = 1.0  # of its steps: a straggler's is above 1
        self.busy_s = 0.0
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
        coming = self.fleet.coming(self.number)
        fleet = self.fleet
        self.engine = Engine(
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
            clock=lambda: fleet.now_s,
        )

    # --- coming and going -----------------------------------------------------------------------

    def end(self) -> list[SimulatedCall]:
        """Its engine is gone, with its KV; returns the calls that had not ended."""
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

    def _count_presence(self) -> None:
        if self._since_s is not None:
            self.present_s += self.fleet.now_s - self._since_s
            self._since_s = self.fleet.now_s

    @property
    def paid_s(self) -> float:
        """Seconds that it was there, or starting."""
        self._count_presence()
        return self.present_s

    # --- steps ----------------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> FinishedStep:
        """The modelled device."""
        moved = [len(t.device_pages) for t in plan.transfers if isinstance(t, Transfer)]
        copy_s = self.spec.device.copy_s(sum(moved)) if moved else None
        step_s = self.spec.device.step_s(plan) * self.slowdown
        self._duration_s = step_s + (copy_s or 0.0)
        self.busy_s += self._duration_s
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
        """Make the next step, if there is one."""
        if self.is_busy:
            return
        plan = self.engine.scheduler.plan()
        if plan is None:
            wake_s = self.engine.next_wake_s
            if wake_s is not None:
                self.fleet.at(max(wake_s, self.fleet.now_s + _SOON_S), self.begin_step)
            return
        self.is_busy = True
        result = self.submit(plan).result()
        ended_s = self.fleet.now_s + self._duration_s
        self.fleet.at(ended_s, partial(self._end_step, self.engine, result))

    def _end_step(self, engine: Engine, result: StepResult) -> None:
        if engine is not self.engine:
            return  # it has ended meanwhile
        self.is_busy = False
        self.engine.scheduler.apply(result)
        self.begin_step()

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
        return self.num_prompt_tokens + self.engine.scheduler.stats.num_prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Of these, those whose KV was there."""
        return self.num_cached_tokens + self.engine.scheduler.stats.num_cached_tokens


def _output_of(subject: Subject) -> array[int]:
    """What a request will generate: all of its call's output that is not in its prompt already."""
    request = cast(Request, subject)
    call = cast(SimulatedCall, request.listener)
    return call.output[request.num_prompt_tokens - len(call.call.prompt) :]
