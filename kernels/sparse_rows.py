"""A step's queries where each attends to a limited number of selected keys.

    position 0           num_selected
             |---whole---|------sparse------...

A whole query sees no more keys than may be selected, and attends to all of them, as without
selection; a sparse one attends to `num_selected` of them. So which kind it is depends on its
position alone. Attention to selected keys is that of a row of one query whose pages are the slots
of these keys, so that every kernel of attention can compute it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .attention_rows import AttentionRows, IntArray


@dataclass(frozen=True, slots=True)
class SomeRows:
    """A step's rows with some of their queries, whose token axis is numbered anew."""

    tokens: npt.NDArray[np.int64]  # their places on the step's token axis, ascending
    rows: AttentionRows


def split_rows(rows: AttentionRows, num_selected: int) -> tuple[SomeRows | None, SomeRows | None]:
    """The whole queries and the sparse ones; None: there are none. Segments are kept where no
    query is sparse."""
    num_queries = rows.num_queries
    num_whole = np.clip(num_selected - (rows.seq_lens - num_queries), 0, num_queries)
    if (num_whole == num_queries).all():
        return SomeRows(np.arange(rows.query_start[-1], dtype=np.int64), rows), None
    starts = rows.query_start[:-1]
    rest = num_queries - num_whole
    return (
        _some(rows, starts, num_whole, rows.seq_lens - rest),
        _some(rows, starts + num_whole, rest, rows.seq_lens),
    )


def _some(
    rows: AttentionRows, first: IntArray, count: IntArray, seq_lens: IntArray
) -> SomeRows | None:
    """count [num_rows] queries of each row from token `first` [num_rows] on."""
    kept = np.flatnonzero(count)
    if not len(kept):
        return None
    first, count = first[kept], count[kept]
    query_start = np.zeros(len(kept) + 1, dtype=np.int32)
    np.cumsum(count, out=query_start[1:])
    tokens = np.arange(query_start[-1]) + np.repeat(first - query_start[:-1], count)
    part = AttentionRows(
        query_start, seq_lens[kept], rows.page_table, rows.table_rows[kept], rows.page_size
    )
    return SomeRows(tokens.astype(np.int64), part)


def rows_of_selected(slots: IntArray) -> AttentionRows:
    """slots [T, num_selected] of the keys of one query each."""
    num_tokens, num_selected = slots.shape
    return AttentionRows(
        query_start=np.arange(num_tokens + 1, dtype=np.int32),
        seq_lens=np.full(num_tokens, num_selected, dtype=np.int32),
        page_table=slots,
        table_rows=np.arange(num_tokens, dtype=np.int32),
        page_size=1,
    )
