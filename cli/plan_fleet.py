"""`stemma plan MODEL --fleet h200=64,l4=16 --trace FILE`: which of these GPUs serve the trace
within limits for the least money, and how they are used: a table, a page with charts, a manifest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from ..bench.harness.report import print_table
from ..errors import InvalidRequest
from ..kernels.kv_cache_dtype import kv_cache_dtypes_of_gpu
from ..planning.charts import bar_chart, line_chart, page, table
from ..planning.devices import GPUS
from ..planning.fleet_plan import FleetPlan, Option, PlannedPool, Wish, plan_fleet
from ..planning.formats import DTYPE_BYTES, stored_quantization
from ..planning.kuberay import DeployedPool, manifest
from ..planning.model_shape import ModelShape
from ..planning.prices import GPU_HOUR
from ..planning.roles import Limits
from ..planning.surface import quantile
from ..planning.trace_files import Trace, read_trace
from ..runtime.checkpoint.formats import require_kv_cache_dtype, require_quantization, stored_method
from ..runtime.models.model_config import read_model_config

_MAX_GPUS = 100_000
_MODEL_PATH = "/models/model"  # as the containers see it


def add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that ask for it."""
    group = parser.add_argument_group("a fleet for a trace")
    add = group.add_argument
    add("--fleet", metavar="GPU=N,...", help=f"GPUs that there are, of {', '.join(GPUS)}")
    add(
        "--trace", type=Path, metavar="FILE",
        help="what is asked of them: JSON lines of ours or Mooncake's, CSV of BurstGPT or Azure",
    )  # fmt: skip
    add(
        "--slo", default="ttft=1,tpot=0.05", metavar="LIMITS",
        help="seconds of a good call, whose share is --good-share (default: %(default)s)",
    )  # fmt: skip
    add("--load", type=float, default=1.0, metavar="TIMES", help="programs, times the trace's")
    add(
        "--price", default="", metavar="GPU=DOLLARS,...",
        help="an hour of a GPU (default: guesses from clouds' lists)",
    )  # fmt: skip
    add(
        "--host-gb", type=float, default=64.0, metavar="GB",
        help="of host memory for a GPU's KV, if that pays (default: %(default)g)",
    )  # fmt: skip
    add(
        "--acceptance", type=float, default=0.0, metavar="SHARE",
        help="of guessed tokens that are right, as /metrics says; 0: nothing is guessed (default)",
    )  # fmt: skip
    add(
        "--calibration", default="", metavar="GPU=FILE,...",
        help="reports of `stemma bench step` on these GPUs, by which steps are corrected",
    )  # fmt: skip
    add("--jobs", type=int, metavar="N", help="processes (default: one a core)")
    add(
        "--out", type=Path, metavar="FOLDER",
        help="write plan.json, plan.html with charts, and kuberay.yaml for `stemma deploy` there",
    )  # fmt: skip


def run_fleet(args: argparse.Namespace, folder: Path) -> int:
    """Plan, print and write. The exit status is 1 where the limits are not met."""
    wish = _wish(args, folder)
    say = partial(print, file=sys.stderr)
    with ProcessPoolExecutor(args.jobs or os.cpu_count()) as jobs:
        plan = plan_fleet(wish, args.load, jobs, say)
    report = _report(args, wish, plan)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "plan.json").write_text(json.dumps(report, indent=1) + "\n")
        (args.out / "plan.html").write_text(_page(report, plan, wish))
        (args.out / "kuberay.yaml").write_text(manifest(_deployed(wish, plan), _MODEL_PATH))
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0 if plan.is_enough else 1


def _wish(args: argparse.Namespace, folder: Path) -> Wish:
    """Raises InvalidRequest."""
    if args.trace is None:
        raise InvalidRequest.of("trace", None, "a file, with --fleet")
    for name, least in (("load", 1e-6), ("host_gb", 0.0)):
        if not getattr(args, name) >= least:
            raise InvalidRequest.of(name, getattr(args, name), f"a number >= {least:g}")
    if not 0 <= args.acceptance < 1:
        raise InvalidRequest.of("acceptance", args.acceptance, "a number in [0, 1)")
    if not 0 < args.good_share <= 1:
        raise InvalidRequest.of("good_share", args.good_share, "a number in (0, 1]")
    gpus = _pairs("fleet", args.fleet, int)
    for name, number in gpus.items():
        if not 1 <= number <= _MAX_GPUS:
            raise InvalidRequest.of("fleet", f"{name}={number}", f"GPUs in [1, {_MAX_GPUS}]")
    limits = _pairs("slo", args.slo, float, known=("ttft", "tpot"))
    if set(limits) != {"ttft", "tpot"} or min(limits.values()) <= 0:
        raise InvalidRequest.of("slo", args.slo, "ttft=SECONDS,tpot=SECONDS, both > 0")
    prices = dict(GPU_HOUR) | _pairs("price", args.price, float)
    if min(prices.values()) < 0:
        raise InvalidRequest.of("price", args.price, "dollars >= 0")
    dtype = "bfloat16" if args.dtype == "auto" else args.dtype
    if DTYPE_BYTES[dtype] != 2:
        raise InvalidRequest.of("dtype", dtype, "auto, bfloat16 or float16 with --fleet")
    quantization = args.quantization or "none"
    require_quantization(quantization, folder, stored_method(folder))
    config = read_model_config(folder)
    if quantization == "none":
        quantization = stored_quantization(folder, ModelShape.of(config))
    for name in gpus:
        capability = GPUS[name].capability
        assert capability is not None, "it is a GPU"
        known = kv_cache_dtypes_of_gpu(DTYPE_BYTES[dtype], capability)
        require_kv_cache_dtype(args.kv_cache_dtype, known, dtype, name)
    return Wish(
        config,
        gpus,
        read_trace(args.trace),
        Limits(limits["ttft"], limits["tpot"]),
        args.good_share,
        prices,
        dtype,
        quantization,
        args.kv_cache_dtype,
        int(args.host_gb * 1e9),
        args.acceptance,
        args.max_running_requests,
        _pairs("calibration", args.calibration, Path),
    )


def _pairs(
    field: str, text: str, kind: Callable[[str], Any], known: tuple[str, ...] = tuple(GPUS)
) -> dict[str, Any]:
    """NAME=VALUE,... Raises InvalidRequest."""
    found = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        try:
            if name not in known or name in found:
                raise ValueError(name)
            found[name] = kind(value)
        except ValueError as error:
            allowed = f"NAME=VALUE,... with each name once, of {', '.join(known)}"
            raise InvalidRequest.of(field, part, allowed) from error
    return found


def _report(args: argparse.Namespace, wish: Wish, plan: FleetPlan) -> dict[str, Any]:
    """All that is printed and written, as data."""
    figures, trace = plan.figures, wish.trace
    report: dict[str, Any] = {
        "model": str(args.model or "the embedded model"),
        "trace": _trace_row(trace, args.load),
        "limits": {"ttft_s": wish.limits.ttft_s, "tpot_s": wish.limits.tpot_s},
        "pools": [_pool_row(each) for each in plan.pools],
        "options": [_option_row(each, wish) for each in plan.options],
        "fleet": {
            "within the limits": round(figures.good_share, 4),
            "is enough": plan.is_enough,
            "TTFT p50, s": _rounded(figures.ttft_s[0.5]),
            "TTFT p90, s": _rounded(figures.ttft_s[0.9]),
            "TPOT p50, s": _rounded(figures.tpot_s[0.5]),
            "output tokens/s": round(figures.output_tokens_s, 1),
            "hit rate": round(figures.hit_rate, 3),
            "$ a million output tokens": _rounded(figures.cost_per_million),
            "$ an hour": round(sum(_hourly(each) for each in plan.pools), 2),
        },
        "commands": [
            " ".join(pool.command(num, _MODEL_PATH))
            for pool in _deployed(wish, plan)
            for num in pool.parts()
        ],
        "not used": dict(plan.why_not),
    }
    if plan.checked is not None:
        report["exactly"] = {
            "busiest, s": round(plan.checked.seconds, 1),
            "calls": plan.checked.num_calls,
            "within the limits": round(plan.checked.good_share, 4),
            "TTFT p50, s": _rounded(plan.checked.ttft_s),
            "TPOT p50, s": _rounded(plan.checked.tpot_s),
        }
    return report


def _trace_row(trace: Trace, times: float) -> dict[str, Any]:
    rates = [times * rate for rate in trace.call_rates(10.0)]
    return {
        "name": trace.name,
        "programs": len(trace.programs),
        "calls of a program": round(trace.num_calls, 2),
        "hours": round(trace.duration_s / 3600, 3),
        "calls/s": round(sum(rates) / len(rates), 3),
        "calls/s, busiest 10 s": round(max(rates), 3),
        "output tokens of a call": round(trace.num_output, 1),
    }


def _pool_row(each: PlannedPool) -> dict[str, Any]:
    option = each.option
    return {
        "GPU": option.gpu,
        "replicas": each.num_replicas,
        "tp": option.tp_size,
        "GPUs": each.num_replicas * option.tp_size,
        "engines": option.name,
        "of the programs": round(each.share, 4),
        "host KV, tokens": option.host_tokens,
        "calls/s a replica": round(each.good_calls_s, 3),
        "$ an hour": round(_hourly(each), 2),
    }


def _hourly(each: PlannedPool) -> float:
    return each.num_replicas * each.pool.price_s * 3600


def _option_row(each: Option, wish: Wish) -> dict[str, Any]:
    hourly = each.calls_s * 3600
    price = wish.prices[each.gpu] / hourly * 1e3 if hourly else None
    return {
        "GPU": each.gpu,
        "tp": each.tp_size,
        "engines": each.name,
        "calls/s a GPU": None if each.less_than else round(each.calls_s, 3),
        "less than": round(each.less_than, 3) if each.less_than else None,
        "$ a thousand calls": None if price is None else _rounded(price),
        "on Ray": "yes" if each.is_deployable else "not yet",
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _deployed(wish: Wish, plan: FleetPlan) -> list[DeployedPool]:
    """What `stemma deploy` is to start."""
    pools = []
    for each in plan.pools:
        option = each.option
        flags = option.layout.chunking.flags()
        flags += [f"--tp-size {option.tp_size}"] if option.tp_size > 1 else []
        flags += (
            [] if wish.kv_cache_dtype == "auto" else [f"--kv-cache-dtype {wish.kv_cache_dtype}"]
        )
        flags += [] if wish.quantization == "none" else [f"--quantization {wish.quantization}"]
        flags += [f"--max-running-requests {wish.max_running_requests}"]
        flags += [f"--host-kv-tokens {option.host_tokens}"] if option.host_tokens else []
        flags += [] if option.acceptance else ["--speculate off"]
        words = tuple(word for flag in flags for word in flag.split())
        pools.append(DeployedPool(option.gpu, each.num_replicas, option.tp_size, words))
    return pools


def _page(report: dict[str, Any], plan: FleetPlan, wish: Wish) -> str:
    charts = [
        bar_chart(
            "Calls a second of one GPU within the limits",
            [
                (
                    f"{o.gpu} x {o.tp_size}, {o.name}{', less than' if o.less_than else ''}",
                    o.less_than or o.calls_s,
                )
                for o in plan.options
            ],
        ),
        line_chart(
            "Time to first token by the rate of calls",
            "calls/s of a replica",
            "TTFT p90, s",
            {each.option.gpu: _curve(each, 0) for each in plan.learned},
            limit=wish.limits.ttft_s,
        ),
        line_chart(
            "Time per output token by the rate of calls",
            "calls/s of a replica",
            "TPOT p90, s",
            {each.option.gpu: _curve(each, 1) for each in plan.learned},
            limit=wish.limits.tpot_s,
        ),
    ]
    parts = [
        table([report["trace"]]),
        table(report["pools"]),
        table([report["fleet"]]),
        *charts,
        table(report["options"]),
        "".join(f"<pre>{command}</pre>" for command in report["commands"]),
    ]
    return page(f"A fleet for {wish.trace.name}", parts)


def _curve(each: PlannedPool, column: int) -> list[tuple[float, float]]:
    points = [point for point in each.pool.surface.points if len(point.times)]
    return [
        (point.rate, quantile(point.times[:, column], 0 * point.times[:, 0] + 1, 0.9))
        for point in points
    ]


def _print(report: dict[str, Any]) -> None:
    print_table("trace", [report["trace"]])
    print_table("ways to use them", report["options"])
    print_table("pools", report["pools"])
    print_table("the fleet", [report["fleet"]])
    if "exactly" in report:
        print_table("its busiest part, simulated exactly", [report["exactly"]])
    for gpu, why in report["not used"].items():
        print(f"{gpu} is not used: {why}")
    if not report["fleet"]["is enough"]:
        print("all of these GPUs together do not serve the trace within the limits")
    for command in report["commands"]:
        print(command)
