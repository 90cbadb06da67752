"""Packed token masks; the C++ is in src/token_mask.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from .bindings import library


def apply_token_mask(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    assert logits.is_contiguous() and masks.is_contiguous()
    library().stemma_apply_token_mask(
        logits.data_ptr(),
        rows.data_ptr(),
        masks.data_ptr(),
        len(rows),
        logits.shape[1],
        masks.shape[1],
        logits.dtype is torch.float64,
    )
