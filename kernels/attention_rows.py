"""Which KV each row of a step attends to: host-side integers, made once a step.

    row r's queries:  tokens query_start[r] .. query_start[r + 1] of the step's flat token axis,
                      at positions seq_lens[r] - num_queries .. seq_lens[r] of its sequence

A query sees the keys at its own position and before (causal by absolute position). Every backend
turns this into whatever its kernel wants (`plan_attention`), once for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """The rows of one step. Every row has at least one query: `1 <= queries <= seq_lens`."""

    query_start: IntArray  # [num_rows + 1], ascending from 0
    seq_lens: IntArray  # [num_rows], tokens with KV once this step has stored its own
    page_table: IntArray  # [num_rows, >= max pages of a row]; page ids, garbage past a row's last
    page_size: int  # token slots a page

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens)

    @property
    def num_queries(self) -> IntArray:
        """Queries of each row, [num_rows]."""
        return np.diff(self.query_start)

    def padded_slots(self, rows: IntArray) -> IntArray:
        """The KV slots of the given rows, [len(rows), longest]; slot = page * page_size + offset.

        Past a row's end its own first slot is repeated: it may be read and then masked, and a
        non-finite value in it harms no other row.
        """
        seq_lens = self.seq_lens[rows]
        longest = int(seq_lens.max())
        num_pages = -(-longest // self.page_size)
        pages = self.page_table[rows, :num_pages]
        if self.page_size == 1:
            slots = pages
        else:
            offsets = np.arange(self.page_size, dtype=np.int32)
            slots = (pages[:, :, None] * np.int32(self.page_size) + offsets).reshape(len(rows), -1)
            slots = slots[:, :longest]
        if int(seq_lens.min()) == longest:
            return np.ascontiguousarray(slots)
        is_past_end = np.arange(longest, dtype=np.int32) >= seq_lens[:, None]
        return np.where(is_past_end, slots[:, :1], slots)
