"""Packed token masks in plain torch: the truth."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_token_mask(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    bits = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device) & 1
    is_allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~is_allowed, -torch.inf)
