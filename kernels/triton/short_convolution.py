"""Causal convolutions over a few tokens, each channel by itself, behind a tail of earlier inputs.

Bound by memory: inputs are read once (again from the cache, a tap each), results written once. Two
launches, since a row's tail may be read by many programs and is written when all are done.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .language import tl, triton
from .recurrence_rows import RecurrencePlan

_BLOCK_TOKENS, _BLOCK_CHANNELS = 4, 256


def short_convolution(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    tails: Tensor,
    plan: object,
    *,
    has_silu: bool = False,
) -> Tensor:
    assert isinstance(plan, RecurrencePlan), "a plan of this backend"
    assert x.is_contiguous() and tails.is_contiguous()
    y = torch.empty_like(x)
    num_tokens, num_channels = x.shape
    grid = triton.cdiv(num_tokens, _BLOCK_TOKENS), triton.cdiv(num_channels, _BLOCK_CHANNELS)
    _convolve[grid](
        x, taps, bias, tails, y, plan.row_of_token, plan.rows, plan.rows.shape[1], num_tokens,
        KERNEL=len(taps), CHANNELS=num_channels, BLOCK_TOKENS=_BLOCK_TOKENS,
        BLOCK_CHANNELS=_BLOCK_CHANNELS, HAS_SILU=has_silu, num_warps=4,
    )  # fmt: skip
    if plan.drafts is not None:
        drafts = x.index_select(0, plan.drafts)
        plan.kept.append(lambda rows: _store(drafts, tails, rows))
    _store(x, tails, plan.rows)
    return y


def _store(x: Tensor, tails: Tensor, rows: Tensor) -> None:
    num_channels = x.shape[1]
    grid = rows.shape[1], triton.cdiv(num_channels, _BLOCK_CHANNELS)
    _store_tails[grid](
        x, tails, rows, rows.shape[1], KERNEL=tails.shape[1] + 1, CHANNELS=num_channels,
        BLOCK_CHANNELS=_BLOCK_CHANNELS, num_warps=2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _convolve(
    x, taps, bias, tails, y, row_of_token, rows, num_rows, num_tokens,
    KERNEL: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr, HAS_SILU: tl.constexpr,
):  # fmt: skip
    """BLOCK_CHANNELS of BLOCK_TOKENS tokens a program."""
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    channels = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_channel = channels < CHANNELS
    row = tl.load(row_of_token + tokens, mask=tokens < num_tokens, other=-1)
    is_token = row >= 0
    first = tl.load(rows + row, mask=is_token, other=0)
    slot = tl.load(rows + 3 * num_rows + row, mask=is_token, other=0).to(tl.int64)
    begins = tl.load(rows + 4 * num_rows + row, mask=is_token, other=1)
    at = x + tokens.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    tail = tails + slot[:, None] * ((KERNEL - 1) * CHANNELS) + channels[None, :]
    total = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.float32)
    for tap in tl.static_range(KERNEL):
        place = tokens - first + tap - (KERNEL - 1)  # within the row; below 0: in the tail
        is_own = is_token & (place >= 0)
        own = tl.load(
            at + (tap - (KERNEL - 1)) * CHANNELS, mask=is_own[:, None] & is_channel[None, :],
            other=0.0,
        ).to(tl.float32)  # fmt: skip
        is_earlier = is_token & (place < 0) & (begins == 0)
        earlier = tl.load(
            tail + (place + KERNEL - 1)[:, None] * CHANNELS,
            mask=is_earlier[:, None] & is_channel[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        weight = tl.load(taps + tap * CHANNELS + channels, mask=is_channel, other=0.0)
        total += (own + earlier) * weight[None, :]
    result = total.to(y.dtype.element_ty)
    if bias is not None:
        added = tl.load(bias + channels, mask=is_channel, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + added[None, :]).to(result.dtype)
    if HAS_SILU:
        wide = result.to(tl.float32)
        result = (wide / (1.0 + tl.exp(-wide))).to(result.dtype)
    to = y + tokens.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    tl.store(to, result, mask=is_token[:, None] & is_channel[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _store_tails(
    x, tails, rows, num_rows,
    KERNEL: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """BLOCK_CHANNELS of a row a program: its last inputs that are no drafts, in ascending order.

    NOTE: of its own tail an input is read before it is overwritten, by the thread that does so.
    """
    row = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_channel = channels < CHANNELS
    first, known = tl.load(rows + row), tl.load(rows + num_rows + row)
    slot = tl.load(rows + 3 * num_rows + row).to(tl.int64)
    begins = tl.load(rows + 4 * num_rows + row)
    tail = tails + slot * ((KERNEL - 1) * CHANNELS) + channels
    if first < known:
        for to in tl.static_range(KERNEL - 1):
            place = known - first + to  # among the tail and the row's inputs
            token = (first + place - (KERNEL - 1)).to(tl.int64)
            is_own = place >= KERNEL - 1
            own = tl.load(x + token * CHANNELS + channels, mask=is_channel & is_own, other=0.0)
            is_earlier = is_channel & (place < KERNEL - 1) & (begins == 0)
            earlier = tl.load(tail + place * CHANNELS, mask=is_earlier, other=0.0)
            tl.store(tail + to * CHANNELS, tl.where(is_own, own, earlier), mask=is_channel)
