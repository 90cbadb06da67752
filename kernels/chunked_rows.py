"""Attention within chunks: a query sees the keys of its own chunk alone (Llama 4).

    tokens   0 ........ chunk ........ 2 * chunk ..... seq_len
    queries                   |------------|---------------|
    rows of full attention              |-- q --|              keys from chunk on
                                                |---- q ---|   keys from 2 * chunk on

So a row is one of full attention for each chunk that it has queries in, and every backend's own way
of attending serves it. Where no row reaches the second chunk, rows stay as they are, with segments;
behind it what rows share is read by each of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .attention_rows import AttentionRows, IntArray, no_segments


def has_chunks(rows: AttentionRows, chunk: int | None) -> bool:
    """Whether some row does not see all of its keys."""
    return chunk is not None and int(rows.seq_lens.max()) > chunk


def split_at_chunks(rows: AttentionRows, chunk: int) -> tuple[AttentionRows, IntArray]:
    """The rows cut where chunks begin, over the same pages, without segments; and the first key
    that each one's queries see."""
    last = rows.seq_lens - 1
    first = rows.seq_lens - rows.num_queries
    parts = last // chunk - first // chunk + 1
    row = np.repeat(np.arange(rows.num_rows, dtype=np.int32), parts)
    nth = np.arange(len(row), dtype=np.int32) - np.repeat(np.cumsum(parts) - parts, parts)
    begin = ((first // chunk)[row] + nth) * np.int32(chunk)
    ends = np.minimum(begin + np.int32(chunk), rows.seq_lens[row])
    starts = np.maximum(begin, first[row])
    query_start = np.concatenate(([0], np.cumsum(ends - starts)))
    cut = replace(
        rows,
        query_start=query_start.astype(np.int32),
        seq_lens=ends.astype(np.int32),
        table_rows=rows.table_rows[row],
        segments=no_segments(),
    )
    return cut, begin.astype(np.int32)


def in_chunks(rows: AttentionRows, chunk: int | None) -> AttentionRows:
    """Rows of full attention over pages of their own, for backends that read pages on the host."""
    if chunk is None or not has_chunks(rows, chunk):
        return rows
    cut, first = split_at_chunks(rows, chunk)
    lens = cut.seq_lens - first
    page_size = rows.page_size if chunk % rows.page_size == 0 else 1
    table = np.zeros((cut.num_rows, -(-int(lens.max()) // page_size)), dtype=np.int32)
    for row, (begin, length) in enumerate(zip(first.tolist(), lens.tolist(), strict=True)):
        if page_size == 1:
            table[row, :length] = cut.slots(row, begin, begin + length)
            continue
        pages = -(-length // page_size)
        at = begin // page_size
        table[row, :pages] = rows.page_table[cut.table_rows[row], at : at + pages]
    own = np.arange(cut.num_rows, dtype=np.int32)
    return replace(cut, seq_lens=lens, page_table=table, table_rows=own, page_size=page_size)
