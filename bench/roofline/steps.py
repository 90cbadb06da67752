"""Decode steps of whole models: against reading weights and KV once, and what the host adds.

Also the tokens of decodes while a long prompt is computed in chunks beside them.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch.profiler import ProfilerActivity, profile

from ...runtime.schedule.queue.prompt_limits import DEFAULT_SLOWDOWN
from ...runtime.schedule.request import Request
from ..harness.report import percentile
from .context import Context
from .model_engine import Clocked, ModelEngine
from .rows import Row, at_most, attempt

_SETTLING = 8  # decode steps before timing: graphs are recorded, the host runs ahead
_HELD = 12  # steps whose device time is taken
_RESUMING = 2  # after them, until the host is ahead again
_SPARE = 8  # requested tokens that are never generated: the requests end before
_PROFILED = 4
_GENTLE_SLOWDOWN = 1.4  # the default lets a step beside a prompt take 1.6 times as long
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
_CALLS = (*_WAITS, "cudaMemcpyAsync", "cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")


def steps(ctx: Context) -> Iterator[Row]:
    """Every model at every batch; finally, as profiling slows down what follows, a profile of the
    first model's largest batch."""
    for name, config in reversed(ctx.sizes.models):
        yield from attempt(name, _model_steps, ctx, name, config)


def _model_steps(ctx: Context, name: str, config: dict[str, Any]) -> Iterator[Row]:
    sizes, largest = ctx.sizes, max(ctx.sizes.step_batches)
    length = sizes.step_prompt + _num_tokens(ctx) + sizes.page_size
    with ModelEngine(
        ctx, config,
        max_total_tokens=(largest + 1) * (length + sizes.page_size),
        max_running_requests=largest,
        max_model_len=length,
        token_budget=max(2048, largest * 2),
    ) as model:  # fmt: skip
        yield Row(f"{name}, loaded and warm", model.start_s, "s")
        for batch in sizes.step_batches:
            case = f"{name}, batch {batch}"
            yield from attempt(case, _batch, ctx, model, case, batch)
        if name == sizes.models[0][0]:
            case = f"{name}, batch {largest}, waits for the device"
            yield from attempt(case, _calls, ctx, model, case, largest)


def _num_tokens(ctx: Context) -> int:
    """Most tokens that a request generates: all requests stay until the last measurement."""
    return _SETTLING + ctx.sizes.steps + _HELD + _RESUMING + _PROFILED + _SPARE


def _batch(ctx: Context, model: ModelEngine, case: str, batch: int) -> Iterator[Row]:
    """Wall time before and after the device time, so that both have the same context lengths."""
    sizes = ctx.sizes
    requests = model.decoding(batch, sizes.step_prompt, _num_tokens(ctx))
    model.advance(requests[0], _SETTLING)
    before = model.advance(requests[0], sizes.steps // 2)
    device_s = _device_s(model)
    context = requests[0].num_tokens - _HELD // 2
    model.advance(requests[0], _RESUMING)
    distances = before + model.advance(requests[0], sizes.steps // 2)
    model.end(requests)
    wall_s = statistics.median(distances)
    weights, kv = model.weight_bytes(), model.kv_bytes(batch * context)
    floor_s = (weights + kv) / ctx.ceilings.copy_bytes_s
    yield Row(
        f"{case}, context {context}", wall_s * 1e3, "ms a step", wall_s / floor_s,
        "reading weights and KV once", at_most(1.25),
        details={
            "mean_ms": statistics.mean(distances) * 1e3,
            "weight_bytes": weights,
            "kv_bytes": kv,
            "tokens_s": batch / wall_s,
            "floor_ms": floor_s * 1e3,
        },
    )  # fmt: skip
    target = at_most(0.03) if batch == max(sizes.step_batches) else None
    yield Row(
        f"{case}, host gap", (wall_s - device_s) * 1e3, "ms a step", (wall_s - device_s) / wall_s,
        "the step", target,
        details={"device_ms": device_s * 1e3, "device_over_floor": device_s / floor_s},
    )  # fmt: skip


def _device_s(model: ModelEngine) -> float:
    """Device time of a step that is fully queued before it begins."""
    executor = model.executor
    executor.device_s.clear()
    executor.is_holding = True
    while len(executor.device_s) < _HELD:
        model.engine.step()
    executor.is_holding = False
    return statistics.median(executor.device_s)


def _calls(ctx: Context, model: ModelEngine, case: str, batch: int) -> Iterator[Row]:
    """Driver calls per step: where the host waits, copies, launches."""
    requests = model.decoding(batch, ctx.sizes.step_prompt, _num_tokens(ctx))
    model.advance(requests[0], _SETTLING)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ctx.has_gpu else [])]
    with profile(activities=activities) as profiled:
        model.advance(requests[0], _PROFILED)
    model.end(requests)
    counts = Counter[str]()
    for event in profiled.events():
        counts.update(name for name in _CALLS if event.name.startswith(name))
    a_step = {name: counts[name] / _PROFILED for name in _CALLS}
    waits = sum(a_step[name] for name in _WAITS)
    yield Row(
        case, waits, "a step", waits, "the read-back of tokens", at_most(1.0),
        details=a_step,
    )  # fmt: skip


# --- decodes beside a prompt ---------------------------------------------------------------------


def stall(ctx: Context) -> Iterator[Row]:
    """Inter-token latency of decodes while a prompt is computed in chunks, against without."""
    sizes, batch = ctx.sizes, max(ctx.sizes.step_batches)
    name, config = sizes.models[0]
    num_tokens = 4 * sizes.steps + sizes.stall_prompt // 8
    length = max(sizes.step_prompt + num_tokens, sizes.stall_prompt + 1) + sizes.page_size
    with ModelEngine(
        ctx, config,
        max_total_tokens=batch * (sizes.step_prompt + num_tokens + 2 * sizes.page_size) + length,
        max_running_requests=batch + 1,
        max_model_len=length,
    ) as model:  # fmt: skip
        for slowdown in (_GENTLE_SLOWDOWN, DEFAULT_SLOWDOWN):
            model.engine.scheduler.limits.slowdown = slowdown
            case = f"{name}, at most {slowdown:g} times a decode step"
            yield from attempt(case, _stall, ctx, case, model, batch, num_tokens)


def _stall(
    ctx: Context, case: str, model: ModelEngine, batch: int, num_tokens: int
) -> Iterator[Row]:
    sizes = ctx.sizes
    for _ in range(2):  # the first time warms up, and lets the scheduler learn steps' costs
        alone, during, prompt_s = _apart(ctx, model, batch, num_tokens)
    base, beside = percentile(sorted(alone), 99), percentile(sorted(during), 99)
    yield Row(
        f"{case}: p99 beside a prompt of {sizes.stall_prompt}", beside * 1e3, "ms",
        beside / base, "decode alone", at_most(1.5),
        details={
            "alone_p99_ms": base * 1e3,
            "alone_p50_ms": statistics.median(alone) * 1e3,
            "during_p50_ms": statistics.median(during) * 1e3,
            "during_most_ms": max(during) * 1e3,
            "tokens_during": len(during),
            "prompt_s": prompt_s,
        },
    )  # fmt: skip


def _apart(
    ctx: Context, model: ModelEngine, batch: int, num_tokens: int
) -> tuple[list[float], list[float], float]:
    """Seconds between tokens without and beside a prompt, over all decodes; and the prompt's time
    to first token."""
    sizes = ctx.sizes
    requests = model.decoding(batch, sizes.step_prompt, num_tokens)
    model.advance(requests[0], _SETTLING)
    first = time.perf_counter()
    model.advance(requests[0], sizes.steps)
    arrival = time.perf_counter()
    late = model.submit(model.prompt(sizes.stall_prompt), 1, Clocked())
    while not late.is_finished:
        model.engine.step()
    end = time.perf_counter()
    alone, during = _between(requests, first, arrival), _between(requests, arrival, end)
    model.end([*requests, late])
    return alone, during, end - arrival


def _between(requests: list[Request], first: float, last: float) -> list[float]:
    """Intervals between tokens that came in this time span."""
    found = []
    for request in requests:
        assert isinstance(request.listener, Clocked)
        times_s = pairwise(request.listener.times_s)
        found += [later - earlier for earlier, later in times_s if first < later <= last]
    return found
