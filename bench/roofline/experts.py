"""A mixture of experts: a decode step against reading the chosen experts' weights once, a prompt
against the matrix product's rate. The router is not part of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels.registry import select_kernels
from .attention import error_row
from .context import Context
from .rows import Row, attempt
from .sizes import ExpertSizes


def experts(ctx: Context) -> Iterator[Row]:
    """Each model's layer."""
    for sizes in ctx.sizes.experts:
        yield from attempt(sizes.name, _layer, ctx, sizes)


def _layer(ctx: Context, sizes: ExpertSizes) -> Iterator[Row]:
    hidden, wide = sizes.hidden, sizes.intermediate
    gate_up = ctx.random(sizes.experts, 2 * wide, hidden, seed=1) * hidden**-0.5
    down = ctx.random(sizes.experts, hidden, wide, seed=2) * wide**-0.5
    for num_tokens in ctx.sizes.expert_tokens:
        case = f"{sizes.name}, {num_tokens} tokens"
        yield from attempt(case, _case, ctx, sizes, gate_up, down, case, num_tokens)


def _case(
    ctx: Context, sizes: ExpertSizes, gate_up: Tensor, down: Tensor, case: str, num_tokens: int
) -> Iterator[Row]:
    x = ctx.random(num_tokens, sizes.hidden, seed=3)
    scores = ctx.random(num_tokens, sizes.experts, dtype=torch.float32, seed=4)
    weights, chosen = scores.softmax(-1).topk(sizes.chosen)
    layer = ctx.kernels.make_experts(gate_up, down, "silu")
    reference = select_kernels(torch.float32, ctx.device, "reference")
    expected = reference.make_experts(gate_up.float(), down.float(), "silu")
    # Few tokens of many: the reference goes through one expert after the other.
    seen = slice(0, 256)
    yield error_row(
        f"{case}, error", layer(x, chosen, weights)[seen],
        expected(x[seen].float(), chosen[seen], weights[seen]), ctx.dtype,
    )  # fmt: skip
    timing = ctx.timer.time({case: [lambda: layer(x, chosen, weights)]})[case]
    matrices = 3 * sizes.hidden * sizes.intermediate
    read = len(torch.unique(chosen)) * matrices * ctx.dtype.itemsize
    flop = 2 * num_tokens * sizes.chosen * matrices
    floors = {
        "copy bandwidth": read / ctx.ceilings.copy_bytes_s,
        "gemm": flop / ctx.ceilings.gemm_flop_s,
    }
    bound = max(floors, key=lambda name: floors[name])
    yield Row(
        case, timing.median_s * 1e6, "us", floors[bound] / timing.median_s, bound,
        details={**timing.details(), "weight_bytes": read, "flop": flop, "floors_s": floors},
    )  # fmt: skip
