"""The best tokens of rows of logits with their log-probabilities, in torch calls that run on
every device and wait for none."""

from __future__ import annotations

import torch
from torch import Tensor


def top_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """logits [N, vocab_size] float32 or float64, without NaN -> token ids [N, count] int64, best
    first, and their log-probabilities [N, count] (natural log, at temperature 1) in the logits'
    dtype.

    Of equal ones the smaller id comes first, and at the edge is the one that is listed. `count` is
    at most vocab_size.
    """
    token_ids = _best_tokens(logits, count)
    return token_ids, logits.gather(-1, token_ids) - logits.logsumexp(dim=-1, keepdim=True)


def _best_tokens(logits: Tensor, count: int) -> Tensor:
    if logits.dtype != torch.float32:
        return logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    # One int64 key a token orders by logit, then by id, and no two are equal: torch.topk promises
    # nothing about ties. The integer of a negative float falls as it rises; -0.0 counts as 0.0.
    bits = (logits + 0.0).view(torch.int32).long()
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    last = logits.shape[-1] - 1
    ids = torch.arange(last, -1, -1, device=logits.device)
    keys = (ascending << 32) + ids
    return last - (keys.topk(count).values & 0xFFFFFFFF)
