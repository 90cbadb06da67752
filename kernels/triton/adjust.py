"""Adjusts logits before sampling: one program a row, over its entries and not the vocabulary.

Order and sources: `reference.adjust`. Each step is rounded to float32 as there, so the bits are
the same: quotients are taken in float64, whose rounding to float32 is that of the float32 quotient
(Figueroa, "When is double rounding innocuous?", 1995).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..sampling_rows import AdjustedRows
from .language import tl, triton

ENTRIES_AT_ONCE = 1024


def adjust_logits(logits: Tensor, rows: AdjustedRows, previous_tokens: Tensor) -> None:
    """`ops.AdjustLogits` of float32 logits [N, vocab_size], contiguous."""
    assert logits.dtype == torch.float32 and logits.is_contiguous(), "contiguous float32 logits"
    _adjust[(len(rows.place),)](
        logits,
        rows.place,
        rows.repetition,
        rows.frequency,
        rows.presence,
        rows.latest,
        rows.entry_start,
        rows.token_id,
        rows.count,
        rows.is_in_prompt,
        rows.bias,
        previous_tokens,
        logits.shape[1],
        ENTRIES=ENTRIES_AT_ONCE,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit
def _adjust(
    logits,
    place,
    repetition,
    frequency,
    presence,
    latest,
    entry_start,
    token_id,
    count,
    is_in_prompt,
    bias,
    previous_tokens,
    vocab_size,
    ENTRIES: tl.constexpr,
):
    row = tl.program_id(0)
    at = tl.load(place + row)
    if at >= 0:
        own = logits + at * vocab_size
        penalty = tl.load(repetition + row).to(tl.float32)
        often, once = tl.load(frequency + row), tl.load(presence + row)
        source = tl.load(latest + row)
        newest = tl.full([], -1, tl.int64)  # the token that the entries do not count
        if source >= 0:
            newest = tl.load(previous_tokens + source)
        is_counted = tl.full([], 0, tl.int32)
        first, end = tl.load(entry_start + row), tl.load(entry_start + row + 1)
        for start in range(first, end, ENTRIES):
            entries = start + tl.arange(0, ENTRIES)
            is_entry = entries < end
            tokens = tl.load(token_id + entries, mask=is_entry, other=-2)
            is_newest = tokens == newest
            is_counted = tl.maximum(is_counted, tl.max(is_newest.to(tl.int32), axis=0))
            times = tl.load(count + entries, mask=is_entry, other=0) + is_newest
            is_prompt = tl.load(is_in_prompt + entries, mask=is_entry, other=0) != 0
            added = tl.load(bias + entries, mask=is_entry, other=0.0)
            logit = tl.load(own + tokens, mask=is_entry, other=0.0)
            logit = _adjusted(logit, penalty, often, once, times, is_prompt, added)
            tl.store(own + tokens, logit, mask=is_entry)
        if (source >= 0) & (is_counted == 0):
            logit = tl.load(own + newest)
            one, nothing = tl.full([], 1, tl.int64), tl.full([], 0.0, tl.float64)
            logit = _adjusted(logit, penalty, often, once, one, one == 0, nothing)
            tl.store(own + newest, logit)


@triton.jit
def _adjusted(logit, penalty, often, once, times, is_prompt, added):
    was_sampled = times > 0
    wide, divisor = logit.to(tl.float64), penalty.to(tl.float64)
    penalised = tl.where(logit > 0, wide / divisor, wide * divisor).to(tl.float32)
    logit = tl.where(was_sampled | is_prompt, penalised, logit)
    amount = often * times.to(tl.float64) + tl.where(was_sampled, once, 0.0)
    logit = logit - amount.to(tl.float32) + added.to(tl.float32)
    return tl.where(added == -float("inf"), -float("inf"), logit)
