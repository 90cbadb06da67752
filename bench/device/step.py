"""Where the time of a step goes: linears, attention, the rest of the device half, the host half.

One process, the real engine; the kernels are wrapped in clocks, which costs some 0.2 us a call.
Decoding after prompts that share nothing, and a prompt of its own. Medians over the steps; `cpu` is
the CPU time of all threads.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ...flags import count
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ...runtime.execute.threads import configure_threads, default_num_threads
from ...runtime.models.model_config import read_model_config
from ...runtime.schedule.plan import RowResult
from ...runtime.schedule.request import FinishReason, Request
from ...runtime.schedule.sampling_params import SamplingParams
from ..harness.prompts import plain_ids, random_prompt
from ..harness.report import write_report

if TYPE_CHECKING:
    from ...kernels.registry import Kernels
    from ...runtime.engine import Engine
    from ...runtime.execute.model_runner import ModelRunner

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
LINEAR, ATTENTION, DEVICE = "linears", "attention", "device"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench step`."""
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL, help="checkpoint folder")
    parser.add_argument("--batches", type=count, nargs="+", default=[1, 8, 64], metavar="N")
    parser.add_argument("--prompt-tokens", type=count, default=256, metavar="N")
    parser.add_argument("--steps", type=count, default=64, help="decode steps (%(default)s)")
    parser.add_argument(
        "--replay",
        action="store_true",
        help="replay recorded forward passes, as an engine does; their parts count as the rest",
    )
    parser.add_argument("--num-threads", type=count, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    configure_threads(args.num_threads or default_num_threads(args.model), None)
    clocks = _Clocks()
    engine = _engine(args, clocks)
    ids = plain_ids(read_model_config(args.model).vocab_size)
    _steps(engine, clocks, ids, 1, args)  # warm-up
    rows = []
    for batch in args.batches:
        prefill, decode = _steps(engine, clocks, ids, batch, args)
        tokens = args.prompt_tokens
        middle = tokens + args.steps // 2
        rows.append(_row(f"decode, batch {batch}", decode, (batch, 1, middle)))
        rows.append(_row(f"prefill, {batch} x {tokens} tokens", prefill, (batch, tokens, 0)))
    write_report("step", sorted(rows, key=lambda row: str(row["step"])), args)
    return 0


class _Clocks:
    """Seconds spent in each kind of call since the last reset."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def reset(self) -> None:
        self.seconds = {LINEAR: 0.0, ATTENTION: 0.0, DEVICE: 0.0}

    def time(self, kind: str, call: Callable[P, R]) -> Callable[P, R]:
        """`call`, with its time added to its kind."""

        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[kind] += time.perf_counter() - started

        return timed

    def kernels(self, kernels: Kernels, is_replaying: bool) -> Kernels:
        """The same kernels, timed."""

        def timed_maker(make: Callable[P, Callable[Q, R]]) -> Callable[P, Callable[Q, R]]:
            return lambda *args, **kwargs: self.time(LINEAR, make(*args, **kwargs))

        return replace(
            kernels,
            capture=kernels.capture if is_replaying else None,
            make_linear=timed_maker(kernels.make_linear),
            make_output_linear=timed_maker(kernels.make_output_linear),
            make_gated_linear=timed_maker(kernels.make_gated_linear),
            plan_attention=self.time(ATTENTION, kernels.plan_attention),
            paged_attention=self.time(ATTENTION, kernels.paged_attention),
        )


class Ignore:
    """A listener that ignores everything."""

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        return None

    def on_finish(self, request: Request) -> None:
        pass


class _TimedExecutor:
    """The model runner, timed."""

    def __init__(self, runner: ModelRunner, clocks: _Clocks) -> None:
        self.segment_cost_tokens = runner.segment_cost_tokens
        self.can_overlap = runner.can_overlap
        self.submit = clocks.time(DEVICE, runner.submit)


def _engine(args: argparse.Namespace, clocks: _Clocks) -> Engine:
    from ...kernels.registry import select_kernels
    from ...runtime.engine import Engine
    from ...runtime.execute.model_runner import ModelRunner, resolve_dtype

    batch = max(args.batches)
    tokens = args.prompt_tokens + args.steps + 1
    clocks.reset()
    runner = ModelRunner(
        args.model,
        read_model_config(args.model),
        kernels=clocks.kernels(select_kernels(resolve_dtype("auto")), args.replay),
        max_total_tokens=(batch + 1) * tokens,
        max_running_requests=batch,
    )
    return Engine(
        _TimedExecutor(runner, clocks),
        num_pages=runner.num_pages,
        page_size=1,
        max_model_len=runner.max_model_len,
        token_budget=batch * args.prompt_tokens,
        max_running_requests=batch,
    )


def _steps(
    engine: Engine, clocks: _Clocks, ids: range, batch: int, args: argparse.Namespace
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Milliseconds of the prefill step and of each decode step."""
    engine.flush_cache()
    rng = random.Random(batch)
    max_tokens = args.steps + 1  # the first comes of the prefill step
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for _ in range(batch):
        prompt = random_prompt(rng, args.prompt_tokens, ids)
        engine.submit(Request(engine.next_request_id(), prompt, sampling, Ignore()))
    found = []
    while engine.has_work:
        clocks.reset()
        started, cpu_s = time.perf_counter(), time.process_time()
        engine.step()
        step_s = time.perf_counter() - started
        found.append(_in_ms(step_s, time.process_time() - cpu_s, clocks.seconds))
    return found[:1], found[1:]


def _in_ms(step_s: float, cpu_s: float, seconds: dict[str, float]) -> dict[str, float]:
    device = seconds[DEVICE]
    parts = {
        "step": step_s,
        "linears": seconds[LINEAR],
        "attention": seconds[ATTENTION],
        "rest of device half": device - seconds[LINEAR] - seconds[ATTENTION],
        "host half": step_s - device,
        "cpu": cpu_s,
    }
    return {name: value * 1e3 for name, value in parts.items()}


def _row(name: str, steps: list[dict[str, float]], shape: tuple[int, int, int]) -> dict[str, Any]:
    """`shape`: rows, tokens of each, and tokens before these (planning/calibration.py reads it)."""
    medians = {f"{key}, ms": statistics.median(s[key] for s in steps) for key in steps[0]}
    share = statistics.median(s["host half"] / s["step"] for s in steps)
    threads = int(os.environ["OMP_NUM_THREADS"])
    columns = dict(zip(("rows", "tokens a row", "tokens before"), shape, strict=True))
    return {"step": name, "threads": threads, **columns, **medians, "host share": share}
