"""How much attention a sequence's last queries pay to its keys, in plain torch: the truth."""

from __future__ import annotations

import torch
from torch import Tensor

from ..model_options import AttentionOptions
from .dense import widen

_AT_ONCE = 64  # queries: their scores are as many tables as heads, as wide as there are keys


def observe(queries: Tensor, keys: Tensor, options: AttentionOptions) -> Tensor:
    """See `ops.Observe`."""
    num_queries, num_keys = len(queries), keys.shape[1]
    keys = widen(keys)
    total = torch.zeros(keys.shape[:2], dtype=keys.dtype, device=keys.device)
    for first in range(0, num_queries, _AT_ONCE):
        some = widen(queries[first : first + _AT_ONCE])
        end = num_keys - num_queries + first + len(some)
        total[:, :end] += _observed(some, keys[:, :end], options)
    return total


def _observed(queries: Tensor, keys: Tensor, options: AttentionOptions) -> Tensor:
    num_queries, num_heads, head_dim = queries.shape
    num_kv_heads, num_keys, _ = keys.shape
    scale = head_dim**-0.5 if options.scale is None else options.scale
    grouped = queries.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    scores = torch.matmul(grouped, keys.transpose(1, 2)) * scale
    if options.soft_cap is not None:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    scores = scores.view(num_kv_heads, num_heads // num_kv_heads, num_queries, num_keys)
    later = torch.ones(num_queries, num_keys, dtype=torch.bool, device=keys.device)
    later = later.triu(num_keys - num_queries + 1)
    return scores.masked_fill(later, -torch.inf).softmax(-1).sum((1, 2))
