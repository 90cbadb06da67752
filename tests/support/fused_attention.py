"""Torch's plain attention of a prompt, where its fused ones are those of GPUs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def plain_attention(q: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
    """A `kernels.prefill_attention.FusedAttention`."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            q, keys, values, is_causal=True, scale=scale, enable_gqa=q.shape[1] != keys.shape[1]
        )
