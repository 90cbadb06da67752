"""Merges partial results of attention: of split KV (Flash-Decoding, Dao et al. 2023) and of the
levels of a cascade (FlashInfer, Ye et al. 2024).

A partial result is normalized and comes with the logarithm, to base 2, of the sum of its
exponentials; these weight the float32 average of the parts, in the work list's order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .attention_tiles import padded_head_dim
from .dependent_launch import await_inputs, launch_options
from .language import tl, triton

# Below every score, and finite: the difference of two of them is 0 and not NaN.
_LOWEST = tl.constexpr(-1e38)
_LOG2_E = tl.constexpr(math.log2(math.e))
_RESIDENTS = 4  # programs that a multiprocessor holds at the same time, at the widest heads


def merge_partials(
    partial_start: Tensor,
    num_tokens: Tensor,
    partials: Tensor,
    partial_sums: Tensor,
    out: Tensor,
    sink_logits: Tensor | None = None,
) -> None:
    """Write the tokens that have parts to out [T, num_heads, head_dim], and zeros to those from
    num_tokens [1] int32 on, which are padding; others are not changed.

    partials [any, num_heads, head_dim] and partial_sums [any, num_heads] float32: those of token t
    are partial_start[t] .. partial_start[t + 1], int32 [at most T + 1]. sink_logits: see
    `ops.PagedAttention`; no part has them.
    """
    most_tokens, num_heads, head_dim = out.shape
    block_d = padded_head_dim(head_dim)
    _merge_partials[(num_programs(out.device, _RESIDENTS),)](
        partial_start, num_tokens, partials, partial_sums, sink_logits, out,
        min(most_tokens, len(partial_start) - 1),
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_P=8, BLOCK_H=max(1, min(4, 1024 // block_d)),
        BLOCK_D=block_d, num_warps=4, **launch_options(out.device),
    )  # fmt: skip


def num_programs(device: torch.device, residents: int) -> int:
    """As many as fit the device together; a few in the interpreter, which runs one at a time."""
    if device.type != "cuda":
        return 3
    return residents * torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def add_sinks(sinks, m, total, acc):
    """Rows' maxima (exponents of 2), sums and weighted values with their sinks (natural): a score
    more for each, whose value is zero."""
    exponent = sinks * _LOG2_E
    m_new = tl.maximum(m, exponent)
    decay = tl.exp2(m - m_new)
    return m_new, total * decay + tl.exp2(exponent - m_new), acc * decay[:, None]


@triton.jit(do_not_specialize=["most_tokens"])
def _merge_partials(
    partial_start, num_tokens, partials, partial_sums, sink_logits, out, most_tokens,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program processes every num_programs-th pair of a token and BLOCK_H heads: if the token has
    partial results, their weighted sum, BLOCK_P at a time; zeros if it is padding."""
    await_inputs(IS_DEPENDENT)
    HEAD_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    offs_p = tl.arange(0, BLOCK_P)
    offs_d = tl.arange(0, BLOCK_D)
    first_padded = tl.load(num_tokens) * HEAD_BLOCKS + tl.program_id(0)
    for pair in range(first_padded, most_tokens * HEAD_BLOCKS, tl.num_programs(0)):
        head = pair % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
        is_number = (head < NUM_HEADS)[:, None] & (offs_d < HEAD_DIM)[None, :]
        place = pair // HEAD_BLOCKS * NUM_HEADS + head.to(tl.int64)
        zeros = tl.zeros([BLOCK_H, BLOCK_D], out.dtype.element_ty)
        tl.store(out + place[:, None] * HEAD_DIM + offs_d[None, :], zeros, mask=is_number)
    for pair in range(tl.program_id(0), most_tokens * HEAD_BLOCKS, tl.num_programs(0)):
        token = pair // HEAD_BLOCKS
        first = tl.load(partial_start + token)
        end = tl.load(partial_start + token + 1)
        if end > first:
            head = pair % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
            is_number = (head < NUM_HEADS)[:, None] & (offs_d < HEAD_DIM)[None, :]
            m = tl.full([BLOCK_H], _LOWEST, tl.float32)
            total = tl.zeros([BLOCK_H], tl.float32)
            acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
            for start in range(first, end, BLOCK_P):
                place = (start + offs_p).to(tl.int64)[:, None] * NUM_HEADS
                place += tl.minimum(head, NUM_HEADS - 1)[None, :]
                is_partial = start + offs_p < end
                sums = tl.load(partial_sums + place, mask=is_partial[:, None], other=float("-inf"))
                values = tl.load(
                    partials + place[:, :, None] * HEAD_DIM + offs_d[None, None, :],
                    mask=is_partial[:, None, None] & (offs_d < HEAD_DIM)[None, None, :],
                    other=0.0,
                )
                m_new = tl.maximum(m, tl.max(sums, 0))
                weights = tl.exp2(sums - m_new[None, :])
                decay = tl.exp2(m - m_new)
                total = total * decay + tl.sum(weights, 0)
                acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * values, 0)
                m = m_new
            if sink_logits is not None:
                sinks = tl.load(sink_logits + head, mask=head < NUM_HEADS, other=0.0)
                m, total, acc = add_sinks(sinks, m, total, acc)
            result = (acc / total[:, None]).to(out.dtype.element_ty)
            place = token * NUM_HEADS + head.to(tl.int64)
            tl.store(out + place[:, None] * HEAD_DIM + offs_d[None, :], result, mask=is_number)
