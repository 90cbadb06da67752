"""Branches of drafts as rows of their own: what computes a step knows no trees.

A branch's row stands behind its own row, begins where it branches off, and reads, through a page
table made for this step, the pages of all that is before it on its path. Some of these pages are
written in the same step, by rows before it; all of a layer's KV is stored before any row attends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..schedule.draft_tree import exchanges_by_draws
from ..schedule.plan import Row, RowResult, SharedSegment, StepPlan
from .inputs import PageTable


def flattened(plan: StepPlan, table: PageTable, segment_cost_tokens: int) -> StepPlan:
    """The plan with a row for each branch; their page tables are made, and the rows' updates
    applied. What a row's branches share with it is a segment where that pays (see
    `TreeOrder.segments`)."""
    if not any(row.branches for row in plan.rows):
        return plan
    table.apply(plan.rows)
    rows: list[Row] = []
    firsts: list[int] = []
    table_row = table.first_spare_row
    for row in plan.rows:
        firsts.append(len(rows))
        rows += (row, *_branch_rows(row, table, table_row))
        table_row += len(row.branches)
    firsts.append(len(rows))
    segments = [
        replace(each, row_start=firsts[each.row_start], row_end=firsts[each.row_end])
        for each in plan.segments
    ]
    for place, row in enumerate(plan.rows):
        first, end = firsts[place], firsts[place + 1]
        begin = max((s.token_end for s in segments if s.row_start <= first < s.row_end), default=0)
        if (row.start - begin) * len(row.branches) > segment_cost_tokens * (end - first):
            segments.append(SharedSegment(begin, row.start, first, end))
    return replace(plan, rows=tuple(rows), segments=tuple(segments))


def folded(plan: StepPlan, results: Sequence[RowResult], table: PageTable) -> tuple[RowResult, ...]:
    """The results of the plan's rows from those of its flattened rows; the pages of what is right
    by the draws become the rows'."""
    each = iter(results)
    rows = []
    for row in plan.rows:
        result = next(each)
        if row.branches:
            result = result._replace(branches=tuple([next(each) for _ in row.branches]))
            table.exchange(row.table_row, exchanges_by_draws(row, result))
        rows.append(result)
    return tuple(rows)


def _branch_rows(row: Row, table: PageTable, table_row: int) -> Iterator[Row]:
    """A row's branches as rows, whose page tables are `table_row` and those behind it."""
    paths = [(0, row.table_row, row.start)]  # the number, table row and position of a first token
    num_tokens = len(row.input_ids)
    for branch in row.branches:
        first, source, start = next(path for path in reversed(paths) if path[0] <= branch.behind)
        start += branch.behind - first + 1
        end, page_at = start + len(branch.input_ids), branch.page_at
        entries = table.entries
        entries[table_row, :start] = entries[source, :start]
        pages = entries[row.table_row, page_at : page_at + len(branch.input_ids)]
        entries[table_row, start:end] = pages
        yield row._replace(
            table_row=table_row,
            start=start,
            input_ids=branch.input_ids,
            page_update=None,
            sampling=row.sampling if branch.sampled_at else None,
            adjustments=branch.adjustments,
            mask=branch.mask,
            sampled_at=branch.sampled_at,
            num_drafts=0,
            num_ahead=0,
            num_beside=0,
            expand_at=0,
            branches=(),
        )
        paths.append((num_tokens, table_row, start))
        num_tokens += len(branch.input_ids)
        table_row += 1
