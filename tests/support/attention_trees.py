"""Steps whose rows share KV like branches of a tree, for attention tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from stemma.kernels.attention_rows import AttentionRows
from stemma.kernels.quantized_tensors import QuantizedKV
from stemma.kernels.reference import kv_store


@dataclass(frozen=True)
class Branch:
    """A run of whole pages shared by the branches below it; a row where there are none."""

    num_pages: int
    below: tuple[Branch, ...] = ()
    num_queries: int = 1
    num_own: int = 5  # tokens of a row past the shared pages, >= num_queries


branches = st.deferred(
    lambda: st.builds(
        Branch,
        st.integers(1, 4),
        st.one_of(st.just(()), st.lists(branches, min_size=1, max_size=3).map(tuple)),
        st.integers(1, 5),
        st.integers(5, 40),
    )
)


def row(num_queries: int, seq_len: int) -> Branch:
    """A row that shares nothing."""
    return Branch(0, (), num_queries, seq_len)


def rows_of(forest: list[Branch], page_size: int, min_rows: int = 2) -> AttentionRows:
    """Rows in depth-first order over shuffled pages, with a segment for each run that at least
    `min_rows` rows share. The table's unused entries name a page that no row has, the last."""
    segments: list[tuple[int, int, int, int]] = []
    tables: list[list[int]] = []
    shapes: list[tuple[int, int]] = []
    num_pages = 0

    def visit(branch: Branch, above: list[int], shared: int) -> None:
        """`shared`: how many tokens of `above` are covered by segments."""
        nonlocal num_pages
        path = [*above, *range(num_pages, num_pages + branch.num_pages)]
        num_pages += branch.num_pages
        first_row, place = len(tables), len(segments)
        end = len(path) * page_size
        is_shared = end > shared and _num_rows(branch) >= min_rows
        for below in branch.below:
            visit(below, path, end if is_shared else shared)
        if not branch.below:
            own = -(-branch.num_own // page_size)
            tables.append([*path, *range(num_pages, num_pages + own)])
            shapes.append((branch.num_queries, end + branch.num_own))
            num_pages += own
        if is_shared:
            segments.insert(place, (shared, end, first_row, len(tables)))

    for tree in forest:
        visit(tree, [], 0)
    order = np.random.default_rng(1).permutation(len(tables)).astype(np.int32)
    shuffled = np.random.default_rng(num_pages).permutation(num_pages).astype(np.int32)
    table = np.full((len(tables), max(map(len, tables)) + 1), num_pages, dtype=np.int32)
    for table_row, pages in zip(order, tables, strict=True):
        table[table_row, : len(pages)] = shuffled[pages]
    query_start = np.cumsum([0] + [queries for queries, _ in shapes]).astype(np.int32)
    seq_lens = np.array([keys for _, keys in shapes], dtype=np.int32)
    found = np.array(segments, dtype=np.int32).reshape(-1, 4)
    return AttentionRows(query_start, seq_lens, table, order, page_size, found)


def random_kv(rows: AttentionRows, num_kv_heads: int, head_dim: int) -> Tensor:
    """float32 [2, num_kv_heads, slots, head_dim], NaN in every slot that no row has."""
    num_slots = (int(rows.page_table.max()) + 1) * rows.page_size
    generator = torch.Generator().manual_seed(num_slots)
    kv_layer = torch.full((2, num_kv_heads, num_slots, head_dim), torch.nan)
    for index, seq_len in enumerate(rows.seq_lens.tolist()):
        slots = torch.from_numpy(rows.slots(index, 0, seq_len))
        shape = (2, num_kv_heads, seq_len, head_dim)
        kv_layer[:, :, slots] = torch.randn(shape, generator=generator)
    return kv_layer


def quantized(kv_layer: Tensor, dtype: torch.dtype) -> QuantizedKV:
    """Quantized KV; NaN is kept in the scales. uint8: in 4 bits."""
    if dtype is torch.uint8:
        return QuantizedKV(*kv_store.quantized(kv_layer, dtype))
    largest = 127.0 if dtype == torch.int8 else 448.0
    scales = kv_layer.abs().amax(-1) / largest
    values = kv_layer / scales[..., None]
    if dtype == torch.int8:
        values = values.nan_to_num(7.0).round()
    return QuantizedKV(values.to(dtype), scales)


def _num_rows(branch: Branch) -> int:
    return sum(map(_num_rows, branch.below)) if branch.below else 1
