"""Scans of recurrent layers: decoding rows, a prompt's chunk, and a row with drafts.

A decode step is held against the bandwidth of a copy, with the states' bytes, read and written; a
prompt against what bounds it, bytes or operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ...kernels.ops import DevicePlan
from ...kernels.registry import Kernels, select_kernels
from ...kernels.state_rows import StateRows
from .attention import error_row
from .context import Context
from .rows import Row, attempt
from .sizes import ScanSizes

_DRAFTS = (1, 3, 7)


def scans(ctx: Context) -> Iterator[Row]:
    """For each kind of layer: rows of one token, one long row, and one token with drafts of which
    half are right."""
    sizes = ctx.sizes
    for one in sizes.scans:
        for lengths in ([1] * sizes.decode_batch, [sizes.extend_tokens // 4]):
            case = f"{one.name}, {len(lengths)} x {lengths[0]}"
            yield from attempt(case, _timed, ctx, one, case, lengths)
        for num_drafts in _DRAFTS:
            case = f"{one.name}, 1 and {num_drafts} drafts"
            yield from attempt(case, _drafted, ctx, one, case, num_drafts)


def _timed(ctx: Context, sizes: ScanSizes, case: str, lengths: Sequence[int]) -> Iterator[Row]:
    found, expected = scan_results(ctx, sizes, lengths, ctx.kernels, ctx.dtype)
    yield error_row(f"{case}, error", found, expected, ctx.dtype)
    call = scan_call(ctx, sizes, lengths, ctx.kernels, ctx.dtype)
    timing = ctx.timer.time({case: [call]})[case]
    num_tokens, numbers = sum(lengths), sizes.key_dim * sizes.value_dim
    token_bytes = 2 * (sizes.groups * sizes.key_dim + sizes.heads * sizes.value_dim)
    states = 2 * len(lengths) * sizes.heads * numbers * 4
    num_bytes = states + num_tokens * token_bytes * ctx.dtype.itemsize
    # What a token holds already, what it writes and what it reads: a product with the state each.
    flop = 2 * num_tokens * sizes.heads * numbers * (2 if sizes.kind == "mamba" else 3)
    floors = {
        "copy bandwidth": num_bytes / ctx.ceilings.copy_bytes_s,
        "gemm": flop / ctx.ceilings.gemm_flop_s,
    }
    bound = max(floors, key=lambda name: floors[name])
    yield Row(
        case, timing.median_s * 1e6, "us", floors[bound] / timing.median_s, bound,
        details={**timing.details(), "state_bytes": states, "flop": flop, "floors_s": floors},
    )  # fmt: skip


def _drafted(ctx: Context, sizes: ScanSizes, case: str, num_drafts: int) -> Iterator[Row]:
    """Against the same tokens without drafts, of which nothing would be taken back."""
    cases = {
        case: [scan_call(ctx, sizes, [1 + num_drafts], ctx.kernels, ctx.dtype, num_drafts)],
        "plain": [scan_call(ctx, sizes, [1 + num_drafts], ctx.kernels, ctx.dtype)],
    }
    timings = ctx.timer.time(cases)
    plain, timing = timings["plain"].median_s, timings[case]
    yield Row(
        case, timing.median_s * 1e6, "us", timing.median_s / plain, "the scan without drafts",
        details={**timing.details(), "plain_us": plain * 1e6},
    )  # fmt: skip


def scan_results(
    ctx: Context, sizes: ScanSizes, lengths: Sequence[int], kernels: Kernels, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Results of these kernels and of the reference in float32, from the same numbers."""
    reference = select_kernels(torch.float32, ctx.device, "reference")
    expected = scan_call(ctx, sizes, lengths, reference, torch.float32)()
    return scan_call(ctx, sizes, lengths, kernels, dtype)(), expected


def scan_call(
    ctx: Context,
    sizes: ScanSizes,
    lengths: Sequence[int],
    kernels: Kernels,
    dtype: torch.dtype,
    num_drafts: int = 0,
) -> Callable[[], Tensor]:
    """A call on the same numbers in every dtype. `num_drafts`: of each row; half of these, rounded
    up, are right, and its state moves on behind them."""
    num_tokens, heads = sum(lengths), sizes.heads
    key_shape = (num_tokens, sizes.groups, sizes.key_dim)
    q, k = (_numbers(ctx, *key_shape, dtype=dtype, seed=seed) for seed in (1, 2))
    v = _numbers(ctx, num_tokens, heads, sizes.value_dim, dtype=dtype, seed=3)
    states = ctx.random(
        len(lengths) + 1, heads, sizes.key_dim, sizes.value_dim, dtype=torch.float32, seed=4
    )
    rates = ctx.random(num_tokens, heads, dtype=torch.float32, seed=5).sigmoid()
    shape = (num_tokens, heads, sizes.key_dim)[: 3 if sizes.kind == "channels" else 2]
    decays = -ctx.random(*shape, dtype=torch.float32, seed=6).sigmoid()
    plan = bound_plans(ctx, kernels, state_rows(lengths, num_drafts))
    accepted = torch.full((len(lengths),), (num_drafts + 1) // 2, device=ctx.tensors)
    recurrence = kernels.recurrence

    def call() -> Tensor:
        step = plan()
        if sizes.kind == "mamba":
            out = recurrence.state_space_scan(q, k, v, rates, decays[0], states, step)
        else:
            out = recurrence.gated_delta_rule(q, k, v, decays, rates, states, step)
        if num_drafts:
            recurrence.accept_drafts(step, accepted)
        return out

    return call


def state_rows(lengths: Sequence[int], num_drafts: int = 0) -> StateRows:
    """Rows that go on, in slots from 1 on."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    slots, drafts = np.arange(len(lengths)) + 1, np.full(len(lengths), num_drafts)
    return StateRows(starts, slots, np.zeros(len(lengths), dtype=np.bool_), drafts)


def bound_plans(ctx: Context, kernels: Kernels, rows: StateRows) -> Callable[[], object]:
    """Makes a plan for each call; what it needs on the device is there before."""
    made = kernels.recurrence.plan(rows)
    if not isinstance(made, DevicePlan):
        return lambda: kernels.recurrence.plan(rows)
    arrays = {
        name: torch.from_numpy(np.ascontiguousarray(array)).to(ctx.tensors)
        for name, array in made.arrays.items()
    }
    return lambda: made.bind(arrays, torch.empty(0))


def _numbers(ctx: Context, *shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return ctx.random(*shape, dtype=torch.bfloat16, seed=seed).to(dtype)
