"""A step's work list: every query meets every key that it sees once, within what fits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from attention_trees import Branch, branches, row, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.kernels.attention_rows import AttentionRows
from stemma.kernels.triton import work_list
from stemma.kernels.triton.work_list import AttentionShape, Capacity, WorkList, plan_work

SHAPE = AttentionShape(
    num_heads=8, num_kv_heads=2, num_slots=1 << 20, narrow_rows=16, wide_rows=128
)
LLAMA = dataclasses.replace(SHAPE, num_heads=32, num_kv_heads=8)

windows = {
    "window": st.one_of(st.none(), st.integers(1, 90)),
    "num_sink_tokens": st.integers(0, 40),
}
sizes = st.builds(
    AttentionShape,
    num_heads=st.sampled_from([4, 12, 64]),
    num_kv_heads=st.sampled_from([1, 4]),
    num_slots=st.sampled_from([64, 1 << 20]),
    narrow_rows=st.sampled_from([16, 64]),
    wide_rows=st.sampled_from([64, 128]),
)
shapes = st.one_of(
    st.builds(dataclasses.replace, sizes, **windows),
    st.builds(dataclasses.replace, sizes, chunk=st.sampled_from([1, 2, 7, 32, 500])),
)
single_rows = st.builds(
    lambda num_queries, before: row(num_queries, num_queries + before),
    st.integers(1, 150),
    st.one_of(st.integers(0, 80), st.integers(0, 5000)),
)


@settings(max_examples=150)
@given(
    forest=st.lists(st.one_of(branches, single_rows), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 4, 16]),
    min_rows=st.sampled_from([1, 2]),
    shape=shapes,
    padding=st.one_of(st.none(), st.integers(0, 100)),
)
def test_every_query_meets_each_key_that_it_sees_once(
    forest: list[Branch],
    page_size: int,
    min_rows: int,
    shape: AttentionShape,
    padding: int | None,
) -> None:
    rows = rows_of(forest, page_size, min_rows)
    num_tokens = int(rows.query_start[-1])
    work = plan_work(rows, shape, None if padding is None else num_tokens + padding)
    _check_cover(rows, shape, work)
    if padding is not None:
        sizes = {name: array.shape for name, array in work.arrays().items()}
        lone = rows_of([row(1, 1)], page_size)
        table = np.zeros_like(rows.page_table)
        other = dataclasses.replace(lone, page_table=table, table_rows=lone.table_rows * 0)
        other_work = plan_work(other, shape, num_tokens + padding)
        assert sizes == {name: array.shape for name, array in other_work.arrays().items()}
        assert work.max_partials == other_work.max_partials


def test_capacities_hold_where_segments_nest_deeply() -> None:
    """A chain in which each row leaves one segment earlier: rows / 2 levels on average."""
    chain = Branch(1)
    for _ in range(60):
        chain = Branch(1, (chain, Branch(1)))
    rows = rows_of([chain], 16)
    assert len(rows.segments) == 60
    work = plan_work(rows, LLAMA, 64)
    _check_cover(rows, LLAMA, work)


def test_a_step_too_small_for_a_wide_tile_has_no_wide_list() -> None:
    """So that its graph has no launch that finds nothing to do."""
    rows = rows_of([row(LLAMA.narrow_tokens, 4000)], 16)
    for padding in (0, 1):
        work = plan_work(rows, LLAMA, LLAMA.narrow_tokens + padding)
        assert bool(len(work.wide_items)) is bool(padding)
        _check_cover(rows, LLAMA, work)


def test_capacities_hold_for_many_long_rows_in_a_small_pool() -> None:
    """More parts than the pool's slots would give rows that share nothing."""
    shape = dataclasses.replace(LLAMA, num_slots=4096)
    rows = rows_of([Branch(0, (), 1, 40_000) for _ in range(8)], 64)
    assert len(plan_work(rows, shape).narrow_items) > Capacity.of(8, 8, shape).narrow_items
    _check_cover(rows, shape, plan_work(rows, shape, 8))


@pytest.mark.parametrize("context, num_units", [(4096, 64), (131072, 384)])
def test_a_lone_long_row_is_cut_into_units_for_the_whole_device(
    context: int, num_units: int
) -> None:
    work = plan_work(rows_of([row(1, context)], 64), LLAMA)
    assert len(work.narrow_items) * LLAMA.num_kv_heads == num_units


def test_the_units_of_a_batch_are_of_similar_size() -> None:
    rows = rows_of([row(1, 1200 + 137 * i) for i in range(64)], 64)
    sizes = np.array([len(keys) for _, keys, _ in _items(plan_work(rows, LLAMA))])
    assert sizes.max() <= 2 * 512 and sizes.mean() >= 512


def test_parts_do_not_depend_on_the_step() -> None:
    forest = [row(1, 9000), row(300, 5000), row(1, 70)]
    together = plan_work(rows_of(forest, 16), LLAMA)
    for index, alone in enumerate(forest):
        parts = _parts_by_token(plan_work(rows_of([alone], 16), LLAMA))
        first = int(rows_of(forest, 16).query_start[index])
        of_row = _parts_by_token(together)
        assert all(of_row[first + token] == keys for token, keys in parts.items())


def test_the_longest_items_come_first() -> None:
    work = plan_work(rows_of([row(1, 600), row(500, 3000), row(1, 40_000)], 16), LLAMA)
    for runs in (work.narrow_runs, work.wide_runs):
        assert (np.diff(runs[work_list.PART_KEYS]) <= 0).all()


def test_keys_before_the_window_are_in_no_item() -> None:
    shape = dataclasses.replace(LLAMA, window=128, num_sink_tokens=4)
    work = plan_work(rows_of([row(1, 10_000), row(200, 10_000)], 16), shape)
    read = sum(len(keys) for _, keys, _ in _items(work))
    num_tiles = -(-200 // shape.wide_tokens)
    assert read <= (128 + 4) + num_tiles * (128 + 4 + shape.wide_tokens)


def _check_cover(rows: AttentionRows, shape: AttentionShape, work: WorkList) -> None:
    """Every pair that is seen is in one item; partial results are numbered without a gap."""
    num_tokens = int(rows.query_start[-1])
    row_of = np.repeat(np.arange(rows.num_rows), rows.num_queries)
    position = np.arange(num_tokens) - rows.query_start[row_of]
    position += (rows.seq_lens - rows.num_queries)[row_of]
    met = np.zeros((num_tokens, int(rows.seq_lens.max())), dtype=np.int32)
    written: list[list[int]] = [[] for _ in range(num_tokens)]
    for run, keys, part in _items(work):
        tokens = np.arange(run[work_list.TOKEN], run[work_list.TOKEN] + run[work_list.NUM_TOKENS])
        seen = np.ones((len(tokens), len(keys)), dtype=bool)
        if run[work_list.POSITION] != work_list.SEEN_WHOLE:
            assert (position[tokens] == run[work_list.POSITION] + np.arange(len(tokens))).all()
            seen = _is_visible(position[tokens], keys, shape)
        met[tokens[:, None], keys] += seen
        _check_pages(rows, run, row_of[tokens], keys)
        for token in tokens.tolist():
            written[token].append(part)
    key = np.arange(met.shape[1])
    assert (met == _is_visible(position, key, shape)).all()
    starts = work.partial_start
    assert work.num_tokens.tolist() == [num_tokens]
    for token, parts in enumerate(written):
        if parts == [work_list.DIRECT]:
            assert starts[token] == starts[token + 1]
        else:
            assert sorted(parts) == list(range(starts[token + 1] - starts[token]))
            assert len(parts) > 1
    assert (starts[num_tokens:] == starts[num_tokens]).all()
    assert starts[-1] <= work.max_partials


def _check_pages(
    rows: AttentionRows, run: np.ndarray, row_of: np.ndarray, keys: np.ndarray
) -> None:
    """The pages that are read are those of every row of the item."""
    pages = keys // rows.page_size
    read = rows.page_table[run[work_list.TABLE_ROW], pages]
    assert (rows.page_table[rows.table_rows[np.unique(row_of)]][:, pages] == read).all()


def _is_visible(position: np.ndarray, key: np.ndarray, shape: AttentionShape) -> np.ndarray:
    is_visible = key <= position[:, None]
    if shape.window is not None:
        near = key > position[:, None] - shape.window
        is_visible &= near | (key < shape.num_sink_tokens)
    if shape.chunk is not None:
        is_visible &= key // shape.chunk == position[:, None] // shape.chunk
    return is_visible


def _items(work: WorkList) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """The run, keys and number (or DIRECT) of each item, as the kernel finds them."""
    found = []
    widths = (work.narrow_runs, work.narrow_items), (work.wide_runs, work.wide_items)
    for (runs, items), num_items in zip(widths, work.num_items.tolist(), strict=True):
        for item, index in enumerate(items[:num_items].tolist()):
            run = runs[:, index]
            part = item - int(run[work_list.FIRST_ITEM])
            first = int(run[work_list.FIRST_KEY]) + part * int(run[work_list.PART_KEYS])
            last = min(first + int(run[work_list.PART_KEYS]), int(run[work_list.END_KEY]))
            assert first < last
            is_direct = run[work_list.FIRST_PART] == work_list.DIRECT
            number = work_list.DIRECT if is_direct else int(run[work_list.FIRST_PART]) + part
            found.append((run, np.arange(first, last), number))
    return found


def _parts_by_token(work: WorkList) -> dict[int, list[tuple[int, int]]]:
    """First and last key of each token's items."""
    parts: dict[int, list[tuple[int, int]]] = {}
    for run, keys, _ in _items(work):
        for token in range(run[work_list.TOKEN], run[work_list.TOKEN] + run[work_list.NUM_TOKENS]):
            parts.setdefault(token, []).append((int(keys[0]), int(keys[-1])))
    return {token: sorted(keys) for token, keys in parts.items()}
