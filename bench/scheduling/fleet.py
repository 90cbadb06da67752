"""A fleet computed by cells against the same one simulated exactly, and how long 10,000 GPUs take.

The response surface is learned from `--cell` engines simulated exactly at several rates; then
`--exact` engines are simulated exactly at each of `--shares` of what they can serve, and computed
by cells at the rates at which their calls came. Both kinds of runs count for `--seconds` after a
warm-up of two thirds as long. `cells / exact` is the ratio of each figure. The last rows are
`--gpus` GPUs, each with an engine, over an hour whose load swells and ebbs, with failures: seconds
that it took, learning included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import pi, sin
from typing import Any

import numpy as np

from ...flags import count
from ...planning.cells import SLOT_S, CellFleet, Failures, Pool
from ...planning.devices import GPUS
from ...planning.fleet_simulation import CallTimes, FleetSimulation
from ...planning.mixes import MIXES, Mix
from ...planning.simulated_engine import SimulatedEngine
from ...planning.surface import ROUTING, Cell, Surface, quantile
from ..harness.fleet_device import engine_of
from ..harness.report import write_report

_WARM_SHARE = 0.4
_FAILURES = Failures(mean_s=30 * 24 * 3600.0, repair_s=600.0, slow_share=0.01)
_LOOSE_S = 1e9
_FIRST_RATE = 2.0  # of an engine, from which to look for the largest


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench fleet`."""
    add = parser.add_argument
    add("--model", help="folder with config.json (default: the shape of Llama-3.1-8B)")
    add("--device", choices=[*GPUS], default="h200", help="default: %(default)s")
    add("--mix", choices=[mix.name for mix in MIXES], action="append", help="default: code")
    add("--cell", type=count, default=32, help="engines that are learned from (%(default)s)")
    add("--cell-calls", type=count, default=1200, help="of each of its runs (%(default)s)")
    add("--exact", type=count, default=64, help="engines of the comparison (%(default)s)")
    add("--shares", type=float, nargs="+", default=[0.5, 0.7], help="of what they can serve")
    add("--seconds", type=float, default=20.0, help="that count of a run (%(default)s)")
    add("--gpus", type=count, default=10_000, help="of the last rows (%(default)s)")
    add("--seed", type=int, default=0)
    add("--jobs", type=count, default=2, help="processes (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Simulate, compute and report."""
    engine = engine_of(args.model, args.device)
    rows = []
    with ProcessPoolExecutor(args.jobs) as jobs:
        for mix in [mix for mix in MIXES if mix.name in (args.mix or ["code"])]:
            began_s = time.monotonic()
            cell = Cell(engine, mix, args.cell, args.cell_calls, seed=args.seed + 1)
            limit = cell.largest_rate(_FIRST_RATE)
            surface = Surface.learn(replace(cell, least_s=args.seconds), limit, jobs)
            learned_s = time.monotonic() - began_s
            found = jobs.map(partial(_exact, engine, mix, surface.limit, args), args.shares)
            for share, exact in zip(args.shares, found, strict=True):
                rows += _compared(mix, share, surface, engine, exact, args)
            rows += _large(mix, surface, engine, learned_s, args)
    write_report("fleet", rows, args, device=args.device)
    return 0


@dataclass(frozen=True)
class _Exact:
    """An exact run: the figures of the calls that count, calls a second in each slot of their time,
    and CPU seconds a simulated second."""

    figures: dict[str, float]
    rates: Sequence[float]
    slot_s: float
    num_output: float  # tokens of a call, on average
    cost_s: float


def _exact(
    engine: SimulatedEngine, mix: Mix, limit: float, args: argparse.Namespace, share: float
) -> _Exact:
    duration_s = args.seconds / (1 - _WARM_SHARE)
    fleet = FleetSimulation([engine] * args.exact, ROUTING, seed=args.seed)
    starts = mix.starts(args.seed, share * limit * args.exact, duration_s)
    began_s = time.thread_time()
    fleet.run(starts, 2 * duration_s, counted_s=duration_s)
    begin_s = _WARM_SHARE * duration_s
    times = [each for each in fleet.times if begin_s <= each.asked_s < duration_s]
    num_tokens = sum(t.num_tokens for t in fleet.times if begin_s <= t.ended_s < duration_s)
    cost_s = (time.thread_time() - began_s) / fleet.now_s
    num_slots = max(1, round(args.seconds / SLOT_S))
    edges = np.linspace(begin_s, duration_s, num_slots + 1)
    num_asked, _ = np.histogram(fleet.asked_s, edges)
    slot_s = args.seconds / num_slots
    figures = {**_figures(times), "output tokens/s": num_tokens / args.seconds}
    num_output = float(np.mean([each.num_tokens for each in times]))
    return _Exact(figures, list(num_asked / slot_s), slot_s, num_output, cost_s)


def _figures(times: Sequence[CallTimes]) -> dict[str, float]:
    ttfts = np.array([each.ttft_s for each in times])
    tpots = np.array([each.tpot_s for each in times])
    ones = np.ones(len(times))
    return {
        "TTFT p50, ms": 1e3 * quantile(ttfts, ones, 0.5),
        "TTFT p90, ms": 1e3 * quantile(ttfts, ones, 0.9),
        "TPOT p50, ms": 1e3 * quantile(tpots, ones, 0.5),
        "TPOT p90, ms": 1e3 * quantile(tpots, ones, 0.9),
    }


def _pool(surface: Surface, engine: SimulatedEngine, number: int) -> Pool:
    device = engine.device
    return Pool("engines", surface, number, device.prefill_token_ms / 1e3, device.num_tokens)


def _compared(
    mix: Mix,
    share: float,
    surface: Surface,
    engine: SimulatedEngine,
    exact: _Exact,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    fleet = CellFleet([_pool(surface, engine, args.exact)], exact.num_output)
    found = fleet.run(exact.rates, exact.slot_s, ttft_s=_LOOSE_S, tpot_s=_LOOSE_S)
    computed = {
        "TTFT p50, ms": 1e3 * found.ttft_s[0.5],
        "TTFT p90, ms": 1e3 * found.ttft_s[0.9],
        "TPOT p50, ms": 1e3 * found.tpot_s[0.5],
        "TPOT p90, ms": 1e3 * found.tpot_s[0.9],
        "output tokens/s": found.output_tokens_s,
    }
    name = f"{mix.name}, {args.exact} engines at {share:g}"
    rows = [_row(name, each, computed[each], exact.figures[each]) for each in computed]
    return [*rows, _row(name, "cpu s a simulated s, exactly", None, exact.cost_s)]


def _row(case: str, figure: str, computed: float | None, exact: float | None) -> dict[str, Any]:
    ratio = computed / exact if computed is not None and exact else None
    return {"case": case, "figure": figure, "cells": computed, "exact": exact, "ratio": ratio}


def _large(
    mix: Mix, surface: Surface, engine: SimulatedEngine, learned_s: float, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """An hour: between 0.2 and 0.9 of what all can serve."""
    num_slots = round(3600 / SLOT_S)
    most = surface.limit * args.gpus
    rates = [most * (0.55 + 0.35 * sin(2 * pi * n / num_slots)) for n in range(num_slots)]
    began_s = time.monotonic()
    fleet = CellFleet([_pool(surface, engine, args.gpus)], 1.0, _FAILURES, args.seed)
    figures = fleet.run(rates, ttft_s=1.0, tpot_s=0.05)
    took_s = time.monotonic() - began_s
    name = f"{mix.name}, {args.gpus} GPUs, an hour"
    return [
        _row(name, "s, learning", learned_s, None),
        _row(name, "s, computing", took_s, None),
        _row(name, "million calls", figures.num_calls / 1e6, None),
        _row(name, "good within 1 s and 50 ms", figures.good_share, None),
    ]
