"""KV in 8 bits: one layer's values with a scale for each token and head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class QuantizedKV:
    """One layer's KV; a key or value is its quantized numbers times its scale.

    A scale is the largest magnitude of its head's vector over the largest number of the format
    (127 for int8, 448 for float8_e4m3fn), 0 for a vector of zeros.
    """

    values: Tensor  # [2, num_kv_heads, num_slots, head_dim] int8 or float8_e4m3fn
    scales: Tensor  # [2, num_kv_heads, num_slots] float32
