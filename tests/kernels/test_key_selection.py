"""Selection of keys: torch's products against the reference, and which queries it is for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_trees import Branch, branches, row, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.kernels.attention_rows import AttentionRows
from stemma.kernels.cpu import key_selection as cpu
from stemma.kernels.reference import key_selection as reference
from stemma.kernels.sparse_rows import SomeRows, split_rows
from stemma.kernels.triton import key_selection as queued

NUM_HEADS, HEAD_DIM = 3, 8
NUM_SELECTED = 7


@pytest.mark.parametrize("has_ties", [False, True])
@settings(max_examples=25, deadline=None)
@given(st.lists(branches, min_size=1, max_size=3), st.sampled_from([1, 4]))
def test_the_same_keys_are_selected(has_ties: bool, forest: list[Branch], page_size: int) -> None:
    """Ties: of products that are whole numbers, many below 0."""
    _, sparse = split_rows(rows_of([*forest, row(3, 30)], page_size), NUM_SELECTED)
    assert sparse is not None
    rows = sparse.rows
    q, weights, keys = _inputs(rows, has_ties)
    plan = reference.plan_selection(rows, NUM_SELECTED)
    expected = reference.select_keys(q, weights, keys, plan)
    assert expected.shape == (len(q), NUM_SELECTED) and expected.dtype is torch.int32
    found = cpu.select_keys(q, weights, keys, cpu.plan_selection(rows, NUM_SELECTED))
    assert torch.equal(found, expected)
    of_device = queued.plan_selection(rows, NUM_SELECTED).bind({}, torch.tensor(rows.page_table))
    assert torch.equal(cpu.select_keys(q, weights, keys, of_device), expected)


def test_of_equal_scores_the_earlier_keys_are_selected() -> None:
    rows = rows_of([row(2, 20)], 1)
    slots = rows.slots(0, 0, 20)
    q = torch.ones(2, 1, 4, dtype=torch.float64)
    keys = torch.zeros(40, 4, dtype=torch.float64)
    keys[torch.from_numpy(slots[[5, 18, 19]])] = 1.0  # the first query does not see the last
    weights = torch.ones(2, 1, dtype=torch.float64)
    for backend in (reference, cpu):
        selected = backend.select_keys(q, weights, keys, backend.plan_selection(rows, 4))
        places = [[slots.tolist().index(slot) for slot in each] for each in selected.tolist()]
        assert places == [[0, 1, 5, 18], [0, 5, 18, 19]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_not_finite_select_keys_that_are_seen(bad: float) -> None:
    rows = rows_of([row(2, 20)], 4)
    q, weights, keys = _inputs(rows, has_ties=False)
    weights[:] = bad
    for backend in (reference, cpu):
        selected = backend.select_keys(q, weights, keys, backend.plan_selection(rows, 4))
        for query, slots in enumerate(selected.tolist()):
            assert len({*slots}) == 4 and {*slots} <= {*rows.slots(0, 0, 19 + query).tolist()}


def test_long_rows_in_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of([row(9, 40), row(1, 33)], 4)
    q, weights, keys = _inputs(rows, has_ties=True)
    whole = cpu.select_keys(q, weights, keys, cpu.plan_selection(rows, NUM_SELECTED))
    monkeypatch.setattr(cpu, "_BLOCK_SCORES", 2 * NUM_HEADS * 40)
    cut = cpu.select_keys(q, weights, keys, cpu.plan_selection(rows, NUM_SELECTED))
    assert torch.equal(cut, whole)


@given(st.lists(branches, min_size=1, max_size=3), st.integers(1, 40))
def test_a_position_alone_decides_whether_keys_are_selected(
    forest: list[Branch], num_selected: int
) -> None:
    rows = rows_of(forest, 4)
    expected = _places(SomeRows(np.arange(rows.query_start[-1], dtype=np.int64), rows))
    whole, sparse = (part and _places(part) for part in split_rows(rows, num_selected))
    assert all(place < num_selected for _, _, place in whole or ())
    assert all(place >= num_selected for _, _, place in sparse or ())
    assert sorted([*(whole or ()), *(sparse or ())]) == expected


def _places(part: SomeRows) -> list[tuple[int, int, int]]:
    """(token of the step, row of the page table, position) of each query."""
    rows = part.rows
    found = []
    for index, (start, end) in enumerate(zip(rows.query_start, rows.query_start[1:])):
        positions = range(int(rows.seq_lens[index]) - int(end - start), int(rows.seq_lens[index]))
        tokens = part.tokens[start:end].tolist()
        found += [
            (token, int(rows.table_rows[index]), place) for token, place in zip(tokens, positions)
        ]
    return found


def _inputs(rows: AttentionRows, has_ties: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys whose last page, no row's, is not a number."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = int(rows.query_start[-1])
    num_slots = (int(rows.page_table.max()) + 1) * rows.page_size
    shapes = ((num_tokens, NUM_HEADS, HEAD_DIM), (num_tokens, NUM_HEADS), (num_slots, HEAD_DIM))
    q, weights, keys = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    if has_ties:
        q, weights, keys = (tensor.round() for tensor in (q, weights, keys))
    keys[num_slots - rows.page_size :] = torch.nan
    return q, weights, keys
