"""Paged attention, one row after the other over all of its KV, in plain torch: the truth.

Cost O(sum over rows of queries * keys), scores of a row at once in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention_options import DEFAULT_OPTIONS, AttentionOptions
from ..attention_rows import AttentionRows
from ..ops import KVLayer
from .dense import widen


def plan_attention(
    rows: AttentionRows,
    kv_layer: KVLayer,
    num_heads: int,
    options: AttentionOptions = DEFAULT_OPTIONS,
    padded_tokens: int | None = None,
) -> AttentionRows:
    assert options == DEFAULT_OPTIONS
    return rows


def paged_attention(q: Tensor, kv_layer: KVLayer, plan: object) -> Tensor:
    assert isinstance(kv_layer, Tensor)
    assert isinstance(plan, AttentionRows), "the plan comes from this backend's plan_attention"
    out = torch.empty_like(q)
    for row in range(plan.num_rows):
        tokens = slice(int(plan.query_start[row]), int(plan.query_start[row + 1]))
        slots = torch.from_numpy(plan.slots(row, 0, int(plan.seq_lens[row])))
        keys, values = kv_layer.index_select(2, slots.to(q.device)).unbind(0)
        out[tokens] = _attend(q[tokens], keys, values)
    return out


def _attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q [L, H, D] at the last L of the S positions of keys, values [KV, S, D] -> [L, H, D]."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = keys.shape
    grouped = widen(q).view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("lkgd,ksd->kgls", grouped, widen(keys)) * head_dim**-0.5
    position = torch.arange(num_keys, device=q.device)
    is_future = position > position[num_keys - num_queries :, None]
    probs = torch.softmax(scores.masked_fill(is_future, -torch.inf), dim=-1)
    out = torch.einsum("kgls,ksd->lkgd", probs, widen(values))
    return out.reshape(num_queries, num_heads, head_dim).to(q.dtype)
