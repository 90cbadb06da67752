"""The attention that keys get, compiled for float32; the C++ is in src/observe.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from ..model_options import AttentionOptions
from ..reference.dense import widen
from ..reference.observe import observe as reference_observe
from .bindings import library

_BLOCK = 64  # keys that are packed together
_MAX_PARTS = 4  # of a head's queries, for threads


def observe(queries: Tensor, keys: Tensor, options: AttentionOptions) -> Tensor:
    """See `ops.Observe`."""
    if queries.dtype is torch.float64:
        return reference_observe(queries, keys, options)
    num_queries, num_heads, head_dim = queries.shape
    num_kv_heads, num_keys, _ = keys.shape
    rows = widen(queries).view(num_queries, num_kv_heads, -1, head_dim)
    rows = rows.transpose(0, 1).contiguous()
    packed = torch.zeros(num_kv_heads, -(-num_keys // _BLOCK) * _BLOCK, head_dim)
    packed[:, :num_keys] = keys
    packed = packed.view(num_kv_heads, -1, _BLOCK, head_dim).transpose(2, 3).contiguous()
    num_rows = num_queries * (num_heads // num_kv_heads)
    num_parts = min(_MAX_PARTS, -(-num_rows // 64))
    sums = torch.empty(num_parts, num_kv_heads, packed.shape[1] * _BLOCK)
    library().stemma_observe(
        rows.data_ptr(),
        packed.data_ptr(),
        sums.data_ptr(),
        num_kv_heads,
        num_queries,
        num_rows,
        num_keys,
        head_dim,
        num_parts,
        head_dim**-0.5 if options.scale is None else options.scale,
        options.soft_cap or 0.0,
    )
    return sums[:, :, :num_keys].sum(0)
