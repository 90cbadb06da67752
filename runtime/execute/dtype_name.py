"""How flags, layouts and reports name a dtype; imports torch for its types only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" and so on."""
    return str(dtype).removeprefix("torch.")
