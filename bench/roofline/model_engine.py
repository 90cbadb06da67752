"""A model with random weights and its engine in this process, asked by token ids: no tokenizer."""

from __future__ import annotations

import gc
import json
import random
import tempfile
import time
from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch

from ...errors import EngineError
from ...runtime.engine import Engine
from ...runtime.execute.model_runner import ModelRunner
from ...runtime.models.model_config import read_model_config
from ...runtime.schedule.plan import PendingStep, RowResult, StepPlan
from ...runtime.schedule.request import FinishReason, Request
from ...runtime.schedule.sampling_params import SamplingParams
from ..harness.workloads import LOW
from .context import Context

# Cycles that the device sleeps before a timed step: 30 ms at 1.98 GHz, so that the host has
# queued the whole step by then.
_HELD_CYCLES = 60_000_000


class TimedExecutor:
    """The model runner; while `is_holding`, device seconds of each step go to `device_s`."""

    def __init__(self, runner: ModelRunner) -> None:
        self.segment_cost_tokens = runner.segment_cost_tokens
        self.can_overlap = runner.can_overlap
        self.is_holding = False
        self.device_s: list[float] = []
        self._runner = runner

    def submit(self, plan: StepPlan) -> PendingStep:
        """As the runner does. A held step is queued behind a sleep, so that its device time
        contains nothing of the host."""
        return self._held(plan) if self.is_holding else self._runner.submit(plan)

    def _held(self, plan: StepPlan) -> PendingStep:
        accelerator = self._runner.accelerator
        if accelerator is None:  # the CPU's own kernels: done when submitted
            started = time.perf_counter()
            pending = self._runner.submit(plan)
            self.device_s.append(time.perf_counter() - started)
            return pending
        with accelerator.queue():
            if not accelerator.is_interpreted:
                torch.cuda._sleep(_HELD_CYCLES)  # type: ignore[no-untyped-call]
            first = accelerator.event()
            pending = self._runner.submit(plan)
            last = accelerator.event()
        last.wait()
        self.device_s.append(last.seconds_since(first))
        return pending


class Clocked:
    """A listener that records when each token came."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        self.times_s.append(time.perf_counter())
        return None

    def on_finish(self, request: Request) -> None:
        if request.finish_reason is FinishReason.ERROR:
            raise EngineError(f"request {request.id}: {request.error}")


class ModelEngine:
    """Owns the runner and the engine; use as a context manager, so that their memory is freed
    after.

    The pool's pages have `page_size` tokens, all requests are greedy and run to their max_tokens.
    """

    def __init__(
        self,
        ctx: Context,
        config: dict[str, Any],
        *,
        max_total_tokens: int,
        max_running_requests: int,
        max_model_len: int,
        token_budget: int = 2048,
    ) -> None:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="stemma-bench-") as name:
            write_config(Path(name), config)
            self.config = read_model_config(name)
            self.runner = ModelRunner(
                name,
                self.config,
                dtype=ctx.dtype,
                device=ctx.device,
                max_total_tokens=max_total_tokens,
                page_size=ctx.sizes.page_size,
                max_running_requests=max_running_requests,
                max_model_len=max_model_len,
                max_step_tokens=token_budget,
                load_format="dummy",
            )
        self.runner.warm_up()
        self.start_s = time.perf_counter() - started
        self.executor = TimedExecutor(self.runner)
        self.engine = Engine(
            self.executor,
            num_pages=self.runner.num_pages,
            page_size=ctx.sizes.page_size,
            max_model_len=max_model_len,
            token_budget=token_budget,
            max_running_requests=max_running_requests,
            vocab_size=self.config.vocab_size,
        )
        self._random = random.Random(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        del self.engine, self.executor, self.runner
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def prompt(self, num_tokens: int) -> list[int]:
        """Random ids: nothing is shared with any other prompt."""
        return [self._random.randrange(LOW, self.config.vocab_size) for _ in range(num_tokens)]

    def submit(self, prompt: Sequence[int], max_tokens: int, listener: Any) -> Request:
        """Queue a request."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        number = self.engine.next_request_id()
        request = Request(number, array("i", prompt), sampling, listener)
        self.engine.submit(request)
        return request

    def decoding(self, num: int, prompt_tokens: int, max_tokens: int) -> list[Request]:
        """Requests with separate prompts, which begin to decode at the same time: their prompts are
        cached by then."""
        prompts = [self.prompt(prompt_tokens) for _ in range(num)]
        for prompt in prompts:
            self.submit(prompt, 1, Clocked())
        self.run()
        requests = [self.submit(prompt, max_tokens, Clocked()) for prompt in prompts]
        while min(request.num_output_tokens for request in requests) < 1:
            self.engine.step()
        return requests

    def advance(self, request: Request, num_tokens: int) -> list[float]:
        """Step until it has `num_tokens` more tokens; returns the seconds between tokens."""
        assert isinstance(request.listener, Clocked)
        times_s = request.listener.times_s
        first = len(times_s) - 1
        while len(times_s) <= first + num_tokens:
            assert not request.is_finished, f"ended: {request.finish_reason}, {request.error}"
            self.engine.step()
        return [later - earlier for earlier, later in pairwise(times_s[first:])]

    def end(self, requests: Sequence[Request]) -> None:
        """Abort unfinished requests, and flush the cache."""
        for request in requests:
            if not request.is_finished:
                self.engine.abort(request)
        self.run()
        self.engine.flush_cache()

    def run(self) -> None:
        """Step until nothing is left."""
        while self.engine.has_work:
            self.engine.step()

    def kv_bytes(self, num_tokens: int) -> int:
        """KV bytes of that many tokens, over all layers."""
        return num_tokens * self.runner.kv_layout.bytes_per_token

    def weight_bytes(self) -> int:
        """Bytes that a decode step reads: all but the embedding, of which only a row per token is
        looked up; the head counts, whether tied to the embedding or not."""
        config = self.config
        heads = 2 * config.num_heads + 2 * config.num_kv_heads  # queries, output; keys, values
        layer = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
        head = config.vocab_size * config.hidden_size
        return (config.num_layers * layer + head) * self.runner.dtype.itemsize


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """A checkpoint folder without weights."""
    (folder / "config.json").write_text(json.dumps(config))
