"""Several engines behind a placement policy: real schedulers and trees over modelled devices.

Time is simulated; each engine makes its steps beside the others, and engines need not be alike. A
policy places whole programs, or, as routers that do not know them must, each call by itself. What
replicas have cached is what their trees have and what is on its way there, or all that was sent to
them. With roles, some of the engines compute long prompts for the others, where those find that it
pays (simulated_streams.py). Replicas fail, are slow for a while, come and go (fleet_events.py):
calls that had not ended go on elsewhere behind their last token, as the router has them go on.
"""

from __future__ import annotations

import itertools
import random
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from math import inf
from typing import Protocol

from ..cluster.placement.load import AllHabits, ProgramLoad
from ..cluster.placement.moves import better_home, is_crowded
from ..cluster.placement.policies import Newcomer, Policy
from ..cluster.scaling import FleetLoad, Scaler
from ..errors import InvalidRequest
from ..radix.fleet import FleetTree
from ..radix.leases import Lease
from ..runtime.schedule.cache.coming_prefixes import ComingPrefixes
from ..runtime.schedule.plan import StepPlan, StreamedKV
from ..runtime.schedule.program_record import ProgramRecord
from ..runtime.schedule.request import Request
from ..runtime.schedule.sampling_params import SamplingParams
from .fleet_events import NO_EVENTS, FleetEvents, Outage
from .simulated_engine import SimulatedEngine
from .simulated_replica import ReplicaState, SimulatedCall, SimulatedReplica
from .simulation import LEASE_TTL_S
from .traces import Call, Job, Start

_TOKEN_BYTES = 4
REBALANCE_S = 1.0


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


class FleetSimulation:
    """One run of a trace over engines."""

    def __init__(
        self,
        engines: Sequence[SimulatedEngine],
        routing: Routing,
        *,
        seed: int = 0,
        joins_s: float = 0.0,
        streams: Streams | None = None,
        events: FleetEvents = NO_EVENTS,
    ) -> None:
        """`joins_s`: when the last replica begins to take programs. `streams`: of replicas that
        take no programs, the last ones; with them none fails, comes or goes. Raises InvalidRequest
        where both are asked for."""
        if streams is not None and events != NO_EVENTS:
            allowed = "none beside roles; simulate failures of engines that do both, or roles alone"
            raise InvalidRequest.of("events", events, allowed)
        self.now_s = 0.0
        self.router_s = 0.0  # CPU seconds of placing
        self.num_placed = 0
        self.num_calls = 0
        self.num_moved = 0
        self.num_resumed = 0  # calls that went on elsewhere
        self.jobs: list[_Job] = []
        self.asked_s: list[float] = []  # of all calls
        self.times: list[CallTimes] = []  # of those that have ended
        self.streams = streams
        if streams is not None:
            streams.join(self)
        self.replicas = [SimulatedReplica(self, n, spec) for n, spec in enumerate(engines)]
        self._homes = self.replicas[
            : len(engines) - (0 if streams is None else streams.num_prefill)
        ]
        self._routing = routing
        self._policy = routing.policy()
        self._sent = FleetTree[int]()
        self._on_the_way = FleetTree[int]()  # placed, and nothing of it computed yet
        self._habits = AllHabits()
        self._rng = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._num_open = 0
        self._counted_s = inf
        self._num_awaited = 0  # calls that were sent before, and have not ended
        self._homeless: list[SimulatedCall] = []  # while no replica is ready
        self._scaler: Scaler | None = None
        self._prepare(events, joins_s)

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        """Have something happen then."""
        heappush(self._events, (time_s, next(self._numbers), event))

    def run(self, starts: Sequence[Start], until_s: float = inf, *, counted_s: float = inf) -> None:
        """Run a trace to its end, or until then, or until all calls that were sent before
        `counted_s` have ended."""
        self._counted_s = counted_s
        for start in starts:
            self.at(start.at_s, partial(self._start, start))
        for time_s in (until_s, counted_s):  # the clock stops there, whoever has events when
            if time_s < inf:
                self.at(time_s, _nothing)
        self._num_open = len(starts)
        if self._routing.moves:
            self.at(REBALANCE_S, self._rebalance)
        while self._events and self._num_open and self.now_s < until_s:
            if self.now_s >= counted_s and not self._num_awaited:
                break
            time_s, _, event = heappop(self._events)
            assert time_s >= self.now_s, "time goes backwards"
            self.now_s = time_s
            event()

    # --- who is there ---------------------------------------------------------------------------

    def _prepare(self, events: FleetEvents, joins_s: float) -> None:
        """Have all events come, and those replicas be absent that come later."""
        late = self._homes[-1:] if joins_s else []
        if events.scaling is not None:
            self._scaler = events.scaling.scaler(lambda: self.now_s)
            self._scaling = events.scaling
            late = self._homes[events.scaling.least :]
            self.at(REBALANCE_S, self._scale)
        for replica in late:
            replica.end()
        if joins_s:
            self.at(joins_s, partial(self._hire, late[0], 0.0))
        for outage in events.outages:
            self.at(outage.at_s, partial(self._fail, outage))
        for slow in events.slowdowns:
            replica = self.replicas[slow.replica]
            self.at(slow.at_s, partial(replica.slow_down, slow.factor))
            self.at(slow.until_s, partial(replica.slow_down, 1.0))
        self._note_presence()

    def _note_presence(self) -> None:
        """Who takes programs: those that are ready, else those that leave."""
        ready = [each for each in self._homes if each.state is ReplicaState.READY]
        leaving = [each for each in self._homes if each.state is ReplicaState.LEAVING]
        self._present = ready or leaving
        if self._present:
            homeless, self._homeless = self._homeless, []
            for call in homeless:
                self._send(call)

    def _hire(self, replica: SimulatedReplica, start_s: float) -> None:
        if replica.state is ReplicaState.ABSENT:
            replica.start(self.now_s + start_s, self._note_presence)

    def _fail(self, outage: Outage) -> None:
        replica = self.replicas[outage.replica]
        if replica.state is ReplicaState.ABSENT:
            return  # it is not there to fail
        self._lose(replica)
        self.at(outage.until_s, partial(self._hire, replica, 0.0))

    def _lose(self, replica: SimulatedReplica) -> None:
        """It ends, with all that it has; what it had to do goes on elsewhere."""
        calls = replica.end()
        for job in self.jobs:
            if job.replica is replica:
                job.load.leave()
                job.leases, job.replica = [], None
                job.program = ProgramRecord(created_s=job.program.created_s)
        self._sent.forget(replica.number)
        self._on_the_way.forget(replica.number)
        self._note_presence()
        self.num_resumed += len(calls)
        for call in calls:
            call.load.leave()
            self._send(call)

    def _scale(self) -> None:
        """As cluster/membership.py does once a second."""
        assert self._scaler is not None
        there = [each for each in self._homes if each.state is not ReplicaState.ABSENT]
        staying = [each for each in there if each.state is not ReplicaState.LEAVING]
        load = FleetLoad(
            len(self._homeless) + sum(each.num_calls for each in there),
            sum(each.load.held_tokens for each in there),
            self._scaling.target_calls,
            max(each.spec.device.num_tokens for each in self._homes),
        )
        num_wanted = self._scaler.decide(len(staying), load)
        absent = [each for each in self._homes if each.state is ReplicaState.ABSENT]
        for replica in absent[: max(0, num_wanted - len(staying))]:
            self._hire(replica, self._scaling.start_s)
        ready = [each for each in staying if each.state is ReplicaState.READY]
        ready.sort(key=lambda each: (each.load.held_tokens, each.expected_tokens, -each.number))
        for replica in ready[: max(0, len(staying) - num_wanted)]:
            replica.state = ReplicaState.LEAVING
        self._note_presence()
        for replica in there:
            if replica.state is ReplicaState.LEAVING and not replica.calls:
                self._lose(replica)
        self.at(self.now_s + REBALANCE_S, self._scale)

    def _rebalance(self) -> None:
        for job in self.jobs:
            here = job.replica
            if here is None or job.num_submitted or job.ended_s:
                continue
            others = [each for each in self._present if each is not here]
            there = better_home(job.load, here, others) if is_crowded(here, others) else None
            if there is not None:
                self._release(job)
                here.engine.end_program(job.program)
                job.replica, job.program = there, ProgramRecord(created_s=job.program.created_s)
                job.load.enter(there.load, job.load.held_tokens)
                self.num_moved += 1
        self.at(self.now_s + REBALANCE_S, self._rebalance)

    # --- what replicas say ----------------------------------------------------------------------

    def coming(self, number: int) -> ComingPrefixes | None:
        """See ReplicaFleet, as of all below."""
        return None if self.streams is None else self.streams.coming(number)

    def note_step(self, replica: SimulatedReplica, plan: StepPlan, duration_s: float) -> None:
        if plan.streams and self.streams is not None:
            self.streams.send(replica.number, plan.streams, duration_s)

    def note_arrival(self, call: SimulatedCall) -> None:
        assert call.replica is not None and call.request is not None
        self._on_the_way.uncover("", call.request.prompt.tobytes(), call.replica.number)

    def note_finish(self, call: SimulatedCall) -> None:
        """After the last of its siblings a call's job goes on."""
        times = CallTimes(call.asked_s, call.first_s, self.now_s, call.num_tokens)
        self.times.append(times)
        self._num_awaited -= call.asked_s < self._counted_s
        call.load.end_call(len(call.call.prompt), call.num_tokens)
        if self._routing.by_call:
            call.load.end()
        job = call.job
        assert isinstance(job, _Job)
        job.num_open -= 1
        job.num_submitted -= 1
        if not job.num_open:
            self._advance(job)

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
                job.replica = None
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
        """A call's time has come."""
        call, load = job.calls[index], job.load
        if self._routing.by_call:
            load = ProgramLoad(self._habits.of(job.kind), self._clock)
        job.num_submitted += 1
        self.num_calls += 1
        self.asked_s.append(self.now_s)
        self._num_awaited += self.now_s < self._counted_s
        output = array("i", self._rng.randbytes(_TOKEN_BYTES * call.num_output))
        job.outputs[index] = output
        self._send(SimulatedCall(call, job, output, load, self.now_s))

    def _send(self, call: SimulatedCall) -> None:
        """To its program's replica, or where the policy says: at first, or behind what it has
        generated before its replica was lost."""
        job = call.job
        assert isinstance(job, _Job)
        if not self._present:
            self._homeless.append(call)
            return
        max_tokens = call.call.max_tokens - call.num_tokens
        prompt = call.call.prompt
        if call.num_tokens:
            prompt = prompt + call.output[: call.num_tokens]
        call.is_placed = self._routing.by_call or job.replica is None
        if call.is_placed:
            call.load.max_tokens = max_tokens
            call.replica = self._placed(prompt, call.load)
            if not self._routing.by_call:
                job.replica = call.replica
        else:
            call.replica = job.replica
        replica = call.replica
        assert replica is not None
        call.load.begin_call(max_tokens)
        request = call.request = Request(
            id=replica.engine.next_request_id(),
            prompt=prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            listener=call,
            client=call.call.client,
            program=None if self._routing.by_call else job.program,
            num_calls_after=max(0, call.call.num_calls_left - 1),
        )
        replica.calls[request.id] = call
        replica.engine.submit(request)
        replica.begin_step()

    def _placed(self, prompt: array[int], load: ProgramLoad) -> SimulatedReplica:
        """The policy's choice for a program's first call, or for any."""
        started = time.thread_time()
        text = prompt.tobytes()
        sent, on_the_way = self._sent.match("", text), self._on_the_way.match("", text)
        self.router_s += time.thread_time() - started
        cached = sent
        if self._routing.knows_caches:
            there = {r.number: float(r.tree.packed_match_length("", text)) for r in self._present}
            for number, count in on_the_way.items():
                there[number] = max(count, there.get(number, 0.0))
            cached = {number: count for number, count in there.items() if count}
        started = time.thread_time()
        newcomer = Newcomer(
            float(len(prompt)),
            cached,
            None,
            text,
            load.output_tokens * load.habits.num_calls,
        )
        replica = self._policy(newcomer, self._present)
        assert isinstance(replica, SimulatedReplica)
        self._sent.insert("", text, replica.number, len(prompt))
        self._on_the_way.cover("", text, replica.number, len(prompt))
        load.enter(replica.load, len(prompt) - cached.get(replica.number, 0.0))
        self.router_s += time.thread_time() - started
        self.num_placed += 1
        return replica

    # --- figures --------------------------------------------------------------------------------

    @property
    def hit_rate(self) -> float:
        """Of all prompts' tokens, over all replicas."""
        prompt = sum(each.prompt_tokens for each in self.replicas)
        return sum(each.cached_tokens for each in self.replicas) / max(1, prompt)

    @property
    def num_output_tokens(self) -> int:
        """Of the calls that have ended."""
        return sum(each.num_tokens for each in self.times)


def _nothing() -> None:
    """An event at which nothing happens."""
