"""A closed-loop load on an engine: each client has one request at a time, and sends the next when
it has the answer. The scheduler and radix tree are the real ones; the executor is a model of a
device with its own clock, or a real one. Torch-free.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from ..runtime.engine import Engine, Executor
from ..runtime.schedule.plan import RowResult, StepPlan, StepResult
from ..runtime.schedule.request import FinishReason, Request
from ..runtime.schedule.sampling_params import SamplingParams
from .pipeline import Pipeline
from .roofline import CostModel


@dataclass(frozen=True, slots=True)
class Load:
    """The clients' requests."""

    num_clients: int
    prompt_tokens: int
    shared_tokens: int  # of prompt_tokens, at the start of every prompt
    output_tokens: int
    num_rounds: int = 2  # requests per client
    num_adapters: int = 0  # used by requests in turn, each with its own prefix; 0: none

    @property
    def request_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(slots=True)
class Answer:
    """A request's listener, which records the times of its tokens."""

    loop: ClosedLoop
    asked_s: float
    token_times_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.asked_s

    @property
    def tpot_s(self) -> float:
        """Seconds a token after the first; 0 for a single one."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        self.token_times_s.append(self.loop.clock())
        return None

    def on_finish(self, request: Request) -> None:
        assert request.error is None, request.error
        self.loop.note_answer(self)


class ModelledDevice:
    """An executor that computes nothing: of one model, or of its stages. Its clock is where the
    last result was there that has been asked for."""

    can_overlap = False
    segment_cost_tokens = 32  # see schedule/tree_order.py

    def __init__(self, *stages: CostModel) -> None:
        self.num_stages = len(stages)
        self.now_s = 0.0
        self._pipeline = Pipeline(stages)

    def clock(self) -> float:
        """Simulated seconds."""
        return self.now_s

    def submit(self, plan: StepPlan) -> ModelledStep:
        """The step enters the first stage."""
        rows = [(len(row.input_ids), row.start) for row in plan.rows]
        num_sampled = sum(row.sampling is not None for row in plan.rows)
        return ModelledStep(self, plan, self._pipeline.pass_through(rows, num_sampled, self.now_s))


@dataclass(frozen=True, slots=True)
class ModelledStep:
    """A step that will have been computed then."""

    device: ModelledDevice
    plan: StepPlan
    ended_s: float

    def result(self) -> StepResult:
        """Wait for it: as an engine of several stages does, which measures how long that takes."""
        duration_s = self.ended_s - self.device.now_s
        self.device.now_s = self.ended_s
        results = tuple(
            RowResult(token_id=None if row.sampling is None else row.start)
            for row in self.plan.rows
        )
        return StepResult(self.plan.step_id, results, duration_s)


class ClosedLoop:
    """Runs one load to its end; `answers` in the order of completion."""

    def __init__(
        self,
        executor: Executor,
        load: Load,
        *,
        clock: Callable[[], float],
        vocab_size: int,
        kv_tokens: int,
        token_budget: int,
        max_running_requests: int,
        num_stages: int = 1,
    ) -> None:
        """num_stages: of the executor."""
        self.load = load
        self.clock = clock
        self.answers: list[Answer] = []
        self._vocab_size = vocab_size
        self._random = random.Random(0)
        self._shared = [self._ids(load.shared_tokens) for _ in range(max(1, load.num_adapters))]
        self._num_asked = 0
        self._engine = Engine(
            executor,
            num_pages=kv_tokens,
            page_size=1,
            max_model_len=load.request_tokens,
            token_budget=token_budget,
            max_running_requests=max_running_requests,
            num_stages=num_stages,
            clock=clock,
        )

    def run(self) -> float:
        """Returns its duration in seconds."""
        started_s = self.clock()
        for _ in range(self.load.num_clients):
            self._ask()
        while self._engine.has_work:
            self._engine.step()
        return self.clock() - started_s

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all answers."""
        return sum(len(answer.token_times_s) for answer in self.answers)

    def note_answer(self, answer: Answer) -> None:
        """A client has its answer, and sends its next request."""
        self.answers.append(answer)
        if self._num_asked < self.load.num_clients * self.load.num_rounds:
            self._ask()

    def _ask(self) -> None:
        shared = self._shared[self._num_asked % len(self._shared)]
        self._num_asked += 1
        own = self._ids(self.load.prompt_tokens - self.load.shared_tokens)
        sampling = SamplingParams(
            max_tokens=self.load.output_tokens, temperature=0.0, ignore_eos=True
        )
        number = self._engine.next_request_id()
        listener = Answer(self, self.clock())
        self._engine.submit(Request(number, shared + own, sampling, listener))

    def _ids(self, count: int) -> array[int]:
        return array("i", [self._random.randrange(self._vocab_size) for _ in range(count)])
