"""Batches for attention as the engine would have them: pages in any order, prefixes in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...kernels.attention_rows import AttentionRows
from ...kernels.model_options import DEFAULT_OPTIONS, AttentionOptions
from ...kernels.ops import DevicePlan, KVLayer
from ...kernels.quantized_tensors import QuantizedKV
from ...kernels.reference import paged_attention as reference
from ...kernels.registry import Kernels
from .context import Context
from .sizes import Heads

Lengths = Sequence[tuple[int, int]]
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """A step's attention: queries, KV and their page tables."""

    q: Tensor  # [T, heads.query, heads.dim]
    kv_layer: KVLayer
    rows: AttentionRows
    heads: Heads

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV that its rows read, shared ones once per row."""
        return int(self.rows.seq_lens.sum()) * self.bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values, with scales if any."""
        values = self.kv_layer if isinstance(self.kv_layer, Tensor) else self.kv_layer.values
        scales = 0 if isinstance(self.kv_layer, Tensor) else self.kv_layer.scales.itemsize
        return 2 * self.heads.kv * (self.heads.dim * values.itemsize + scales)

    def without_segments(self) -> PagedBatch:
        """The same rows, without sharing."""
        rows = replace(self.rows, segments=np.zeros((0, 4), dtype=np.int32))
        return replace(self, rows=rows)

    def quantized(self, dtype: torch.dtype) -> PagedBatch:
        """The same KV in int8 or float8_e4m3fn; queries in 16 bits, as the kernels require."""
        assert isinstance(self.kv_layer, Tensor)
        q = self.q if self.q.itemsize == 2 else self.q.half()
        return replace(self, q=q, kv_layer=quantize(self.kv_layer, dtype))

    def bound(self, kernels: Kernels, options: AttentionOptions = DEFAULT_OPTIONS) -> object:
        """The plan, on the device."""
        plan = kernels.plan_attention(self.rows, self.kv_layer, self.heads.query, options)
        return bind(plan, self.rows, self.q.device)

    def expected(self, options: AttentionOptions = DEFAULT_OPTIONS) -> Tensor:
        """The reference's result in float32, [T, heads.query, heads.dim]."""
        kv = widened(self.kv_layer)
        plan = reference.plan_attention(self.rows, kv, self.heads.query, options)
        return reference.paged_attention(self.q.float(), kv, plan)


def make_batch(
    ctx: Context,
    lengths: Lengths,
    *,
    page_size: int,
    heads: Heads,
    shared: Sequence[int] = (),
    dtype: torch.dtype | None = None,
) -> PagedBatch:
    """A batch of random numbers for the rows of `make_rows`."""
    rows, num_slots = make_rows(lengths, page_size, shared)
    kv = ctx.random(2, heads.kv, num_slots, heads.dim, dtype=dtype, seed=1)
    return PagedBatch(
        ctx.random(int(rows.query_start[-1]), heads.query, heads.dim, dtype=dtype), kv, rows, heads
    )


def make_rows(
    lengths: Lengths, page_size: int, shared: Sequence[int] = ()
) -> tuple[AttentionRows, int]:
    """A row for each (queries, tokens with KV), and the slots of their pages. `shared`: nested
    segments' ends in tokens, whole pages; the first is common to all rows, each further one to the
    first half of those before."""
    order = np.random.default_rng(0)
    num_pages = [-(-tokens // page_size) for _, tokens in lengths]
    pages = order.permutation(sum(num_pages)).astype(np.int32)
    table = np.zeros((len(lengths), max(num_pages)), dtype=np.int32)
    for row, (count, last) in enumerate(zip(num_pages, np.cumsum(num_pages), strict=True)):
        table[row, :count] = pages[last - count : last]
    segments, start, row_end = [], 0, len(lengths)
    for end in shared:
        table[1:row_end, start // page_size : end // page_size] = table[
            0, start // page_size : end // page_size
        ]
        segments.append((start, end, 0, row_end))
        start, row_end = end, max(2, row_end // 2)
    queries = [count for count, _ in lengths]
    rows = AttentionRows(
        query_start=np.cumsum([0, *queries]).astype(np.int32),
        seq_lens=np.array([tokens for _, tokens in lengths], dtype=np.int32),
        page_table=table,
        table_rows=np.arange(len(lengths), dtype=np.int32),
        page_size=page_size,
        segments=np.array(segments, dtype=np.int32).reshape(-1, 4),
    )
    return rows, len(pages) * page_size


def bind(plan: object, rows: AttentionRows, device: torch.device) -> object:
    """A plan with its integers on the device."""
    if not isinstance(plan, DevicePlan):
        return plan
    arrays = {
        name: torch.from_numpy(np.ascontiguousarray(array)).to(device)
        for name, array in plan.arrays.items()
    }
    return plan.bind(arrays, torch.from_numpy(rows.page_table).to(device))


def quantize(kv: Tensor, dtype: torch.dtype) -> QuantizedKV:
    """Quantized with a scale for each token and head."""
    largest = _LARGEST[dtype]
    scales = kv.float().abs().amax(-1) / largest
    scaled = kv.float() / torch.where(scales > 0, scales, 1.0)[..., None]
    return QuantizedKV((scaled.round() if dtype is torch.int8 else scaled).to(dtype), scales)


def widened(kv: KVLayer) -> Tensor:
    """Converted to float32."""
    if isinstance(kv, Tensor):
        return kv.float()
    return kv.values.float() * kv.scales[..., None]


def relative_error(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """||found - expected|| / ||expected||, and the largest difference; NaN where there is one."""
    wide = expected.double()
    difference = found.double() - wide
    return float(difference.norm() / wide.norm()), float(difference.abs().max())
