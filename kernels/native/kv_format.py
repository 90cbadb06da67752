"""The memory layout of the pool's keys and values, as passed to the C++ (src/kv_format.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import KVLayer

_FORMATS = {
    torch.bfloat16: 0, torch.float32: 0, torch.int8: 1, torch.float8_e4m3fn: 2, torch.uint8: 3
}  # fmt: skip


def kv_format(kv_layer: KVLayer) -> tuple[int, Tensor, Tensor | None]:
    """The format's number, the values [2, num_kv_heads, num_slots, any], and their scales if there
    are any, 4 bytes a vector."""
    if isinstance(kv_layer, Tensor):
        return _FORMATS[kv_layer.dtype], kv_layer, None
    return _FORMATS[kv_layer.values.dtype], kv_layer.values, kv_layer.scales
