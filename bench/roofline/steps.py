"""Decode steps of whole models: against reading weights and KV once, and what the host adds.

Also the tokens of decodes while a long prompt is computed in chunks beside them.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch.profiler import ProfilerActivity, profile

from ...runtime.request import Request
from ...runtime.schedule.stall import DEFAULT_SLOWDOWN
from ..percentiles import percentile
from .context import Context
from .model_engine import Clocked, ModelEngine
from .rows import Row, at_most, attempt

_SETTLING = 8  # decode steps before any is timed: graphs are recorded, the host is ahead
_HELD = 12  # steps whose device time is taken
_PROFILED = 4
_GENTLE_SLOWDOWN = 1.4  # the default lets a step beside a prompt take 1.6 times as long
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
_CALLS = (*_WAITS, "cudaMemcpyAsync", "cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")


def steps(ctx: Context) -> Iterator[Row]:
    """Every model at every batch; the first model's host gap too."""
    for name, config in ctx.sizes.models:
        yield from attempt(name, lambda n=name, c=config: _model_steps(ctx, n, c))


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
            yield from attempt(case, lambda b=batch, c=case: _batch(ctx, model, c, b))


def _num_tokens(ctx: Context) -> int:
    """Tokens that a request generates at most: all of them stay until the last is measured."""
    return 2 * _SETTLING + ctx.sizes.steps + _HELD + _PROFILED + 8


def _batch(ctx: Context, model: ModelEngine, case: str, batch: int) -> Iterator[Row]:
    sizes = ctx.sizes
    for _ in range(2):  # the first time warms up
        model.engine.flush_cache()
        requests = _decoding(ctx, model, batch)
        wall_s, median_s = _timed(model, requests[0], sizes.steps)
        if _ == 0:
            _abort(model, requests)
    context = requests[0].num_tokens - sizes.steps // 2
    weights, kv = model.weight_bytes(), model.kv_bytes(batch * context)
    floor_s = (weights + kv) / ctx.ceilings.copy_bytes_s
    yield Row(
        f"{case}, context {context}", wall_s * 1e3, "ms a step", wall_s / floor_s,
        "reading weights and KV once", at_most(1.25),
        details={"median_ms": median_s * 1e3, "weight_bytes": weights, "kv_bytes": kv,
                 "tokens_s": batch / wall_s, "floor_ms": floor_s * 1e3},
    )  # fmt: skip
    device_s = _device_s(model)
    target = at_most(0.03) if batch == max(sizes.step_batches) else None
    yield Row(
        f"{case}, host gap", (wall_s - device_s) * 1e3, "ms a step", (wall_s - device_s) / wall_s,
        "the step", target,
        details={"device_ms": device_s * 1e3, "device_over_floor": device_s / floor_s},
    )  # fmt: skip
    yield from attempt(f"{case}, calls", lambda: _calls(ctx, model, case))
    _abort(model, requests)


def _decoding(ctx: Context, model: ModelEngine, batch: int) -> list[Request]:
    """Requests that have all begun to decode, and settled."""
    sizes = ctx.sizes
    requests = [
        model.submit(model.prompt(sizes.step_prompt), _num_tokens(ctx), Clocked())
        for _ in range(batch)
    ]
    while min(request.num_output_tokens for request in requests) < _SETTLING // 2:
        model.engine.step()
    _advance(model, requests[0], _SETTLING // 2)
    return requests


def _timed(model: ModelEngine, request: Request, num_steps: int) -> tuple[float, float]:
    """Seconds of a step, by the first request's tokens: on average, and at the median."""
    times = request.listener.times_s  # type: ignore[attr-defined]
    first = len(times)
    _advance(model, request, num_steps)
    taken = times[first - 1 :]
    parts = [b - a for a, b in itertools.pairwise(taken)]
    return (taken[-1] - taken[0]) / len(parts), statistics.median(parts)


def _advance(model: ModelEngine, request: Request, num_tokens: int) -> None:
    wanted = request.num_output_tokens + num_tokens
    while request.num_output_tokens < wanted:
        assert not request.is_finished, f"ended: {request.finish_reason}, {request.error}"
        model.engine.step()


def _device_s(model: ModelEngine) -> float:
    """Of a step, with all of it queued before it begins."""
    executor = model.executor
    executor.device_s.clear()
    executor.is_holding = True
    while len(executor.device_s) < _HELD:
        model.engine.step()
    executor.is_holding = False
    return statistics.median(executor.device_s)


def _calls(ctx: Context, model: ModelEngine, case: str) -> Iterator[Row]:
    """Calls of the driver a step: where the host waits, copies, launches."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ctx.has_gpu else [])]
    model.engine.step()
    with profile(activities=activities) as profiled:
        for _ in range(_PROFILED):
            model.engine.step()
    counts = Counter[str]()
    for event in profiled.events():
        counts.update(name for name in _CALLS if event.name.startswith(name))
    a_step = {name: counts[name] / _PROFILED for name in _CALLS}
    waits = sum(a_step[name] for name in _WAITS)
    yield Row(
        f"{case}, waits for the device", waits, "a step", waits, "the read-back of tokens",
        at_most(1.0), is_timed=False, details=a_step,
    )  # fmt: skip


def _abort(model: ModelEngine, requests: list[Request]) -> None:
    for request in requests:
        if not request.is_finished:
            model.engine.abort(request)
    model.run()


# --- decodes beside a prompt ---------------------------------------------------------------------


def stall(ctx: Context) -> Iterator[Row]:
    """Tokens' distances of decodes while a prompt is computed in chunks, against those without."""
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
            model.engine.scheduler.stall.slowdown = slowdown
            case = f"{name}, at most {slowdown:g} times a decode step"
            yield from attempt(case, lambda c=case: _stall(ctx, c, model, batch, num_tokens))


def _stall(
    ctx: Context, case: str, model: ModelEngine, batch: int, num_tokens: int
) -> Iterator[Row]:
    sizes = ctx.sizes
    for _ in range(2):  # the first time warms up, and lets the scheduler learn steps' costs
        model.engine.flush_cache()
        alone, during, prompt_s = _distances(ctx, model, batch, num_tokens)
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


def _distances(
    ctx: Context, model: ModelEngine, batch: int, num_tokens: int
) -> tuple[list[float], list[float], float]:
    """Seconds between tokens without and beside a prompt, over all decodes; the prompt's seconds
    to its first token."""
    sizes = ctx.sizes
    listeners = [Clocked() for _ in range(batch)]
    requests = [
        model.submit(model.prompt(sizes.step_prompt), num_tokens, listener)
        for listener in listeners
    ]
    while min(request.num_output_tokens for request in requests) < 2:
        model.engine.step()
    _advance(model, requests[0], 2)
    first = time.perf_counter()
    _advance(model, requests[0], sizes.steps)
    arrival = time.perf_counter()
    late = model.submit(model.prompt(sizes.stall_prompt), 1, Clocked())
    while not late.is_finished:
        model.engine.step()
    end = time.perf_counter()
    _advance(model, requests[0], 1)
    alone = _between(listeners, first, arrival)
    during = _between(listeners, arrival, end)
    _abort(model, requests)
    return alone, during, end - arrival


def _between(listeners: list[Clocked], first: float, last: float) -> list[float]:
    """Of the tokens that came in this time, the distance from the one before."""
    return [
        later - earlier
        for listener in listeners
        for earlier, later in zip(listener.times_s, listener.times_s[1:])
        if first < later <= last
    ]
