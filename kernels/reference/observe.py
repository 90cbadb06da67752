"""How much attention a sequence's last queries pay to its keys, in plain torch: the truth."""

from __future__ import annotations

import torch
from torch import Tensor

from ..model_options import AttentionOptions
from .dense import widen


def observe(queries: Tensor, keys: Tensor, options: AttentionOptions) -> Tensor:
    """queries [W, num_heads, head_dim], keys [num_kv_heads, C, head_dim], both rotated, C >= W;
    query i is that of token C - W + i, and sees the keys up to its own.

    Returns [num_kv_heads, C] in float32, of float64 inputs in float64: the attention that each key
    gets, summed over the queries of all heads that share it.
    """
    num_queries, num_heads, head_dim = queries.shape
    num_kv_heads, num_keys, _ = keys.shape
    scale = head_dim**-0.5 if options.scale is None else options.scale
    grouped = widen(queries).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    scores = torch.matmul(grouped, widen(keys).transpose(1, 2)) * scale
    if options.soft_cap is not None:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    scores = scores.view(num_kv_heads, num_heads // num_kv_heads, num_queries, num_keys)
    later = torch.ones(num_queries, num_keys, dtype=torch.bool, device=keys.device)
    later = later.triu(num_keys - num_queries + 1)
    return scores.masked_fill(later, -torch.inf).softmax(-1).sum((1, 2))
