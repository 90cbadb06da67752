"""Log-probabilities of given tokens: one program a row, which reads it once."""

from __future__ import annotations

import torch
from torch import Tensor

from .language import tl, triton

TOKENS_AT_ONCE = 8192


def token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """`ops.TokenLogprobs` of float32 logits [N, vocab_size], contiguous."""
    assert logits.dtype == torch.float32 and logits.is_contiguous(), "contiguous float32 logits"
    logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _token_logprobs[(len(logits),)](
        logits, token_ids, logprobs, logits.shape[1], TOKENS=TOKENS_AT_ONCE, num_warps=8
    )
    return logprobs


@triton.jit
def _token_logprobs(logits, token_ids, logprobs, vocab_size, TOKENS: tl.constexpr):
    """Sums of exponentials are relative to the maximum so far (Milakov and Gimelshein 2018)."""
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * vocab_size
    best = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, vocab_size, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        logit = tl.load(own + tokens, mask=tokens < vocab_size, other=-float("inf"))
        higher = tl.maximum(best, tl.max(logit, axis=0))
        shift = tl.where(higher == -float("inf"), 0.0, higher)  # avoids infinity minus infinity
        total = total * tl.exp(best - shift) + tl.sum(tl.exp(logit - shift), axis=0)
        best = higher
    chosen = tl.load(own + tl.load(token_ids + row))
    tl.store(logprobs + row, chosen - (best + tl.log(total)))
