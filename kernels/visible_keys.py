"""The keys that the rows of a step read under a window, as runs of tokens.

    tokens 0     num_sinks     first   shared_start     own_start    seq_len
           |-sinks-|  unread     |-alone-|---segments-----|----own-----|

A segment serves a row only if all of the segment's queries see it whole, so that nothing in it has
to be hidden; the row reads the rest of its window alone. Without a window, or if no row is longer
than it, segments stay unchanged and the runs before them are empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .attention_rows import AttentionRows, IntArray
from .model_options import AttentionOptions


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """The runs of each row, [num_rows] each. In the runs alone and own a query sees only the keys
    of its window; the sinks, and the remaining segments, are seen whole (causally)."""

    segments: IntArray  # [S, 4], as in AttentionRows, but a row's may begin behind token 0
    num_sinks: IntArray
    first: IntArray
    shared_start: IntArray  # own_start if no segment is left
    own_start: IntArray


def visible_keys(rows: AttentionRows, options: AttentionOptions) -> VisibleKeys:
    lens, window = rows.seq_lens, options.window
    if window is None or int(lens.max()) <= window:
        none = np.zeros(rows.num_rows, dtype=np.int32)
        return VisibleKeys(rows.segments, none, none, none, rows.own_start())
    num_sinks = np.where(lens > window, np.minimum(options.num_sink_tokens, lens), 0)
    first = np.maximum(lens - rows.num_queries + 1 - window, num_sinks)
    shared_start, own_start, is_shared = first.copy(), first.copy(), np.zeros(len(lens), dtype=bool)
    segments = []
    for start, end, row_start, row_end in rows.segments.tolist():
        part = slice(row_start, row_end)
        start = max(start, int(lens[part].max()) - window, int(num_sinks[part].max()))
        if start >= end:
            continue
        segments.append((start, end, row_start, row_end))
        # NOTE: within a remaining segment, all others are whole: their rows are among its own.
        if not is_shared[row_start]:
            shared_start[part], is_shared[part] = start, True
        own_start[part] = end
    left = np.array(segments, dtype=np.int32).reshape(-1, 4)
    runs = (num_sinks, first, shared_start, own_start)
    return VisibleKeys(left, *(run.astype(np.int32) for run in runs))
