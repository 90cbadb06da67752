"""Reference kernels whose attention plan is data on the device, as on a GPU: for tests of staging,
padding and capture, without the interpreter's cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from stemma.kernels.attention_rows import AttentionRows
from stemma.kernels.model_options import DEFAULT_OPTIONS, AttentionOptions
from stemma.kernels.ops import DevicePlan, KVLayer
from stemma.kernels.registry import Kernels, select_kernels


@dataclass(frozen=True)
class TokenPlan:
    """For each token, the table row that it reads and its number of keys; 0 for padding."""

    table_rows: Tensor  # [P] int32
    num_keys: Tensor  # [P] int32
    page_table: Tensor
    page_size: int


def device_kernels(dtype: torch.dtype) -> Kernels:
    kernels = select_kernels(dtype, "cuda", "reference")
    return replace(kernels, plan_attention=plan_attention, paged_attention=paged_attention)


def plan_attention(
    rows: AttentionRows,
    kv_layer: KVLayer,
    num_heads: int,
    options: AttentionOptions = DEFAULT_OPTIONS,
    padded_tokens: int | None = None,
) -> DevicePlan:
    num_queries = rows.num_queries
    num_tokens = int(rows.query_start[-1])
    size = num_tokens if padded_tokens is None else padded_tokens
    table_rows, num_keys = np.zeros(size, dtype=np.int32), np.zeros(size, dtype=np.int32)
    table_rows[:num_tokens] = np.repeat(rows.table_rows, num_queries)
    first = np.repeat(rows.seq_lens - rows.query_start[1:], num_queries)
    num_keys[:num_tokens] = first + np.arange(num_tokens) + 1

    def bind(lists: Mapping[str, Tensor], page_table: Tensor) -> TokenPlan:
        return TokenPlan(lists["table_rows"], lists["num_keys"], page_table, rows.page_size)

    arrays = {"table_rows": table_rows, "num_keys": num_keys}
    has_wide = bool((num_queries > 1).any())
    return DevicePlan(arrays, bind, light=None if has_wide else arrays)


def paged_attention(
    q: Tensor, kv_layer: KVLayer, plan: object, sink_logits: Tensor | None = None
) -> Tensor:
    assert isinstance(plan, TokenPlan) and isinstance(kv_layer, Tensor) and sink_logits is None
    assert len(q) == len(plan.num_keys)
    out = torch.full_like(q, torch.nan)  # for padding: nothing may depend on it
    group = q.shape[1] // kv_layer.shape[1]
    for token, (row, count) in enumerate(zip(plan.table_rows.tolist(), plan.num_keys.tolist())):
        if not count:
            continue
        place = torch.arange(count)
        pages = plan.page_table[row, place // plan.page_size].long()
        slots = pages * plan.page_size + place % plan.page_size
        keys, values = kv_layer.index_select(2, slots).repeat_interleave(group, dim=1).unbind(0)
        scores = torch.einsum("hd,hsd->hs", q[token], keys) * q.shape[2] ** -0.5
        out[token] = torch.einsum("hs,hsd->hd", scores.softmax(-1), values)
    return out
