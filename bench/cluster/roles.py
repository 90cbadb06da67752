"""Prefill and decode apart against engines that do both, on GPUs known by their data sheets:
simulated.

The real scheduler and radix tree of each engine, and what decides whether a prompt is computed
elsewhere, over the steps that `stemma plan` predicts; KV goes layer by layer over `--link`. A call
is good within `TTFT` and `TPOT`; `calls/s` is the largest rate of which `--share` are good, `ratio`
that through the better one of engines that do both. At that rate, or the last one tried below it:
the 90th percentiles, how busy engines of either kind are, the share of calls whose prompt came from
elsewhere, and `hidden`, the share of sending during which more of the prompt was computed. The
first limit of a mix leaves decode steps little room, the last one much.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from ...flags import count
from ...planning.devices import GPUS, links_of
from ...planning.mixes import MIXES, Mix
from ...planning.roles import Fleet, Goodput, Layout, Limits, Search, layouts
from ..harness.fleet_device import device_of
from ..harness.report import percentile, write_report

_FIRST_RATE = {"chat": 16.0, "rag": 2.0, "code": 8.0}  # of an engine, from which to search
TTFT_S = {"chat": 0.2, "rag": 1.0, "code": 0.2}
_TPOT_S = (0.010, 0.015, 0.030)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench roles`."""
    add = parser.add_argument
    add("--model", type=Path, help="folder with config.json (default: the shape of Llama-3.1-8B)")
    add("--device", choices=[*GPUS], default="h100", help="default: %(default)s")
    add("--engines", type=count, default=4, help="GPUs, each with the model (default: %(default)s)")
    add("--mix", choices=[mix.name for mix in MIXES], action="append", help="default: all")
    add("--link", choices=("nvlink", "pcie", "ethernet"), default="nvlink")
    add("--tpot-ms", type=float, nargs="+", default=[1e3 * each for each in _TPOT_S])
    add("--share", type=float, default=0.9, help="of calls that are to be good (%(default)s)")
    add("--seconds", type=float, default=24.0, help="simulated, of a rate (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--jobs", type=count, default=os.cpu_count(), help="processes (default: one a core)")


def run(args: argparse.Namespace) -> int:
    """Simulate and report."""
    fleet = Fleet(
        device_of(args.model, args.device), args.engines, links_of(GPUS[args.device])[args.link]
    )
    mixes = [mix for mix in MIXES if mix.name in (args.mix or [each.name for each in MIXES])]
    each = [(mix, layout) for mix in mixes for layout in layouts(args.engines)]
    with ProcessPoolExecutor(args.jobs) as pool:
        found = dict(zip(each, pool.map(partial(_found, fleet, args), *zip(*each)), strict=True))
    rows = [row for mix in mixes for row in _rows(mix, found, args)]
    write_report("roles", rows, args, device=args.device, mixes={m.name: m.text for m in mixes})
    return 0


def _found(fleet: Fleet, args: argparse.Namespace, mix: Mix, layout: Layout) -> list[Goodput]:
    """One a limit of TPOT."""
    search = Search(
        fleet,
        layout,
        mix,
        first_rate=_FIRST_RATE[mix.name] * args.engines,
        seed=args.seed,
        duration_s=args.seconds,
    )
    return [search.goodput(limits, args.share) for limits in _limits(mix, args)]


def _limits(mix: Mix, args: argparse.Namespace) -> list[Limits]:
    return [Limits(TTFT_S[mix.name], tpot_ms / 1e3) for tpot_ms in args.tpot_ms]


def _rows(
    mix: Mix, found: Mapping[tuple[Mix, Layout], list[Goodput]], args: argparse.Namespace
) -> list[dict[str, Any]]:
    rows = []
    for number, limits in enumerate(_limits(mix, args)):
        goods = {each: found[mix, each][number] for each in layouts(args.engines)}
        both = max(good.rate for layout, good in goods.items() if not layout.num_prefill)
        rows += [_row(mix, limits, layout, good, both) for layout, good in goods.items()]
    return rows


def _row(mix: Mix, limits: Limits, layout: Layout, good: Goodput, both: float) -> dict[str, Any]:
    run, num_prefill = good.run, layout.num_prefill
    times = [] if run is None else run.times
    busy = [] if run is None else run.busy
    first = len(busy) - num_prefill
    return {
        "mix": mix.name,
        "TTFT ms": round(1e3 * limits.ttft_s),
        "TPOT ms": 1e3 * limits.tpot_s,
        "engines": layout.name,
        "calls/s": good.rate,
        "ratio": good.rate / both if both else None,
        "TTFT p90 ms": _p90_ms([each.ttft_s for each in times]),
        "TPOT p90 ms": _p90_ms([each.tpot_s for each in times]),
        "busy": _mean(busy[:first]),
        "busy, prefill": _mean(busy[first:]),
        "elsewhere": min(1.0, run.num_asked / run.num_all) if run and num_prefill else None,
        "hidden": run.hidden if run else None,
    }


def _p90_ms(seconds: Sequence[float]) -> float | None:
    return 1e3 * percentile(sorted(seconds), 90) if seconds else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
