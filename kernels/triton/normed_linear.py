"""A product of few tokens with the norm before it and an MLP's activation behind it: one launch.

At few tokens a launch's own time counts: a norm and an activation take as long as any, some 2 us,
and move next to nothing. A program reads all inputs of its tokens anyway, so it adds the residual
and sums the squares on the way, and divides its results by their root. That is RMSNorm, as the
product is linear:

    y = W (w * x / rms(x)) = (W (w * x)) / rms(x)

w * x is rounded once; apart from each other the norm rounds x / rms(x) too. In float16 w * x could
overflow, so that is not served. With many tokens each program's reading of all inputs costs more
than the launches (`MAX_TOKENS`: by count, at 16 tokens as much from the second-level cache as
weights from memory; not measured).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import Activation, NormedLinear, Weight
from .dense import ACTIVATIONS, activate
from .dependent_launch import await_inputs, launch_options
from .language import tl, triton

MAX_TOKENS = 16
_ENOUGH_PROGRAMS = 264  # two for each of an H200's multiprocessors


@dataclass(frozen=True, slots=True)
class _FusedLinear:
    """See `ops.NormedLinear`."""

    weight: Tensor
    bias: Tensor | None
    norm_weight: Tensor
    eps: float
    activation: tl.constexpr | None
    max_tokens: int = MAX_TOKENS

    def __call__(self, x: Tensor | None, residual: Tensor, total: Tensor) -> Tensor:
        assert len(residual) <= self.max_tokens, "few tokens"
        given = (residual,) if x is None else (x, residual)
        assert all(one.is_contiguous() for one in (*given, total))
        num_rows, width = self.weight.shape
        columns = num_rows // (1 if self.activation is None else 2)
        out = residual.new_empty(len(residual), columns)
        if not len(residual):
            return out
        assert total.data_ptr() not in [one.data_ptr() for one in given], "others read these"
        block_n = 64 if num_rows >= 64 * _ENOUGH_PROGRAMS else 32
        _product[(triton.cdiv(num_rows, block_n),)](
            x, residual, total, self.norm_weight, self.weight, self.bias, out, len(residual),
            self.eps, ROWS=num_rows, WIDTH=width, ACTIVATION=self.activation, BLOCK_N=block_n,
            BLOCK_M=MAX_TOKENS, BLOCK_K=128 if residual.itemsize == 2 else 32,
            num_warps=4, num_stages=4, **launch_options(out.device),
        )  # fmt: skip
        return out


def make_normed_linear(
    weight: Weight,
    bias: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    activation: Activation | None = None,
) -> NormedLinear | None:
    if not isinstance(weight, Tensor) or weight.dtype is torch.float16:
        return None
    kind = None if activation is None else ACTIVATIONS[activation]
    return _FusedLinear(weight.contiguous(), bias, norm_weight.contiguous(), eps, kind)


@triton.jit(do_not_specialize=["num_tokens"])
def _product(
    x, residual, total, norm_weight, weight, bias, out, num_tokens, eps,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N weight rows, all tokens]; with ACTIVATION half of the rows are gates, the others the
    ups of the same columns. The first program writes the sums."""
    await_inputs(IS_DEPENDENT)
    IS_GATED: tl.constexpr = ACTIVATION is not None
    COLUMNS: tl.constexpr = ROWS // 2 if IS_GATED else ROWS
    BLOCK_COLUMNS: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    tile = tl.program_id(0)
    tokens = tl.arange(0, BLOCK_M)
    is_token = tokens < num_tokens
    n = tl.arange(0, BLOCK_N)
    # Rows after the last are read from the first ones again and never stored.
    rows = (tile * BLOCK_COLUMNS + n % BLOCK_COLUMNS) % COLUMNS + n // BLOCK_COLUMNS * COLUMNS
    row_at = weight + rows.to(tl.int64)[:, None] * WIDTH
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        is_input = k < WIDTH
        at = tokens[None, :] * WIDTH + k[:, None]
        is_inside = is_token[None, :] & is_input[:, None]
        both = tl.load(residual + at, mask=is_inside, other=0.0)
        if x is not None:
            added = tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32)
            both = (both.to(tl.float32) + added).to(both.dtype)
        tl.store(total + at, both, mask=is_inside & (tile == 0))
        wide = both.to(tl.float32)
        squares += tl.sum(wide * wide, axis=0)
        scale = tl.load(norm_weight + k, mask=is_input, other=0.0).to(tl.float32)
        if WIDTH % BLOCK_K == 0:
            numbers = tl.load(row_at + k[None, :])
        else:
            numbers = tl.load(row_at + k[None, :], mask=is_input[None, :], other=0.0)
        inputs = (wide * scale[:, None]).to(both.dtype)
        acc = tl.dot(numbers, inputs, acc, input_precision="ieee")
    result = acc * tl.rsqrt(squares / WIDTH + eps)[None, :]
    if bias is not None:
        result += tl.load(bias + rows).to(tl.float32)[:, None]
    if IS_GATED:
        # Gates and ups are rounded as the product's result would be.
        result = result.to(out.dtype.element_ty)
        halves = tl.permute(tl.reshape(result, [2, BLOCK_COLUMNS, BLOCK_M]), [1, 2, 0])
        gate, up = tl.split(halves)
        activated = activate(gate.to(tl.float32), ACTIVATION).to(gate.dtype)
        result = activated.to(tl.float32) * up.to(tl.float32)
    columns = tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_stored = is_token[None, :] & (columns < COLUMNS)[:, None]
    to = out + tokens[None, :] * COLUMNS + columns[:, None]
    tl.store(to, result.to(out.dtype.element_ty), mask=is_stored)
