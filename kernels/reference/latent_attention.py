"""Latent attention, one row after the other over all of its KV, in plain torch: the truth.

A row of KV is a key, latent and rotated part together, and its latent is the value as well, for
all heads. Cost as the reference of `paged_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention_rows import AttentionRows
from .dense import widen


@dataclass(frozen=True, slots=True)
class LatentAttentionPlan:
    rows: AttentionRows
    scale: float


def store_latent(latent: Tensor, kv_layer: Tensor, slots: Tensor) -> None:
    kv_layer.index_copy_(0, slots, latent)


def plan_latent_attention(
    rows: AttentionRows,
    kv_layer: Tensor,
    num_heads: int,
    scale: float,
    padded_tokens: int | None = None,
) -> LatentAttentionPlan:
    return LatentAttentionPlan(rows, scale)


def latent_attention(q_latent: Tensor, q_rope: Tensor, kv_layer: Tensor, plan: object) -> Tensor:
    assert isinstance(plan, LatentAttentionPlan), "the plan comes from this backend"
    rows = plan.rows
    q = torch.cat((q_latent, q_rope), dim=-1)
    out = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
    for row in range(rows.num_rows):
        tokens = slice(int(rows.query_start[row]), int(rows.query_start[row + 1]))
        slots = torch.from_numpy(rows.slots(row, 0, int(rows.seq_lens[row])))
        keys = kv_layer.index_select(0, slots.to(q.device))
        out[tokens] = _attend(q[tokens], keys, q_latent.shape[-1], plan.scale)
    return out


def _attend(q: Tensor, keys: Tensor, latent_dim: int, scale: float) -> Tensor:
    """q [L, H, D] at the last L of the S positions of keys [S, D] -> [L, H, latent_dim]."""
    num_queries, num_keys = len(q), len(keys)
    keys = widen(keys)
    scores = torch.einsum("lhd,sd->hls", widen(q), keys) * scale
    position = torch.arange(num_keys, device=q.device)
    is_future = position > position[num_keys - num_queries :, None]
    probs = torch.softmax(scores.masked_fill(is_future, -torch.inf), dim=-1)
    return torch.einsum("hls,sd->lhd", probs, keys[:, :latent_dim]).to(q.dtype)
