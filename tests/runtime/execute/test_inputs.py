"""From plans to tensors: positions, slots, page updates, wanted logits."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from stemma.runtime.execute.inputs import NO_SOURCE, InputBuilder, page_updates, wanted_logits
from stemma.runtime.schedule.plan import PageUpdate, Row, StepPlan
from stemma.runtime.schedule.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize("page_size", [1, 4])
def test_positions_and_slots_follow_pages_over_several_steps(page_size: int) -> None:
    """Against a plain model that keeps every row's pages in a list."""
    builder, generator = _builder(page_size), np.random.default_rng(page_size)
    free = generator.permutation(200).tolist()
    pages: list[list[int]] = [[] for _ in range(5)]
    lengths = [0] * 5
    table = np.zeros_like(builder.page_table.entries)  # as an accelerator has it
    for step in range(8):
        rows, expected = [], []
        for index in generator.permutation(5)[: 1 + step % 5].tolist():
            num_new = int(generator.integers(1, 6))
            start, lengths[index] = lengths[index], lengths[index] + num_new
            first = len(pages[index])
            while len(pages[index]) * page_size < lengths[index]:
                pages[index].append(free.pop())
            new = array("i", pages[index][first:])
            ids = tuple(generator.integers(0, 99, num_new).tolist())
            update = PageUpdate(first, new) if new else None
            rows.append(Row(index, index, start, ids, update))
            for offset, token_id in enumerate(ids):
                at = start + offset
                slot = pages[index][at // page_size] * page_size + at % page_size
                expected.append((token_id, at, slot))
        inputs = builder.build(StepPlan(step, tuple(rows)))
        columns = (inputs.token_ids, inputs.positions, inputs.slots)
        assert all(column.dtype == np.int64 for column in columns)
        _apply(table, page_updates(rows))
        for row in rows:
            known = builder.page_table.entries[row.table_row, : len(pages[row.table_row])]
            assert table[row.table_row, : len(known)].tolist() == known.tolist()
        assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected


def test_a_page_update_may_rewrite_entries_after_a_preemption() -> None:
    builder = _builder(1)
    builder.build(_plan(_row(0, 0, (1, 2, 3), PageUpdate(0, (5, 6, 7)))))
    inputs = builder.build(_plan(_row(0, 0, (9, 9), PageUpdate(0, (8, 5)))))
    assert inputs.slots.tolist() == [8, 5]


def test_from_previous_says_which_token_an_input_is() -> None:
    builder = _builder(1)
    rows = (
        _row(0, 0, (4, 5), PageUpdate(0, (0, 1))),
        _row(1, 7, (0,), PageUpdate(7, (2,)), from_previous=2),
        _row(2, 3, (0,), PageUpdate(3, (3,)), from_previous=0),
    )
    inputs = builder.build(StepPlan(0, rows))
    assert inputs.sources is not None and inputs.sources.tolist() == [NO_SOURCE, NO_SOURCE, 2, 0]
    inputs.check_sources(np.array([True, False, True]))


def test_from_previous_of_a_row_that_sampled_nothing_is_a_broken_plan() -> None:
    row = _row(0, 3, (0,), PageUpdate(3, (3,)), from_previous=0)
    with pytest.raises(AssertionError, match="sampled nothing"):
        _builder(1).build(_plan(row)).check_sources(np.array([False]))


def test_a_step_without_new_pages_has_no_updates() -> None:
    assert page_updates([_row(0, 3, (1,), None)]).shape == (0, 3)


def test_logits_are_wanted_for_sampling_and_scored_rows_only() -> None:
    rows = (
        _row(0, 0, (1, 2, 3), PageUpdate(0, (0, 1, 2)), target_ids=(8, 9), target_start=1),
        _row(1, 5, (4,), PageUpdate(5, (3,)), sampling=GREEDY),
        _row(2, 0, (5, 6), PageUpdate(0, (4, 5)), sampling=GREEDY, target_ids=(7,)),
    )
    plan = StepPlan(0, rows)
    wanted = wanted_logits(plan, _builder(1).build(plan).layout)
    assert wanted.sampled_rows == (1, 2) and wanted.scored_rows == (0, 2)
    assert wanted.sampled_tokens is not None and wanted.sampled_tokens.tolist() == [3, 5]
    assert wanted.sampled_positions.tolist() == [6, 2]
    assert wanted.scored_tokens is not None and wanted.scored_tokens.tolist() == [1, 2, 4]
    assert wanted.target_ids.tolist() == [8, 9, 7]


def test_a_decode_step_picks_no_hidden_states() -> None:
    plan = _plan(*(_row(i, 4, (1,), PageUpdate(4, (i,)), sampling=GREEDY) for i in range(3)))
    wanted = wanted_logits(plan, _builder(1).build(plan).layout)
    assert wanted.sampled_tokens is None and wanted.scored_tokens is None


def test_targets_past_the_inputs_are_a_broken_plan() -> None:
    plan = _plan(_row(0, 0, (1, 2), PageUpdate(0, (0, 1)), target_ids=(1, 2), target_start=1))
    with pytest.raises(AssertionError, match="targets reach past"):
        wanted_logits(plan, _builder(1).build(plan).layout)


def _builder(page_size: int) -> InputBuilder:
    return InputBuilder(page_size=page_size, max_running_requests=5, max_model_len=64)


def _apply(table: np.ndarray[Any, Any], updates: np.ndarray[Any, Any]) -> None:
    assert updates.dtype == np.int32 and updates.shape[1] == 3
    table[updates[:, 0], updates[:, 1]] = updates[:, 2]


def _row(
    table_row: int, start: int, ids: tuple[int, ...], update: PageUpdate | None, **rest: Any
) -> Row:
    return Row(table_row, table_row, start, ids, update, **rest)


def _plan(*rows: Row) -> StepPlan:
    return StepPlan(0, rows)
