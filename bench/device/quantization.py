"""Weights of 8 and 4 bits against bfloat16 on this CPU: linears, whole steps, memory, accuracy.

All formats take turns within one process, a call each in every round; a ratio compares medians over
the rounds, or with --fastest the fastest (for a machine that others use too). The bytes of a linear
at one row divided by its time are held against what this machine reads from memory. Weights are
random; the accuracy is the embedded model's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ...flags import count
from ...runtime.config import QUANTIZATIONS
from ...runtime.execute.threads import configure_threads
from ...runtime.schedule.plan import PageUpdate, Row, StepPlan
from ...runtime.schedule.sampling_params import SamplingParams
from ..harness.model import PRESETS, Shape, checkpoint_config
from ..harness.report import print_table, write_file
from .quantization_accuracy import accuracy_rows, evaluation_rows

if TYPE_CHECKING:
    from ...kernels.ops import Linear, Weight
    from ...runtime.execute.model_runner import ModelRunner

SHAPES = {"llama-1b": Shape(2048, 16, 32, 8, 64, 8192), "llama-160m": PRESETS["llama-160m"]}
COLD_BYTES = 96 << 20  # of a linear's copies in 4 bits, together: more than the caches hold
_READ_BYTES = 256 << 20
_GREEDY = SamplingParams(temperature=0.0)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench quantization`."""
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), action="append", help="default: all")
    add("--part", choices=("linears", "steps", "accuracy"), action="append", help="default: all")
    add("--vocab", type=count, default=32_000, metavar="N", help="tokens (default: %(default)s)")
    add("--rows", type=count, nargs="+", default=[1, 4, 16, 512], metavar="N", help="of a linear")
    add("--prompt-tokens", type=count, default=512, metavar="N")
    add("--context-tokens", type=int, default=64, metavar="N", help="before a decode step")
    add("--repeats", type=count, default=9, help="rounds (default: %(default)s)")
    add("--fastest", action="store_true", help="report the fastest rounds, not medians")
    add("--quality", type=int, default=0, metavar="CASES",
        help="also run the embedded model's evaluation, so many cases of each skill")  # fmt: skip
    add("--copy", type=Path, action="append", default=[], metavar="FOLDER",
        help="of the embedded model by `stemma quantize`: its accuracy, too")  # fmt: skip
    add("--num-threads", type=count, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    if args.num_threads:
        configure_threads(args.num_threads, None)
    import torch

    shapes = {
        name: replace(SHAPES[name], vocab=args.vocab) for name in args.shape or sorted(SHAPES)
    }
    parts = args.part or ["linears", "steps", "accuracy"]
    tables: dict[str, list[dict[str, Any]]] = {}
    with torch.inference_mode():
        read_gb_s = measured_read_gb_s()
        if "linears" in parts:
            tables["linears"] = [
                row for name, shape in shapes.items() for row in linear_rows(name, shape, args)
            ]
        if "steps" in parts:
            for name, shape in shapes.items():
                tables.setdefault("steps", []).extend(step_rows(name, shape, args))
        if "accuracy" in parts:
            tables["accuracy"] = accuracy_rows(copies=args.copy)
    if args.quality:
        tables["evaluation"] = evaluation_rows(args.quality)
    _report(tables, read_gb_s, args)
    return 0


def _report(
    tables: Mapping[str, list[dict[str, Any]]], read_gb_s: float, args: argparse.Namespace
) -> None:
    rows = [{"table": name, **row} for name, table in tables.items() for row in table]
    path = write_file("quantization", rows, args, read_gb_s=read_gb_s)
    if args.json:
        print(json.dumps(rows))
        return
    for name, table in tables.items():
        print_table(f"quantization: {name}", table)
    print(f"this machine reads {read_gb_s:.1f} GB/s; written to {path}")


def measured_read_gb_s() -> float:
    """The fastest of several passes of bfloat16 linears at one row over weights larger than the
    caches: a kernel that does nothing but read."""
    import torch

    from ...kernels.registry import select_kernels

    side = 4096
    make = select_kernels(torch.bfloat16).make_linear
    weight = torch.zeros(side, side, dtype=torch.bfloat16)
    linears = [make(weight, None) for _ in range(_READ_BYTES // weight.nbytes)]
    x = torch.zeros(1, side, dtype=torch.bfloat16)
    fastest = min(_seconds(linears, x) for _ in range(9))
    return len(linears) * weight.nbytes / fastest / 1e9


@dataclass(frozen=True)
class Layer:
    """One linear of a Llama."""

    name: str
    num_inputs: int
    num_outputs: int
    is_gated: bool = False


def layers_of(shape: Shape) -> tuple[Layer, ...]:
    """The linears of one decoder layer, and the output projection."""
    return (
        Layer("qkv", shape.hidden, (shape.query_heads + 2 * shape.kv_heads) * shape.head_dim),
        Layer("o", shape.query_heads * shape.head_dim, shape.hidden),
        Layer("gate, up", shape.hidden, 2 * shape.intermediate, is_gated=True),
        Layer("down", shape.intermediate, shape.hidden),
        Layer("lm_head", shape.hidden, shape.vocab),
    )


def linear_rows(name: str, shape: Shape, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each linear and number of input rows."""
    found = []
    for layer in layers_of(shape):
        few = [rows for rows in args.rows if rows < 64]
        for batches, num_copies in ((few, _num_copies(layer)), (set(args.rows) - set(few), 1)):
            if batches:
                linears, num_bytes = _linears(layer, num_copies)
                found += [
                    {"shape": name, "linear": layer.name}
                    | _linear_row(layer, linears, num_bytes, rows, args)
                    for rows in sorted(batches)
                ]
    return found


def _num_copies(layer: Layer) -> int:
    return -(-COLD_BYTES * 2 // (layer.num_inputs * layer.num_outputs))


def _linears(layer: Layer, num_copies: int) -> tuple[dict[str, list[Linear]], dict[str, int]]:
    """Copies of a linear in each format, and the bytes of one copy."""
    import torch

    from ...kernels.registry import select_kernels
    from ...runtime.checkpoint.quantized.rounding import (
        group_size_for,
        round_to_4_bits,
        round_to_8_bits,
    )

    group_size = group_size_for(layer.num_inputs)
    assert group_size is not None, "shapes that can be rounded"
    kernels = select_kernels(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    dense = torch.empty(layer.num_outputs, layer.num_inputs).normal_(std=0.02, generator=generator)
    weights: dict[str, Weight] = {
        "none": dense.bfloat16(),
        "int8": round_to_8_bits(dense),
        "w8a8": round_to_8_bits(dense, "int8"),
        "int4": round_to_4_bits(dense, group_size),
    }
    make = kernels.make_gated_linear if layer.is_gated else kernels.make_linear
    linears = {
        name: [make(weight, None) for _ in range(num_copies)] for name, weight in weights.items()
    }
    num_bytes = {
        name: weight.nbytes if isinstance(weight, torch.Tensor) else weight.num_bytes
        for name, weight in weights.items()
    }
    return linears, num_bytes


def _linear_row(
    layer: Layer,
    linears: Mapping[str, list[Linear]],
    num_bytes: Mapping[str, int],
    rows: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    import torch

    x = torch.randn(rows, layer.num_inputs, generator=torch.Generator().manual_seed(0)).bfloat16()
    rounds = _rounds(
        {key: partial(_seconds, each, x) for key, each in linears.items()}, args.repeats
    )
    each = {key: times / len(linears[key]) for key, times in _typical(rounds, args).items()}
    row: dict[str, Any] = {
        "rows": rows,
        "bf16, us": each["none"] * 1e6,
        "bf16, GB/s": num_bytes["none"] / each["none"] / 1e9,
    }
    for key in QUANTIZATIONS[1:]:
        row[f"{key}, us"] = each[key] * 1e6
        row[f"{key}, GB/s"] = num_bytes[key] / each[key] / 1e9
        row[f"bf16 / {key}"] = each["none"] / each[key]
    return row


def step_rows(name: str, shape: Shape, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each format: a whole model's decode step, prefill and memory."""
    runners = {key: _runner(shape, key, args) for key in QUANTIZATIONS}
    for runner in runners.values():
        runner.warm_up()
    plans = {
        "decode": _plan(args.context_tokens, 1),
        f"prefill {args.prompt_tokens}": _plan(0, args.prompt_tokens),
    }
    seconds = {
        kind: _typical(
            _rounds(
                {key: partial(_step_seconds, each, plan) for key, each in runners.items()},
                args.repeats,
            ),
            args,
        )
        for kind, plan in plans.items()
    }
    rows = []
    for key, runner in runners.items():
        row: dict[str, Any] = {
            "shape": name,
            "format": "bf16" if key == "none" else key,
            "weights, MB": _weight_bytes(runner, key) / 1e6,
        }
        for kind, found in seconds.items():
            row[f"{kind}, ms"] = found[key] * 1e3
            row[f"bf16 / it, {kind}"] = found["none"] / found[key]
        rows.append(row)
    return rows


def _runner(shape: Shape, quantization: str, args: argparse.Namespace) -> ModelRunner:
    from ...runtime.execute.model_runner import ModelRunner
    from ...runtime.models.model_config import read_model_config

    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(checkpoint_config(shape)))
        tokens = max(args.prompt_tokens, args.context_tokens + 1)
        return ModelRunner(
            folder,
            read_model_config(folder),
            dtype="bfloat16",
            max_total_tokens=tokens,
            max_model_len=tokens,
            max_running_requests=1,
            max_step_tokens=args.prompt_tokens,
            load_format="dummy",
            quantization=quantization,  # type: ignore[arg-type]
        )


def _weight_bytes(runner: ModelRunner, quantization: str) -> int:
    """Bytes of all weights, by the cost model's calculation."""
    from ...planning.served_model import ServedModel

    return ServedModel.of(runner.config, "bfloat16", quantization).weight_bytes


def _plan(before: int, num_tokens: int) -> StepPlan:
    pages = tuple(range(before + num_tokens))
    update = PageUpdate(0, pages)
    return StepPlan(0, (Row(0, 0, before, (1,) * num_tokens, update, sampling=_GREEDY),))


def _step_seconds(runner: ModelRunner, plan: StepPlan) -> float:
    started = time.perf_counter()
    runner.execute(plan)
    return time.perf_counter() - started


def _seconds(linears: list[Linear], x: Any) -> float:
    started = time.perf_counter()
    for linear in linears:
        linear(x)
    return time.perf_counter() - started


def _rounds(calls: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run each call once per round, so that disturbances hit all alike; the first round is left
    out."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + repeats):
        for name, call in calls.items():
            times[name].append(call())
    return {name: found[1:] for name, found in times.items()}


def _typical(times: Mapping[str, list[float]], args: argparse.Namespace) -> dict[str, float]:
    chosen = min if args.fastest else statistics.median
    return {name: chosen(found) for name, found in times.items()}
