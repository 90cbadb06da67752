"""Packed token masks: one program a run of words, which writes where a bit is clear and reads no
logit."""

from __future__ import annotations

import torch
from torch import Tensor

from .language import tl, triton

WORDS_AT_ONCE = 128


def apply_token_mask(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """`ops.ApplyTokenMask` of float32 logits [N, vocab_size], contiguous.

    A mask of all ones writes nothing, so it may be used for padding under any row.
    """
    assert logits.dtype == torch.float32 and logits.is_contiguous() and masks.is_contiguous()
    num_words = masks.shape[1]
    _apply_token_mask[(triton.cdiv(num_words, WORDS_AT_ONCE), len(rows))](
        logits, rows, masks, logits.shape[1], num_words, WORDS=WORDS_AT_ONCE, num_warps=4
    )


@triton.jit
def _apply_token_mask(logits, rows, masks, vocab_size, num_words, WORDS: tl.constexpr):
    """A tile is [words, 32 bits]."""
    index = tl.program_id(1).to(tl.int64)
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    bits = tl.arange(0, 32)
    word = tl.load(masks + index * num_words + words, mask=words < num_words, other=-1)
    is_forbidden = ((word[:, None] >> bits[None, :]) & 1) == 0
    tokens = words[:, None] * 32 + bits[None, :]
    at = logits + tl.load(rows + index) * vocab_size + tokens
    tl.store(at, -float("inf"), mask=is_forbidden & (tokens < vocab_size))
