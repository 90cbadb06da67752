"""A mixture of experts: a decode step against reading the chosen experts' weights once, a prompt
against the matrix product's rate; in floats and in the formats of `--quantization`. Without the
router."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels.ops import Weight
from ...kernels.registry import select_kernels
from ...runtime.checkpoint.quantized.expert_stack import stacked_weights
from ...runtime.checkpoint.quantized.rounding import (
    group_size_for,
    round_to_4_bits,
    round_to_8_bits,
)
from ...runtime.config import QUANTIZATIONS
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
    for quantization in QUANTIZATIONS:
        weights = _quantized(gate_up, quantization), _quantized(down, quantization)
        name = sizes.name if quantization == "none" else f"{sizes.name} {quantization}"
        for num_tokens in ctx.sizes.expert_tokens:
            case = f"{name}, {num_tokens} tokens"
            yield from attempt(case, _case, ctx, sizes, weights, case, num_tokens)


def _quantized(stack: Tensor, quantization: str) -> Weight:
    """All experts' weights, rounded as `--quantization` does on loading a model."""

    def rounded(weight: Tensor) -> Weight:
        if quantization == "int4":
            group_size = group_size_for(weight.shape[1])
            assert group_size is not None, "sizes are multiples of 32"
            return round_to_4_bits(weight, group_size)
        return round_to_8_bits(weight, "int8" if quantization == "w8a8" else "exact")

    if quantization == "none":
        return stack
    return stacked_weights((rounded(weight) for weight in stack), len(stack))


def _case(
    ctx: Context, sizes: ExpertSizes, stacks: tuple[Weight, Weight], case: str, num_tokens: int
) -> Iterator[Row]:
    x = ctx.random(num_tokens, sizes.hidden, seed=3)
    scores = ctx.random(num_tokens, sizes.experts, dtype=torch.float32, seed=4)
    weights, chosen = scores.softmax(-1).topk(sizes.chosen)
    layer = ctx.kernels.make_experts(*stacks, "silu")
    reference = select_kernels(torch.float32, ctx.device, "reference")
    gate_up, down = (w.float() if isinstance(w, Tensor) else w for w in stacks)
    expected = reference.make_experts(gate_up, down, "silu")
    # Few of many tokens: the reference computes one expert after another.
    seen = slice(0, 256)
    yield error_row(
        f"{case}, error", layer(x, chosen, weights)[seen],
        expected(x[seen].float(), chosen[seen], weights[seen]), ctx.dtype,
    )  # fmt: skip
    timing = ctx.timer.time({case: [lambda: layer(x, chosen, weights)]})[case]
    stored = sum(w.nbytes if isinstance(w, Tensor) else w.num_bytes for w in stacks)
    read = len(torch.unique(chosen)) * stored // sizes.experts
    flop = 2 * num_tokens * sizes.chosen * 3 * sizes.hidden * sizes.intermediate
    floors = {
        "copy bandwidth": read / ctx.ceilings.copy_bytes_s,
        "gemm": flop / ctx.ceilings.gemm_flop_s,
    }
    bound = max(floors, key=lambda name: floors[name])
    yield Row(
        case, timing.median_s * 1e6, "us", floors[bound] / timing.median_s, bound,
        details={**timing.details(), "weight_bytes": read, "flop": flop, "floors_s": floors},
    )  # fmt: skip
