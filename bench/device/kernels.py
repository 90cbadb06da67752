"""The compiled CPU kernels beside torch's calls: linears, attention, what stands between them.

torch computes in bfloat16 and in float32. All take turns within one process and with as many
threads; a ratio is the median over the rounds of torch's time through the compiled kernel's in the
same round, or with --fastest that of the fastest. One thread is measured in its CPU time, which the
turns of other processes do not count in. The limit is the larger of two times at this machine's
limits (`stemma bench limits`): for reading the weights or the KV, and for the products. torch gets
weights in the dtype of its products, and KV that lies together in memory; our KV is paged.
STEMMA_CPU=avx2 measures another instruction set than the best that the CPU has.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import InvalidRequest
from ...flags import count
from ...runtime.execute.threads import configure_threads
from ..harness import limits
from ..harness.report import write_report

if TYPE_CHECKING:
    from torch import Tensor

    from ...kernels.ops import KVLayer, Linear, RMSNorm, Weight

COLD_BYTES = 96 << 20  # of a linear's copies, together: more than the caches hold
EPS = 1e-5
TURN_S = 0.01  # of each call in a round, at least one
MAX_CALLS = 100  # in a turn
BFLOAT16, FLOAT32 = "torch bf16", "torch float32"


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel on some input, and what it has to do."""

    op: str
    shape: str
    rows: int
    format: str  # of weights or KV
    call: Callable[[], object]
    num_bytes: int  # read from memory: weights or KV
    num_flop: int


@dataclass(frozen=True, slots=True)
class Contest:
    """Kernels that compute the same, of several formats, and torch's calls for it."""

    kernels: Sequence[Kernel]
    torch_calls: Mapping[str, Callable[[], object]]  # by BFLOAT16 and FLOAT32


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench kernels`."""
    add = parser.add_argument
    add("--size", type=count, nargs=2, default=(2048, 4096), metavar=("IN", "OUT"),
        help="of the linear layer; norms have IN (default: 2048 4096)")  # fmt: skip
    add("--rows", type=count, nargs="+", default=[1, 8, 32, 128], metavar="N", help="of a linear")
    add("--batches", type=count, nargs="+", default=[1, 32], metavar="N", help="of the others")
    add("--contexts", type=count, nargs="+", default=[64, 256, 1024, 2048], metavar="TOKENS")
    add("--heads", type=count, nargs=3, default=(32, 8, 64), metavar=("Q", "KV", "DIM"),
        help="of attention and rotation (default: 32 8 64)")  # fmt: skip
    add("--page-size", type=count, default=1, metavar="TOKENS", help="(default: %(default)s)")
    add("--rounds", type=count, default=7, metavar="N", help="(default: %(default)s)")
    add("--fastest", action="store_true", help="report the fastest rounds, not medians")
    add("--num-threads", type=count, metavar="N", help="(default: one a core)")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    num_threads = args.num_threads or len(os.sched_getaffinity(0))
    configure_threads(num_threads, None)
    import torch

    from ...kernels.native.bindings import description, why_not_native

    if (missing := why_not_native(torch.bfloat16)) is not None:
        raise InvalidRequest(f"no compiled kernels: {missing}")
    clock = time.thread_time if num_threads == 1 else time.perf_counter
    limit = limits.measure(num_threads, clock)  # torch keeps its threads; the kernels have theirs
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for contest in itertools.chain(_linears(args), _attention(args), _dense(args)):
            rows += _rows(contest, limit, clock, args)
    found = {"read_gb_s": limit.read_gb_s, "matmul_gflop_s": limit.matmul_gflop_s}
    library, threads = description(), torch.get_num_threads()
    write_report("kernels", rows, args, library=library, num_threads=threads, limits=found)
    if not args.json:
        print(
            f"{library}, {threads} threads; limits: {limit.read_gb_s:.1f} GB/s read, "
            f"{limit.matmul_gflop_s:.0f} GFLOP/s"
        )
    return 0


def _rows(
    contest: Contest, limit: limits.Limits, clock: limits.Clock, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    calls = dict(contest.torch_calls) | {each.format: each.call for each in contest.kernels}
    times = _times(calls, args.rounds, clock)
    typical = {
        name: (min if args.fastest else statistics.median)(each) for name, each in times.items()
    }
    for each in contest.kernels:
        own_s = typical[each.format]
        least_us = _least_us(each, limit)
        yield {
            "op": each.op,
            "shape": each.shape,
            "rows": each.rows,
            "format": each.format,
            "compiled, us": own_s * 1e6,
            **{f"{name}, us": typical[name] * 1e6 for name in contest.torch_calls},
            **{
                f"{name} / it": typical[name] / own_s
                if args.fastest
                else statistics.median(t / o for t, o in zip(times[name], times[each.format]))
                for name in contest.torch_calls
            },
            "limit, us": least_us,
            "limit / it": least_us and least_us / (own_s * 1e6),
        }


def _least_us(kernel: Kernel, limit: limits.Limits) -> float | None:
    """None for what needs the caches alone."""
    reading = kernel.num_bytes / limit.read_gb_s / 1e3
    return max(reading, kernel.num_flop / limit.matmul_gflop_s / 1e3) or None


def _times(
    calls: Mapping[str, Callable[[], object]], num_rounds: int, clock: limits.Clock
) -> dict[str, list[float]]:
    """Seconds a call, by name, one figure a round; short calls are repeated within their turn."""
    repeats = {}
    for name, call in calls.items():
        call()
        repeats[name] = max(1, min(MAX_CALLS, int(TURN_S / _seconds(call, 1, clock))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_rounds):
        for name, call in calls.items():
            times[name].append(_seconds(call, repeats[name], clock))
    return times


def _seconds(call: Callable[[], object], repeats: int, clock: limits.Clock) -> float:
    started = clock()
    for _ in range(repeats):
        call()
    return (clock() - started) / repeats


def _linears(args: argparse.Namespace) -> Iterator[Contest]:
    """Each call takes the next copy of the weights, as the layers of a model follow each other."""
    import torch

    from ...kernels.native.linear import make_linear
    from ...runtime.checkpoint.quantized.rounding import (
        group_size_for,
        round_to_4_bits,
        round_to_8_bits,
    )

    num_inputs, num_outputs = args.size
    if (group_size := group_size_for(num_inputs)) is None:
        raise InvalidRequest.of("size", num_inputs, "inputs in whole groups, multiples of 32")
    weight = _random(num_outputs, num_inputs) * 0.02
    weights: dict[str, Weight] = {
        "bf16": weight.bfloat16(),
        "int8": round_to_8_bits(weight),
        "int4": round_to_4_bits(weight, group_size),
    }
    sizes = {
        name: each.nbytes if isinstance(each, torch.Tensor) else each.num_bytes
        for name, each in weights.items()
    }
    compiled = {
        name: [make_linear(each, None) for _ in range(_num_copies(sizes[name]))]
        for name, each in weights.items()
    }
    dense = {
        name: [each.clone() for _ in range(_num_copies(each.nbytes))]
        for name, each in {BFLOAT16: weight.bfloat16(), FLOAT32: weight}.items()
    }
    for rows in args.rows:
        x = _random(rows, num_inputs)
        inputs = {BFLOAT16: x.bfloat16(), FLOAT32: x}
        yield Contest(
            [
                Kernel(
                    "linear", f"{num_inputs} -> {num_outputs}", rows, name,
                    _next_linear(linears, inputs[BFLOAT16]),
                    sizes[name], 2 * rows * num_inputs * num_outputs,
                )
                for name, linears in compiled.items()
            ],
            {
                name: _next_linear([partial(_torch_linear, each) for each in copies], inputs[name])
                for name, copies in dense.items()
            },
        )  # fmt: skip


def _in_turns(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def _copy(layer: KVLayer) -> KVLayer:
    import torch

    if isinstance(layer, torch.Tensor):
        return layer.clone()
    return type(layer)(layer.values.clone(), layer.scales.clone())


def _num_copies(num_bytes: int) -> int:
    return -(-COLD_BYTES // num_bytes)


def _next_linear(linears: Sequence[Linear], x: Tensor) -> Callable[[], object]:
    return _in_turns([partial(linear, x) for linear in linears])


def _torch_linear(weight: Tensor, x: Tensor) -> Tensor:
    import torch

    return torch.nn.functional.linear(x, weight)


def _attention(args: argparse.Namespace) -> Iterator[Contest]:
    """A query a row, of rows that share no KV; as weights, KV comes from memory."""
    from torch.nn.functional import scaled_dot_product_attention as attention

    num_heads, num_kv_heads, head_dim = args.heads
    for batch, context in itertools.product(args.batches, args.contexts):
        if context % args.page_size:
            raise InvalidRequest.of("page-size", args.page_size, f"a divisor of {context} tokens")
        kv = _random(2, num_kv_heads, batch * context, head_dim)
        q = _random(batch, num_heads, head_dim)
        calls = {}
        for name, dtype in _dtypes().items():
            keys, values = (
                kv.view(2, num_kv_heads, batch, context, head_dim)
                .transpose(1, 2)
                .to(dtype)
                .contiguous()
            )
            own = q.to(dtype)[:, :, None]
            calls[name] = _in_turns(
                [
                    partial(attention, own, keys.clone(), values.clone(), enable_gqa=True)
                    for _ in range(_num_copies(keys.nbytes + values.nbytes))
                ]
            )
        yield Contest(_attention_kernels(q, kv, batch, context, args.page_size), calls)


def _attention_kernels(
    q: Tensor, kv: Tensor, batch: int, context: int, page_size: int
) -> list[Kernel]:
    """With KV in 16, 8 and 4 bits."""
    import numpy as np
    import torch

    from ...kernels.attention_rows import AttentionRows
    from ...kernels.native.paged_attention import paged_attention, plan_attention
    from ...kernels.quantized_tensors import QuantizedKV
    from ...kernels.reference.kv_store import quantized

    (_, num_heads, head_dim), num_kv_heads = q.shape, kv.shape[1]
    rows = np.arange(batch + 1, dtype=np.int32)
    lens = np.full(batch, context, dtype=np.int32)
    table = np.arange(batch * context // page_size, dtype=np.int32).reshape(batch, -1)
    attended = AttentionRows(rows, lens, table, rows[:-1], page_size)
    layers: dict[str, KVLayer] = {
        "bf16": kv.bfloat16(),
        "int8": QuantizedKV(*quantized(kv, torch.int8)),
        "int4": QuantizedKV(*quantized(kv, torch.uint8)),
    }
    kernels = []
    for name, layer in layers.items():
        plan = plan_attention(attended, layer, num_heads)
        num_bytes = layer.nbytes if isinstance(layer, torch.Tensor) else layer.values.nbytes
        call = _in_turns(
            [
                partial(paged_attention, q.bfloat16(), _copy(layer), plan)
                for _ in range(_num_copies(num_bytes))
            ]
        )
        kernels.append(
            Kernel(
                "decode attention", f"{context} tokens, {num_heads} heads of {num_kv_heads}",
                batch, name, call, num_bytes, 4 * batch * context * num_heads * head_dim,
            )
        )  # fmt: skip
    return kernels


def _dense(args: argparse.Namespace) -> Iterator[Contest]:
    """What stands between the products."""
    from ...kernels.native import dense

    size = args.size[0]
    for rows in args.batches:
        calls = {}
        for name, dtype in _dtypes().items():
            x, weight = _random(rows, size).to(dtype), _random(size).to(dtype)
            calls[name] = partial(_torch_norm, x, x.clone(), weight)
            if name == BFLOAT16:
                own = partial(_norm, dense.make_rms_norm(weight, EPS), x, x.clone())
        yield Contest([Kernel("add, RMS norm", str(size), rows, "bf16", own, 0, 0)], calls)
    for rows in args.batches:
        yield _rotation(rows, *args.heads)


def _norm(norm: RMSNorm, x: Tensor, residual: Tensor) -> Tensor:
    return norm(x, residual)


def _torch_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    import torch

    return torch.nn.functional.rms_norm(residual.add_(x), weight.shape, weight, EPS)


def _rotation(rows: int, num_heads: int, num_kv_heads: int, head_dim: int) -> Contest:
    """Queries and keys rotated, keys and values stored; torch's calls are those of kernels/cpu."""
    import torch

    from ...kernels.cpu.dense import rotate_and_store as torch_rotate_and_store
    from ...kernels.native.dense import rotate_and_store

    heads = _random(rows, num_heads + 2 * num_kv_heads, head_dim)
    angles = _random(rows, 1, head_dim)
    kv = _random(2, num_kv_heads, rows, head_dim)
    slots = torch.arange(rows)

    def bound(way: Callable[..., None], dtype: torch.dtype) -> Callable[[], None]:
        return partial(
            way, *(each.to(dtype) for each in (heads, angles.cos(), angles.sin(), kv)), slots
        )

    shape = f"{num_heads} + 2 * {num_kv_heads} heads of {head_dim}"
    own = bound(rotate_and_store, torch.bfloat16)
    return Contest(
        [Kernel("rotate and store", shape, rows, "bf16", own, 0, 0)],
        {name: bound(torch_rotate_and_store, dtype) for name, dtype in _dtypes().items()},
    )


def _dtypes() -> dict[str, Any]:
    import torch

    return {BFLOAT16: torch.bfloat16, FLOAT32: torch.float32}


def _random(*shape: int) -> Tensor:
    """Normal float32 numbers, the same in every run."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
