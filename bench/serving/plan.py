"""Predictions of `stemma plan` against the engine itself, on this CPU: the ratio of each pair.

Predicted and measured in the same run: the probe, then each step and load on a real model runner
behind the real scheduler, in one process, without the wire.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...flags import count
from ...planning.closed_loop import ClosedLoop, Load
from ...planning.prediction import LoadFigures, NamedStep, predict_load, predict_step, usual_steps
from ...planning.roofline import CostModel
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ...runtime.config import QUANTIZATIONS
from ...runtime.execute.dtype_name import dtype_name
from ...runtime.execute.threads import configure_threads, default_num_threads
from ...runtime.schedule.plan import PageUpdate, Row, StepPlan
from ...runtime.schedule.sampling_params import SamplingParams
from ..harness.report import write_report

if TYPE_CHECKING:
    from ...runtime.execute.model_runner import ModelRunner

_TOKEN_BUDGET = 2048
_GREEDY = SamplingParams(temperature=0.0)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench plan`."""
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL, help="checkpoint folder")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="none")
    parser.add_argument("--clients", type=count, nargs="+", default=[1, 8, 64], metavar="N")
    parser.add_argument("--prompt-tokens", type=count, default=256, metavar="N")
    parser.add_argument("--output-tokens", type=count, default=64, metavar="N")
    parser.add_argument("--repeats", type=count, default=9, help="steps of a kind, for the median")
    parser.add_argument("--num-threads", type=count, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Predict, measure and report."""
    configure_threads(args.num_threads or default_num_threads(args.model), None)
    from ...planning.probe import cost_model
    from ...planning.served_model import ServedModel
    from ...runtime.execute.model_runner import ModelRunner, resolve_dtype
    from ...runtime.models.model_config import read_model_config

    config = read_model_config(args.model)
    dtype = dtype_name(resolve_dtype("auto"))
    costs = cost_model(ServedModel.of(config, dtype, args.quantization))
    kv_tokens = max(args.clients) * (args.prompt_tokens + args.output_tokens + 1)
    runner = ModelRunner(
        args.model,
        config,
        max_total_tokens=kv_tokens,
        max_running_requests=max(args.clients),
        max_step_tokens=_TOKEN_BUDGET,
        quantization=args.quantization,
    )
    runner.warm_up()
    context = args.prompt_tokens + args.output_tokens // 2
    rows = [
        _pair(
            step.name, "ms", predict_step(costs, step).total_s * 1e3, _step_ms(runner, step, args)
        )
        for step in usual_steps(args.clients, args.prompt_tokens, context)
    ]
    for clients in args.clients:
        rows += _load_rows(runner, costs, clients, kv_tokens, args)
    write_report("plan", rows, args)
    return 0


def _step_ms(runner: ModelRunner, step: NamedStep, args: argparse.Namespace) -> float:
    """The median of several steps, without the first two of their kind."""
    times = []
    for number in range(2 + args.repeats):
        plan = StepPlan(number, tuple(_rows(step)))
        started = time.perf_counter()
        runner.execute(plan)
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[2:])


def _rows(step: NamedStep) -> list[Row]:
    """Rows with separate pages; the KV contents do not affect the time."""
    rows, page = [], 0
    for index, (num_tokens, before) in enumerate(step.rows):
        pages = tuple(range(page, page + before + num_tokens))
        page += len(pages)
        update = PageUpdate(0, pages)
        rows.append(Row(index, index, before, (0,) * num_tokens, update, sampling=_GREEDY))
    return rows


def _load_rows(
    runner: ModelRunner, costs: CostModel, clients: int, kv_tokens: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    load = Load(clients, args.prompt_tokens, 0, args.output_tokens)
    limits = {
        "kv_tokens": kv_tokens,
        "token_budget": _TOKEN_BUDGET,
        "max_running_requests": max(args.clients),
    }
    predicted = predict_load([costs], load, **limits)
    loop = ClosedLoop(
        runner, load, clock=time.perf_counter, vocab_size=costs.model.config.vocab_size, **limits
    )
    measured = LoadFigures.of(loop, loop.run())
    name = f"{clients} clients"
    return [
        _pair(f"{name}, TTFT p50", "ms", predicted.ttft_s * 1e3, measured.ttft_s * 1e3),
        _pair(f"{name}, TPOT p50", "ms", predicted.tpot_s * 1e3, measured.tpot_s * 1e3),
        _pair(name, "output tokens/s", predicted.output_tokens_s, measured.output_tokens_s),
    ]


def _pair(case: str, unit: str, predicted: float, measured: float) -> dict[str, Any]:
    return {
        "case": case,
        "unit": unit,
        "predicted": round(predicted, 3),
        "measured": round(measured, 3),
        "predicted / measured": round(predicted / measured, 2),
    }
