"""The real scheduler and radix tree over a modelled device: the effect of a policy on a workload.

The clock is simulated: a step takes the modelled device's time, planning takes none. So all figures
except the host's microseconds depend on the seed alone.
"""

from __future__ import annotations

import itertools
import random
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from ..radix.leases import Lease
from ..radix.tree import RadixTree
from ..runtime.engine import Engine
from ..runtime.schedule.plan import FinishedStep, Row, RowResult, StepPlan, StepResult
from ..runtime.schedule.program_record import ProgramRecord
from ..runtime.schedule.queue.policy import DEFAULT_POLICY
from ..runtime.schedule.request import FinishReason, Request
from ..runtime.schedule.sampling_params import SamplingParams
from .traces import Call, Job, Start

LEASE_TTL_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """How many requests a trace has, how many (or programs) arrive a second, and the tokens of KV
    if they differ from the device's."""

    num_requests: int
    rate: float
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """Milliseconds of a step: `fixed_ms`, plus the following for each row.

    A prompt's token costs `prefill_token_ms`, a decode row `decode_row_ms`, and each pair of a
    token and a key that it attends to `prefill_pair_ms` or, for a decode row, `decode_pair_ms`.
    """

    name: str
    fixed_ms: float
    prefill_token_ms: float
    decode_row_ms: float
    prefill_pair_ms: float
    decode_pair_ms: float
    num_tokens: int  # of KV; less than such a machine has, so that short traces fill it
    max_running_requests: int
    slo_ttft_s: float  # limit of the first token's time for a good call
    slo_tpot_s: float  # and of the average time of each further token
    loads: Mapping[str, Load]  # by trace: about the device's capacity
    copy_token_ms: float = 0.0  # of a token's KV, between device and host

    def step_s(self, plan: StepPlan) -> float:
        """How long a step takes."""
        return (self.fixed_ms + sum(map(self._row_ms, plan.rows))) / 1000

    def decode_times_s(self, before: Sequence[int], num_steps: int) -> list[float]:
        """See FleetDevice."""
        times = []
        for further in range(num_steps):
            rows_ms = sum([self._decode_row_ms(num + further) for num in before])
            times.append((self.fixed_ms + rows_ms) / 1000)
        return times

    def copy_s(self, num_tokens: int) -> float:
        """How long copies of so many tokens' KV between device and host take."""
        return num_tokens * self.copy_token_ms / 1000

    def _row_ms(self, row: Row) -> float:
        num_tokens = len(row.input_ids)
        if num_tokens == 1:
            return self._decode_row_ms(row.start)
        pairs = num_tokens * (row.start + num_tokens / 2)
        return num_tokens * self.prefill_token_ms + pairs * self.prefill_pair_ms

    def _decode_row_ms(self, before: int) -> float:
        return self.decode_row_ms + before * self.decode_pair_ms


# Step and token times: measured on 2 cores of an AMD EPYC (Zen 4). A pair is 12 KB of KV at 50 GB/s
# for a decode row, 37 kFLOP at 600 GFLOP/s in a prompt; a copy of it reads and writes.
CPU = Device(
    name="2-core CPU, llama-160m",
    fixed_ms=4.5,
    prefill_token_ms=0.27,
    decode_row_ms=0.4,
    prefill_pair_ms=6.1e-5,
    decode_pair_ms=2.5e-4,
    num_tokens=32_768,
    max_running_requests=128,
    slo_ttft_s=2.0,
    slo_tpot_s=0.1,
    loads={
        "programs": Load(700, 15.0),
        "chats": Load(500, 10.0),
        "documents": Load(500, 100.0),
        "flood": Load(4000, 220.0),
        "full": Load(150, 2.5),
        "react": Load(384, 100.0, 18_900),
        "mixed": Load(192, 4.0, 12_000),
        "forks": Load(360, 2.0, 9_000),
        "long_agents": Load(24, 1.0, 18_900),
    },
    copy_token_ms=5e-4,
)
# From data sheets, not measured: 16 GB of weights at 4 TB/s, 16 GFLOP a token at 500 TFLOP/s; a
# pair is 131 KB or 524 kFLOP, which goes to the host over PCIe at 25 GB/s. 20 us a decode row is a
# guess.
H200 = Device(
    name="H200, 8B",
    fixed_ms=4.5,
    prefill_token_ms=0.032,
    decode_row_ms=0.02,
    prefill_pair_ms=1.3e-6,
    decode_pair_ms=3.3e-5,
    num_tokens=100_000,
    max_running_requests=512,
    slo_ttft_s=1.0,
    slo_tpot_s=0.1,
    loads={
        "programs": Load(2500, 400.0),
        "chats": Load(1500, 200.0),
        "documents": Load(3000, 1000.0),
        "flood": Load(15_000, 2200.0),
        "full": Load(600, 40.0),
        "react": Load(1152, 1000.0, 56_700),
        "mixed": Load(960, 40.0, 60_000),
        "forks": Load(1200, 20.0, 30_000),
        "long_agents": Load(72, 10.0, 56_700),
    },
    copy_token_ms=5.2e-3,
)
DEVICES = {"cpu": CPU, "h200": H200}


@dataclass(slots=True)
class CallRecord:
    """A call's listener and outcome, in simulated seconds."""

    call: Call
    run: Simulation
    job: RunningJob
    output: array[int]
    arrived_s: float
    token_times_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.arrived_s

    @property
    def tpot_s(self) -> float:
        """Seconds a token after the first; 0 for a single one."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        self.token_times_s.append(self.run.now_s)
        is_last = len(self.token_times_s) == len(self.output)
        return FinishReason.STOP if is_last else None

    def on_finish(self, request: Request) -> None:
        self.run.note_finish(self, request)


@dataclass(slots=True)
class RunningJob:
    """A job and the calls that it waits for."""

    job: Job
    started_s: float
    program: ProgramRecord | None = None
    records: list[CallRecord] = field(default_factory=list)
    num_open: int = 0
    leases: list[Lease] = field(default_factory=list)
    ended_s: float = 0.0


class Simulation:
    """One run of a trace; `records` are the calls that have ended, `jobs` their jobs."""

    can_overlap = False
    segment_cost_tokens = 32  # see runtime/schedule/tree_order.py

    def __init__(
        self,
        device: Device,
        *,
        policy: str = DEFAULT_POLICY,
        max_overtakes: int | None = 128,
        page_size: int = 1,
        token_budget: int = 2048,
        seed: int = 0,
        has_programs: bool = False,
        has_leases: bool = False,
    ) -> None:
        """`has_programs`: the engine receives the program of each call; `has_leases`: also, between
        two of its calls, that the program will return and when."""
        self.device = device
        self.has_programs = has_programs
        self.has_leases = has_leases
        self.now_s = 0.0
        self.host_s = 0.0  # CPU seconds spent in the scheduler
        self.records: list[CallRecord] = []
        self.jobs: list[RunningJob] = []
        self.num_optimal_tokens = 0  # prompt tokens that an infinite cache would contain
        self.engine = Engine(
            self,
            num_pages=device.num_tokens // page_size,
            page_size=page_size,
            max_model_len=device.num_tokens,
            token_budget=token_budget,
            max_running_requests=device.max_running_requests,
            schedule_policy=policy,
            max_overtakes=max_overtakes,
            clock=lambda: self.now_s,
        )
        self._rng = random.Random(seed)
        self._infinite = RadixTree()
        self._open: dict[int, CallRecord] = {}
        self._numbers = itertools.count()  # a tie-breaker, so that records are never compared
        self._coming: list[tuple[float, int, CallRecord]] = []

    def run(self, starts: Sequence[Start]) -> None:
        """Run a trace to its end."""
        waiting = list(reversed(starts))
        while waiting or self._coming or self._open:
            if not self.engine.has_work:
                times = [start.at_s for start in waiting[-1:]] + [c[0] for c in self._coming[:1]]
                wake_s = self.engine.next_wake_s
                times += [] if wake_s is None else [wake_s]
                self.now_s = max(self.now_s, min(times))
            while waiting and waiting[-1].at_s <= self.now_s:
                start = waiting.pop()
                self._start(start)
            while self._coming and self._coming[0][0] <= self.now_s:
                self._submit(heappop(self._coming)[2])
            self._step()

    def submit(self, plan: StepPlan) -> FinishedStep:
        """The modelled device."""
        duration_s = self.device.step_s(plan)
        self.now_s += duration_s
        results = tuple([self._answer(row) for row in plan.rows])
        return FinishedStep(StepResult(plan.step_id, results, duration_s))

    def note_finish(self, record: CallRecord, request: Request) -> None:
        """A call has ended; after the last of its siblings its job continues."""
        del self._open[request.id]
        self.records.append(record)
        self._remember(request.token_ids)
        record.job.num_open -= 1
        if not record.job.num_open:
            self._advance(record.job, self.now_s)

    def _answer(self, row: Row) -> RowResult:
        if row.sampling is None:
            return RowResult()
        record = self._open[row.request_id]
        return RowResult(token_id=record.output[len(record.token_times_s)])

    def _step(self) -> None:
        scheduler = self.engine.scheduler
        started = time.thread_time()
        plan = scheduler.plan()
        self.host_s += time.thread_time() - started
        if plan is None:
            return
        result = self.submit(plan).result()
        started = time.thread_time()
        scheduler.apply(result)
        self.host_s += time.thread_time() - started

    def _start(self, start: Start) -> None:
        program = ProgramRecord(created_s=start.at_s) if self.has_programs else None
        job = RunningJob(start.job, start.at_s, program)
        self.jobs.append(job)
        self._advance(job, start.at_s)

    def _advance(self, job: RunningJob, at_s: float) -> None:
        try:
            outputs = [record.output for record in job.records]
            calls = job.job.send(outputs) if outputs else next(job.job)
        except StopIteration:
            self._end(job, at_s)
            return
        job.records = [
            CallRecord(call, self, job, self._output(call), at_s + call.delay_s) for call in calls
        ]
        job.num_open = len(calls)
        if self.has_leases:
            self._lease(job, calls)
        for record in job.records:
            heappush(self._coming, (record.arrived_s, next(self._numbers), record))

    def _lease(self, job: RunningJob, calls: Sequence[Call]) -> None:
        """Lease what is cached of the next calls' prompts, replacing the last calls' leases."""
        kv_cache, before = self.engine.scheduler.kv_cache, job.leases
        made = [
            kv_cache.retain("", call.prompt, due_s=call.delay_s, ttl_s=LEASE_TTL_S)
            for call in calls
        ]
        job.leases = [lease for lease in made if lease is not None]
        for lease in before:
            kv_cache.release_lease(lease)

    def _end(self, job: RunningJob, at_s: float) -> None:
        job.ended_s = at_s
        for lease in job.leases:
            self.engine.scheduler.kv_cache.release_lease(lease)
        if job.program is not None:
            self.engine.end_program(job.program)

    def _output(self, call: Call) -> array[int]:
        return array("i", self._rng.randbytes(4 * call.num_output))

    def _submit(self, record: CallRecord) -> None:
        call = record.call
        request = Request(
            id=self.engine.next_request_id(),
            prompt=call.prompt,
            sampling=SamplingParams(max_tokens=call.max_tokens),
            listener=record,
            client=call.client,
            priority=int(call.is_cold),
            program=record.job.program,
            num_calls_after=max(0, call.num_calls_left - 1),
        )
        self._open[request.id] = record
        limit = request.match_limit
        self.num_optimal_tokens += self._infinite.match_length("", call.prompt, limit)
        self._remember(call.prompt)
        started = time.thread_time()
        self.engine.submit(request)
        self.host_s += time.thread_time() - started

    def _remember(self, token_ids: array[int]) -> None:
        self._infinite.insert("", token_ids, token_ids)
