"""Log-probabilities from logits: of given tokens, of the best ones; natural log, temperature 1."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..step import TokenLogprob


def logprobs_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    """logits [N, vocab_size], token_ids [N] int64 -> log-probabilities [N] in the logits' dtype."""
    chosen = logits.gather(-1, token_ids[:, None])[:, 0]
    return chosen - logits.logsumexp(dim=-1)


def top_logprobs(logits: Tensor, count: int) -> tuple[TokenLogprob, ...]:
    """The `count` best tokens of one row of logits [vocab_size], best first.

    Of equal ones the smaller id comes first, and at the edge is the one that is listed.
    """
    count = min(count, logits.shape[-1])
    if count == 0:
        return ()
    logprobs = torch.log_softmax(logits, dim=-1).cpu().numpy()
    edge = len(logprobs) - count
    threshold = np.partition(logprobs, edge)[edge]
    candidates = np.flatnonzero(logprobs >= threshold)
    best = candidates[np.argsort(-logprobs[candidates], kind="stable")][:count]
    return tuple(TokenLogprob(int(token), float(logprobs[token])) for token in best)
