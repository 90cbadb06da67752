"""Linear layers, norm, activations and lookups for a GPU.

Products are cuBLAS's, through torch, except those of quantized weights (`quantized_linear`). The
rest is bound by memory: each kernel here reads its inputs once and writes its result once, in
vectors of 16 bytes, with enough rows a program to fill some warps. Rounding is the reference's: a
value that torch's calls would store between two of them is rounded there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import Activation, Linear, OutputLinear, QueryKeyNorm, RMSNorm, Weight
from ..quantized_tensors import QuantizedWeight
from ..reference.dense import placed, widen
from . import quantized_linear
from .dependent_launch import await_inputs, launch_options
from .language import tl, triton

# A program's elements, at least, where rows are shorter: two vectors of 8 for each of 64 threads.
_MIN_TILE = 1024
_MAX_NORM_SIZE = 16384
_ACT_BLOCK = 1024
_SILU, _GELU, _GELU_TANH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
ACTIVATIONS: dict[Activation, tl.constexpr] = {
    "silu": _SILU,
    "gelu": _GELU,
    "gelu_tanh": _GELU_TANH,
}


def make_linear(weight: Weight, bias: Tensor | None) -> Linear:
    if isinstance(weight, QuantizedWeight):
        return quantized_linear.make_linear(weight, bias)

    def linear(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    return linear


def make_output_linear(weight: Weight) -> OutputLinear:
    """Logits: the float32 sums if torch returns them, else rounded, then converted."""
    if isinstance(weight, QuantizedWeight):
        return quantized_linear.make_linear(weight, None, torch.float32)
    transposed = weight.T
    if weight.dtype is torch.float32:
        return lambda x, out=None: torch.mm(x, transposed, out=out)
    if not _gives_wide_products(weight):
        return lambda x, out=None: placed(widen(F.linear(x, weight)), out)

    def output_linear(x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mm(x, transposed, out_dtype=torch.float32, out=out)

    return output_linear


def make_gated_linear(
    weight: Weight, bias: Tensor | None, activation: Activation = "silu"
) -> Linear:
    """One product for gates and ups; then both halves of a row are read once."""
    linear = make_linear(weight, bias)

    def gated_linear(x: Tensor) -> Tensor:
        return act_and_mul(linear(x), activation)

    return gated_linear


def act_and_mul(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    assert gate_up.is_contiguous()
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    if out.numel():
        _act_and_mul[num_tokens, triton.cdiv(size, _ACT_BLOCK)](
            gate_up, out, SIZE=size, BLOCK=_ACT_BLOCK, ACTIVATION=ACTIVATIONS[activation],
            num_warps=4, **launch_options(out.device),
        )  # fmt: skip
    return out


def make_rms_norm(weight: Tensor, eps: float) -> RMSNorm:
    """Rows of up to 16,384."""
    size = weight.shape[0]
    assert size <= _MAX_NORM_SIZE, f"a norm over {size} elements; at most {_MAX_NORM_SIZE}"
    weight = weight.contiguous()
    block = triton.next_power_of_2(size)
    num_rows = max(1, _MIN_TILE // block)
    num_warps = min(16, num_rows * block // 512)

    def rms_norm(x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        assert x.is_contiguous() and (residual is None or residual.is_contiguous())
        y = torch.empty_like(x) if out is None else out
        if len(x):
            _rms_norm[(triton.cdiv(len(x), num_rows),)](
                x, residual, weight, y, len(x), eps,
                SIZE=size, BLOCK=block, ROWS=num_rows, num_warps=num_warps,
                **launch_options(x.device),
            )  # fmt: skip
        return y

    return rms_norm


def make_query_key_norm(
    query_weight: Tensor, key_weight: Tensor, num_heads: int, num_kv_heads: int, eps: float
) -> QueryKeyNorm:
    """A launch for the queries and one for the keys."""
    weights = query_weight.contiguous(), key_weight.contiguous()

    def query_key_norm(heads: Tensor) -> None:
        assert heads.is_contiguous()
        first = 0
        for weight, num in zip(weights, (num_heads, num_kv_heads), strict=True):
            _norm_slices(heads, first, num, weight, eps)
            first += num

    return query_key_norm


def _norm_slices(heads: Tensor, first: int, num: int, weight: Tensor, eps: float) -> None:
    """`num` heads of each token from the `first` on, in runs of len(weight) elements."""
    num_tokens, num_all_heads, head_dim = heads.shape
    size = weight.shape[0]
    assert size <= _MAX_NORM_SIZE, f"a norm over {size} elements; at most {_MAX_NORM_SIZE}"
    block = triton.next_power_of_2(size)
    num_rows = max(1, _MIN_TILE // block)
    num_slices = num * head_dim // size
    if num_tokens:
        _rms_norm_slices[(triton.cdiv(num_tokens * num_slices, num_rows),)](
            heads[:, first:], weight, num_tokens * num_slices, eps,
            STRIDE=num_all_heads * head_dim, NUM_SLICES=num_slices,
            SIZE=size, BLOCK=block, ROWS=num_rows, num_warps=min(16, num_rows * block // 512),
            **launch_options(heads.device),
        )  # fmt: skip


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    assert table.is_contiguous()
    rows = table.new_empty((len(index), *table.shape[1:]))
    size = table.stride(0)
    if rows.numel():
        block = min(_MIN_TILE, triton.next_power_of_2(size))
        num_rows = _MIN_TILE // block
        grid = (triton.cdiv(len(index), num_rows), triton.cdiv(size, block))
        _gather_rows[grid](
            table, index, rows, len(index), SIZE=size, BLOCK=block, ROWS=num_rows, num_warps=4
        )
    return rows


def _gives_wide_products(weight: Tensor) -> bool:
    """Whether torch multiplies this dtype into float32 here; tested, since few backends do."""
    try:
        ones = weight.new_ones(16, 16)
        product = torch.zeros(16, 16, dtype=torch.float32, device=weight.device)
        torch.mm(ones, ones.T, out_dtype=torch.float32, out=product)
        return bool((product == 16).all())
    except (RuntimeError, TypeError):
        return False


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x, residual, weight, y, num_rows, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows a program, in registers between the sum and its use."""
    await_inputs(IS_DEPENDENT)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    at = rows.to(tl.int64)[:, None] * SIZE + columns[None, :]
    is_inside = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    values = tl.load(x + at, mask=is_inside, other=0.0)
    if residual is not None:
        before = tl.load(residual + at, mask=is_inside, other=0.0)
        values = (values.to(tl.float32) + before.to(tl.float32)).to(values.dtype)
        tl.store(residual + at, values, mask=is_inside)
    scale = tl.load(weight + columns, mask=columns < SIZE, other=0.0)
    wide = values.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / SIZE
    normed = (wide * tl.rsqrt(mean + eps)[:, None]).to(scale.dtype)
    scaled = normed.to(tl.float32) * scale.to(tl.float32)[None, :]
    tl.store(y + at, scaled.to(values.dtype), mask=is_inside)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_slices(
    x, weight, num_rows, eps,
    STRIDE: tl.constexpr, NUM_SLICES: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """ROWS whole slices a program, in place; row r is slice r % NUM_SLICES of its token."""
    await_inputs(IS_DEPENDENT)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    starts = (rows // NUM_SLICES).to(tl.int64) * STRIDE + (rows % NUM_SLICES) * SIZE
    at = starts[:, None] + columns[None, :]
    is_inside = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    values = tl.load(x + at, mask=is_inside, other=0.0)
    scale = tl.load(weight + columns, mask=columns < SIZE, other=0.0)
    wide = values.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / SIZE
    normed = (wide * tl.rsqrt(mean + eps)[:, None]).to(scale.dtype)
    scaled = normed.to(tl.float32) * scale.to(tl.float32)[None, :]
    tl.store(x + at, scaled.to(values.dtype), mask=is_inside)


@triton.jit
def _act_and_mul(
    gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK results of one token a program."""
    await_inputs(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < SIZE
    gates = gate_up + token * (2 * SIZE) + columns
    gate = tl.load(gates, mask=is_inside, other=0.0)
    up = tl.load(gates + SIZE, mask=is_inside, other=0.0)
    activated = activate(gate.to(tl.float32), ACTIVATION).to(gate.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out + token * SIZE + columns, product.to(gate.dtype), mask=is_inside)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == _SILU:
        return x / (1.0 + tl.exp(-x))
    if ACTIVATION == _GELU:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    # 1 + tanh(u) = 2 / (1 + exp(-2 u)), which loses no precision where tanh is near -1.
    twice = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 sqrt(2 / pi) (...)
    return x / (1.0 + tl.exp(-twice))


@triton.jit(do_not_specialize=["num_rows"])
def _gather_rows(
    table, index, out, num_rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """BLOCK columns of ROWS rows a program."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sources = tl.load(index + rows, mask=rows < num_rows, other=0)
    is_inside = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    values = tl.load(table + sources[:, None] * SIZE + columns[None, :], mask=is_inside)
    at = rows.to(tl.int64)[:, None] * SIZE + columns[None, :]
    tl.store(out + at, values, mask=is_inside)
