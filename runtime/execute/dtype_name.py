"""A dtype's name in flags, layouts and reports; imports torch for its types only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def dtype_name(dtype: torch.dtype) -> str:
    """For example "bfloat16"."""
    return str(dtype).removeprefix("torch.")
