"""Several engines behind a placement policy: real schedulers and trees over modelled devices.

Time is simulated; each engine makes its steps beside the others. A policy places whole programs,
or, as routers that do not know them must, each call by itself. What replicas have cached is what
their trees have and what is on its way there, or all that was sent to them. With roles, some of the
engines compute long prompts for the others, where those find that it pays (simulated_streams.py).
"""

from __future__ import annotations

import itertools
import random
import time
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from math import inf
from typing import Protocol

from ..cluster.placement.load import AllHabits, ProgramLoad, ReplicaLoad
from ..cluster.placement.moves import better_home
from ..cluster.placement.policies import Newcomer, Policy
from ..radix.fleet import FleetTree
from ..radix.leases import Lease
from ..runtime.engine import Engine
from ..runtime.schedule.cache.coming_prefixes import ComingPrefixes
from ..runtime.schedule.cache.kv_cache import KVCacheOptions
from ..runtime.schedule.plan import FinishedStep, Row, RowResult, StepPlan, StepResult, StreamedKV
from ..runtime.schedule.program_record import ProgramRecord
from ..runtime.schedule.queue.prompt_limits import DEFAULT_SLOWDOWN
from ..runtime.schedule.request import FinishReason, Request
from ..runtime.schedule.sampling_params import SamplingParams
from .simulation import LEASE_TTL_S
from .traces import Call, Job, Start

_TOKEN_BYTES = 4
REBALANCE_S = 1.0


class FleetDevice(Protocol):
    """What each engine computes on."""

    @property
    def num_tokens(self) -> int:
        """Of KV."""

    @property
    def max_running_requests(self) -> int:
        """In a batch."""

    @property
    def prefill_token_ms(self) -> float:
        """About what a prompt's token takes."""

    def step_s(self, plan: StepPlan) -> float:
        """How long a step takes."""


class Streams(Protocol):
    """Prompts that some of the engines, the last ones, compute for the others."""

    num_prefill: int

    def join(self, fleet: FleetSimulation) -> None:
        """They are of this fleet, whose replicas are made next."""

    def coming(self, number: int) -> ComingPrefixes | None:
        """What is computed for a replica elsewhere; None: it computes for others."""

    def send(self, number: int, streams: Sequence[StreamedKV], duration_s: float) -> None:
        """A replica begins a step whose layers are sent as they are computed."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """How the engines cut prompts, as the flags of an engine say it."""

    token_budget: int = 2048  # --chunked-prefill-size
    decode_slowdown: float = DEFAULT_SLOWDOWN

    def flags(self) -> list[str]:
        """Those that are not as they are by default."""
        flags = []
        if self.token_budget != DEFAULT_CHUNKING.token_budget:
            flags.append(f"--chunked-prefill-size {self.token_budget}")
        if self.decode_slowdown != DEFAULT_CHUNKING.decode_slowdown:
            flags.append(f"--decode-slowdown {self.decode_slowdown:g}")
        return flags


DEFAULT_CHUNKING = Chunking()


@dataclass(frozen=True, slots=True)
class CallTimes:
    """When a call was sent, had its first token, and its last. Seconds."""

    asked_s: float
    first_s: float
    ended_s: float
    num_tokens: int  # generated

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.asked_s

    @property
    def tpot_s(self) -> float:
        """Seconds a token after the first; 0 for a single one."""
        return (self.ended_s - self.first_s) / max(1, self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router places: `policy` makes one; per program or per call; by what engines say that
    they have cached, or by what was sent to them."""

    policy: Callable[[], Policy]
    by_call: bool = False
    knows_caches: bool = True
    moves: bool = False  # programs that wait for no call, from replicas with too much to do


@dataclass(eq=False, slots=True)
class _Call:
    """A call's listener."""

    call: Call
    job: _Job
    output: array[int]
    engine: SimulatedReplica
    load: ProgramLoad
    is_placed: bool  # by itself; else its program was
    asked_s: float
    first_s: float = 0.0
    num_tokens: int = 0

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        if not self.num_tokens:
            self.first_s = self.engine.fleet.now_s
            self.engine.fleet.note_arrival(self)
        self.num_tokens += 1
        return FinishReason.STOP if self.num_tokens == len(self.output) else None

    def on_finish(self, request: Request) -> None:
        self.engine.fleet.note_finish(self, request)


@dataclass(eq=False, slots=True)
class _Job:
    """A program, and the calls that it waits for."""

    job: Job
    started_s: float
    load: ProgramLoad
    kind: str = ""
    program: ProgramRecord = field(default_factory=ProgramRecord)
    replica: SimulatedReplica | None = None
    outputs: list[array[int]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    num_open: int = 0
    num_submitted: int = 0  # of these
    leases: list[tuple[SimulatedReplica, Lease]] = field(default_factory=list)
    ended_s: float = 0.0


class SimulatedReplica:
    """An engine over a modelled device; a `Candidate` of policies."""

    can_overlap = False
    segment_cost_tokens = 32

    def __init__(
        self, fleet: FleetSimulation, number: int, device: FleetDevice, chunking: Chunking
    ) -> None:
        self.fleet = fleet
        self.number = number
        self.load = ReplicaLoad()
        self.is_busy = False
        self.calls: dict[int, _Call] = {}
        self.busy_s = 0.0
        self._device = device
        self._duration_s = 0.0
        coming = None if fleet.streams is None else fleet.streams.coming(number)
        self.engine = Engine(
            self,
            num_pages=device.num_tokens,
            page_size=1,
            max_model_len=device.num_tokens,
            token_budget=chunking.token_budget,
            max_running_requests=device.max_running_requests,
            decode_slowdown=chunking.decode_slowdown,
            kv_cache=KVCacheOptions(coming=coming),
            clock=lambda: fleet.now_s,
        )

    def submit(self, plan: StepPlan) -> FinishedStep:
        """The modelled device."""
        self._duration_s = self._device.step_s(plan)
        self.busy_s += self._duration_s
        if plan.streams and self.fleet.streams is not None:
            self.fleet.streams.send(self.number, plan.streams, self._duration_s)
        results = tuple([self._answer(row) for row in plan.rows])
        return FinishedStep(StepResult(plan.step_id, results, self._duration_s))

    def _answer(self, row: Row) -> RowResult:
        if row.sampling is None:
            return RowResult()
        call = self.calls[row.request_id]
        return RowResult(token_id=call.output[min(call.num_tokens, len(call.output) - 1)])

    def begin_step(self) -> None:
        """Make the next step, if there is one."""
        if self.is_busy:
            return
        plan = self.engine.scheduler.plan()
        if plan is None:
            wake_s = self.engine.next_wake_s
            if wake_s is not None:
                self.fleet.at(max(wake_s, self.fleet.now_s + 1e-6), self.begin_step)
            return
        self.is_busy = True
        result = self.submit(plan).result()
        self.fleet.at(self.fleet.now_s + self._duration_s, partial(self._end_step, result))

    def _end_step(self, result: StepResult) -> None:
        self.is_busy = False
        self.engine.scheduler.apply(result)
        self.begin_step()

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
        return self._device.num_tokens - self.load.held_tokens

    @property
    def prompt_token_s(self) -> float:
        return self._device.prefill_token_ms / 1000


class FleetSimulation:
    """One run of a trace over `num_replicas` engines."""

    def __init__(
        self,
        device: FleetDevice,
        num_replicas: int,
        routing: Routing,
        *,
        seed: int = 0,
        joins_s: float = 0.0,
        chunking: Chunking = DEFAULT_CHUNKING,
        streams: Streams | None = None,
    ) -> None:
        """`joins_s`: when the last replica begins to take programs. `streams`: of replicas that
        take no programs."""
        self.now_s = 0.0
        self.router_s = 0.0  # CPU seconds of placing
        self.num_placed = 0
        self.num_calls = 0
        self.num_moved = 0
        self.jobs: list[_Job] = []
        self.asked_s: list[float] = []  # of all calls
        self.times: list[CallTimes] = []  # of those that have ended
        self.streams = streams
        if streams is not None:
            streams.join(self)
        self.replicas = [SimulatedReplica(self, n, device, chunking) for n in range(num_replicas)]
        self._num_homes = num_replicas - (0 if streams is None else streams.num_prefill)
        self._routing = routing
        self._policy = routing.policy()
        self._joins_s = joins_s
        self._sent = FleetTree[int]()
        self._on_the_way = FleetTree[int]()  # placed, and nothing of it computed yet
        self._habits = AllHabits()
        self._rng = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._num_open = 0
        self._counted_s = inf
        self._num_awaited = 0  # calls that were sent before, and have not ended

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        """Have something happen then."""
        heappush(self._events, (time_s, next(self._numbers), event))

    def run(self, starts: Sequence[Start], until_s: float = inf, *, counted_s: float = inf) -> None:
        """Run a trace to its end, or until then, or until all calls that were sent before
        `counted_s` have ended."""
        self._counted_s = counted_s
        for start in starts:
            self.at(start.at_s, partial(self._start, start))
        self._num_open = len(starts)
        if self._routing.moves:
            self.at(REBALANCE_S, self._rebalance)
        while self._events and self._num_open and self.now_s < until_s:
            if self.now_s >= counted_s and not self._num_awaited:
                break
            self.now_s, _, event = heappop(self._events)
            event()

    @property
    def _present(self) -> list[SimulatedReplica]:
        homes = self.replicas[: self._num_homes]
        return homes if self.now_s >= self._joins_s else homes[:-1]

    def _rebalance(self) -> None:
        for job in self.jobs:
            here = job.replica
            if here is None or job.num_submitted or job.ended_s:
                continue
            others = [each for each in self._present if each is not here]
            there = better_home(job.load, here, others)
            if there is not None:
                self._release(job)
                here.engine.end_program(job.program)
                job.replica, job.program = there, ProgramRecord(created_s=job.program.created_s)
                job.load.enter(there.load, job.load.held_tokens)
                self.num_moved += 1
        self.at(self.now_s + REBALANCE_S, self._rebalance)

    # --- jobs -----------------------------------------------------------------------------------

    def _start(self, start: Start) -> None:
        job = _Job(start.job, self.now_s, ProgramLoad(self._habits.of(""), self._clock))
        job.program.created_s = self.now_s
        self.jobs.append(job)
        self._advance(job)

    def _clock(self) -> float:
        return self.now_s

    def _advance(self, job: _Job) -> None:
        try:
            calls = job.job.send(job.outputs) if job.outputs else next(job.job)
        except StopIteration:
            job.ended_s = self.now_s
            job.load.end()
            self._release(job)
            if job.replica is not None:
                job.replica.engine.end_program(job.program)
            self._num_open -= 1
            return
        if not job.kind:
            job.kind = calls[0].client
            job.load.habits = self._habits.of(job.kind)
        job.outputs = [array("i")] * len(calls)
        job.calls, job.num_open = list(calls), len(calls)
        if job.replica is not None:
            self._lease(job)
        for index, call in enumerate(calls):
            self.at(self.now_s + call.delay_s, partial(self._submit, job, index))

    def _lease(self, job: _Job) -> None:
        """As an engine leases what its programs will need."""
        before, job.leases = job.leases, []
        replica = job.replica
        assert replica is not None
        for call in job.calls:
            kv_cache = replica.engine.scheduler.kv_cache
            lease = kv_cache.retain("", call.prompt, due_s=call.delay_s, ttl_s=LEASE_TTL_S)
            if lease is not None:
                job.leases.append((replica, lease))
        for owner, lease in before:
            owner.engine.scheduler.kv_cache.release_lease(lease)

    def _release(self, job: _Job) -> None:
        for replica, lease in job.leases:
            replica.engine.scheduler.kv_cache.release_lease(lease)
        job.leases = []

    def _submit(self, job: _Job, index: int) -> None:
        call = job.calls[index]
        load = job.load
        is_placed = self._routing.by_call or job.replica is None
        if self._routing.by_call:
            load = ProgramLoad(self._habits.of(job.kind), self._clock)
            load.max_tokens = call.max_tokens
            replica = self._placed(call, load)
        else:
            if job.replica is None:
                load.max_tokens = call.max_tokens
                job.replica = self._placed(call, load)
            replica = job.replica
        load.begin_call(call.max_tokens)
        job.num_submitted += 1
        self.num_calls += 1
        self.asked_s.append(self.now_s)
        self._num_awaited += self.now_s < self._counted_s
        output = array("i", self._rng.randbytes(_TOKEN_BYTES * call.num_output))
        record = _Call(call, job, output, replica, load, is_placed, self.now_s)
        request = Request(
            id=replica.engine.next_request_id(),
            prompt=call.prompt,
            sampling=SamplingParams(max_tokens=call.max_tokens),
            listener=record,
            client=call.client,
            program=None if self._routing.by_call else job.program,
            num_calls_after=max(0, call.num_calls_left - 1),
        )
        replica.calls[request.id] = record
        replica.engine.submit(request)
        job.outputs[index] = output
        replica.begin_step()

    def note_arrival(self, record: _Call) -> None:
        """A call has its first token: its prompt is in its replica's tree."""
        if record.is_placed:
            text = record.call.prompt.tobytes()
            self._on_the_way.uncover("", text, record.engine.number)

    def note_finish(self, record: _Call, request: Request) -> None:
        """A call has ended; after the last of its siblings its job goes on."""
        self.times.append(
            CallTimes(record.asked_s, record.first_s, self.now_s, request.num_output_tokens)
        )
        self._num_awaited -= record.asked_s < self._counted_s
        record.load.end_call(request.num_prompt_tokens, request.num_output_tokens)
        if self._routing.by_call:
            record.load.end()
        job = record.job
        job.num_open -= 1
        job.num_submitted -= 1
        if not job.num_open:
            self._advance(job)

    def _placed(self, call: Call, load: ProgramLoad) -> SimulatedReplica:
        """The policy's choice for a program's first call, or for any."""
        started = time.thread_time()
        text = call.prompt.tobytes()
        sent, on_the_way = self._sent.match("", text), self._on_the_way.match("", text)
        self.router_s += time.thread_time() - started
        cached = sent
        if self._routing.knows_caches:
            trees = {r.number: r.engine.scheduler.kv_cache.tree for r in self.replicas}
            there = {n: float(tree.match_length("", call.prompt)) for n, tree in trees.items()}
            for number, count in on_the_way.items():
                there[number] = max(count, there[number])
            cached = {number: count for number, count in there.items() if count}
        started = time.thread_time()
        newcomer = Newcomer(
            float(len(call.prompt)),
            cached,
            None,
            text,
            load.output_tokens * load.habits.num_calls,
        )
        replica = self._policy(newcomer, self._present)
        assert isinstance(replica, SimulatedReplica)
        self._sent.insert("", text, replica.number, len(call.prompt))
        self._on_the_way.cover("", text, replica.number, len(call.prompt))
        load.enter(replica.load, len(call.prompt) - cached.get(replica.number, 0.0))
        self.router_s += time.thread_time() - started
        self.num_placed += 1
        return replica

    # --- figures --------------------------------------------------------------------------------

    @property
    def hit_rate(self) -> float:
        """Of all prompts' tokens, over all replicas."""
        stats = [replica.engine.scheduler.stats for replica in self.replicas]
        prompt = sum(each.num_prompt_tokens for each in stats)
        return sum(each.num_cached_tokens for each in stats) / max(1, prompt)
