"""Latent attention by the compiled attention kernels: one KV head, whose keys are values too.

The weighted sum runs over whole keys, of which the rotated part (64 of 576 numbers in DeepSeek-V2)
is dropped. As for a fixed plan of `paged_attention`, a token gets the same bits in any step. If
latent_dim + rope_dim is no multiple of 16, torch's calls run instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention_rows import AttentionRows
from ..cpu import latent_attention as cpu
from ..model_options import AttentionOptions
from .paged_attention import paged_attention, plan_fixed_attention


def plan_latent_attention(
    rows: AttentionRows,
    kv_layer: Tensor,
    num_heads: int,
    scale: float,
    padded_tokens: int | None = None,
) -> object:
    if kv_layer.shape[1] % 16:
        return cpu.plan_latent_attention(rows, kv_layer, num_heads, scale)
    options = AttentionOptions(scale=scale)
    return plan_fixed_attention(rows, kv_layer[None, None], num_heads, options)


def latent_attention(q_latent: Tensor, q_rope: Tensor, kv_layer: Tensor, plan: object) -> Tensor:
    if isinstance(plan, cpu.CpuLatentPlan):
        return cpu.latent_attention(q_latent, q_rope, kv_layer, plan)
    q = torch.cat((q_latent, q_rope), dim=-1)
    attended = paged_attention(q, kv_layer[None, None], plan)
    return attended[..., : q_latent.shape[-1]]
