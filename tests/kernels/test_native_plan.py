"""The work list of the native attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stemma.kernels.attention_rows import AttentionRows
from stemma.kernels.native import paged_attention as native


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("num_tokens", "seq_len"), [(1, 1), (1, 1023), (1, 3000), (5, 5), (64, 90), (65, 90)]
)
def test_a_lone_row_is_planned_as_it_is_among_others(
    num_tokens: int, seq_len: int, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = -(-seq_len // page_size)
    rows = AttentionRows(
        query_start=np.array([0, num_tokens], dtype=np.int32),
        seq_lens=np.array([seq_len], dtype=np.int32),
        page_table=np.random.default_rng(0).integers(0, 99, (3, pages), dtype=np.int32),
        table_rows=np.array([2], dtype=np.int32),
        page_size=page_size,
    )
    kv_layer = torch.zeros((2, 2, 100 * page_size, 16))
    plain = native.plan_attention(rows, kv_layer, 4)
    monkeypatch.setattr(native, "_plan_lone_row", lambda rows, options: None)
    general = native.plan_attention(rows, kv_layer, 4)
    assert isinstance(plain, native.NativeAttentionPlan)
    assert isinstance(general, native.NativeAttentionPlan)
    np.testing.assert_array_equal(plain.items, general.items)
    np.testing.assert_array_equal(plain.slots, general.slots)
