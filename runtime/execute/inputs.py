"""From a `StepPlan` of plain integers to the arrays and tensors of one forward pass.

    row 0          row 1      row 2
    |..............|.|........|....|      the flat token axis, T tokens
    0              query_start[1], ...    row r owns [query_start[r], query_start[r + 1])

No loop here runs over tokens: rows are visited in Python, tokens by numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.attention_rows import AttentionRows
from ...kernels.registry import Kernels
from ..step import Row, StepPlan

Int64Array = npt.NDArray[np.int64]

# In `previous_tokens`: the row sampled nothing.
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All that a model's `forward` gets to know of a step. T tokens, R rows."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, of each token in its own sequence
    slot_mapping: Tensor  # [T] int64, where each token's KV goes; distinct
    kv_layers: tuple[Tensor, ...]  # per layer [2, num_kv_heads, num_slots, head_dim]
    attention: object  # what the kernels' plan_attention made of the R rows


@dataclass(frozen=True, slots=True)
class WantedLogits:
    """Which of the step's T hidden states are turned into logits, or summed. N sampled, M
    scored."""

    sampled_rows: tuple[int, ...]  # [N] rows of the plan that sample
    sampled_tokens: Int64Array  # [N] on the token axis
    is_every_token: bool  # these are all tokens of the step, in order
    sampled_positions: Int64Array  # [N] position that the new token will have
    scored_rows: tuple[int, ...]  # rows of the plan with targets
    scored_tokens: Int64Array  # [M] on the token axis, row after row
    target_ids: Int64Array  # [M]
    num_tops: tuple[int, ...]  # [M], how many of the best tokens are told beside each
    pooled: tuple[tuple[int, int, int], ...]  # (row of the plan, first, end on the token axis)


class PageTable:
    """Page ids by table row: `entries` [max_running_requests, max_pages] int32.

    A row's entries past what updates have written are stale and must not be read.
    """

    def __init__(self, max_running_requests: int, max_pages: int) -> None:
        self.entries = np.zeros((max_running_requests, max_pages), dtype=np.int32)

    def apply(self, rows: Sequence[Row]) -> None:
        """Write the rows' updates; most are one page (decode), taken in one assignment."""
        single_rows, single_firsts, single_pages = [], [], []
        for row in rows:
            update = row.page_update
            if update is None:
                continue
            if len(update.pages) == 1:
                single_rows.append(row.table_row)
                single_firsts.append(update.first)
                single_pages.append(update.pages[0])
            else:
                last = update.first + len(update.pages)
                self.entries[row.table_row, update.first : last] = update.pages
        if single_rows:
            self.entries[single_rows, single_firsts] = single_pages


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's inputs as host arrays. T tokens, R rows."""

    layout: Layout
    input_ids: Int64Array  # [T], 0 where `sources` says which token it is
    sources: dict[int, int]  # by place on the token axis: a row of the previous plan
    positions: Int64Array  # [T]
    slots: Int64Array  # [T], where each token's KV goes
    attention: AttentionRows


class StepInputBuilder:
    """Lays out the rows of each step; owns the page table."""

    def __init__(self, *, page_size: int, max_running_requests: int, max_model_len: int) -> None:
        self.page_table = PageTable(max_running_requests, -(-max_model_len // page_size))
        self._page_size = page_size

    def build(self, plan: StepPlan) -> StepInputs:
        """Takes in the plan's page updates, too."""
        rows = plan.rows
        self.page_table.apply(rows)
        layout = Layout.of(rows)
        positions = layout.positions()
        input_ids = np.fromiter(
            chain.from_iterable([row.input_ids for row in rows]), np.int64, layout.num_tokens
        )
        return StepInputs(
            layout=layout,
            input_ids=input_ids,
            sources={
                int(layout.query_start[index]): row.from_previous
                for index, row in enumerate(rows)
                if row.from_previous is not None
            },
            positions=positions,
            slots=self._slots(layout, positions),
            attention=AttentionRows(
                query_start=layout.query_start.astype(np.int32),
                seq_lens=(layout.starts + layout.lengths).astype(np.int32),
                page_table=self.page_table.entries,
                table_rows=layout.table_rows.astype(np.int32),
                page_size=self._page_size,
                segments=_segments(plan),
            ),
        )

    def _slots(self, layout: Layout, positions: Int64Array) -> Int64Array:
        table_rows = layout.table_rows[layout.row_of_token()]
        pages, offsets = np.divmod(positions, self._page_size)
        entries = self.page_table.entries[table_rows, pages].astype(np.int64)
        slots: Int64Array = entries * self._page_size + offsets
        return slots


class InputBuilder:
    """Builds the batch of each step on a CPU; borrows the KV pool's tensors."""

    def __init__(
        self,
        kernels: Kernels,
        kv_layers: tuple[Tensor, ...],
        *,
        num_heads: int,
        page_size: int,
        max_running_requests: int,
        max_model_len: int,
    ) -> None:
        self._steps = StepInputBuilder(
            page_size=page_size,
            max_running_requests=max_running_requests,
            max_model_len=max_model_len,
        )
        self._kernels = kernels
        self._kv_layers = kv_layers
        self._num_heads = num_heads

    def build(self, plan: StepPlan, previous_tokens: Int64Array) -> tuple[ForwardBatch, Layout]:
        """`previous_tokens` [rows of the previous plan]: what each sampled, or NO_TOKEN."""
        inputs = self._steps.build(plan)
        _fill_from_previous(inputs, previous_tokens)
        batch = ForwardBatch(
            input_ids=torch.from_numpy(inputs.input_ids),
            positions=torch.from_numpy(inputs.positions),
            slot_mapping=torch.from_numpy(inputs.slots),
            kv_layers=self._kv_layers,
            attention=self._kernels.plan_attention(
                inputs.attention, self._kv_layers[0], self._num_heads
            ),
        )
        return batch, inputs.layout


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the R rows lie on the token axis."""

    table_rows: Int64Array  # [R]
    starts: Int64Array  # [R] position of the first input
    lengths: Int64Array  # [R] number of inputs, >= 1
    query_start: Int64Array  # [R + 1]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Layout:
        lengths = np.array([len(row.input_ids) for row in rows], dtype=np.int64)
        assert len(rows) and int(lengths.min()) > 0, "a plan has rows, and each row has inputs"
        query_start = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=query_start[1:])
        return cls(
            table_rows=np.array([row.table_row for row in rows], dtype=np.int64),
            starts=np.array([row.start for row in rows], dtype=np.int64),
            lengths=lengths,
            query_start=query_start,
        )

    @property
    def num_tokens(self) -> int:
        return int(self.query_start[-1])

    @property
    def is_one_each(self) -> bool:
        """Whether every row has exactly one input, so that tokens and rows coincide."""
        return self.num_tokens == len(self.lengths)

    def row_of_token(self) -> Int64Array:
        """[T]"""
        if self.is_one_each:
            return np.arange(self.num_tokens)
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def positions(self) -> Int64Array:
        """[T]"""
        if self.is_one_each:
            return self.starts
        shift = np.repeat(self.starts - self.query_start[:-1], self.lengths)
        return np.arange(self.num_tokens) + shift


def _segments(plan: StepPlan) -> npt.NDArray[np.int32]:
    """[S, 4], the columns of AttentionRows.segments."""
    columns = [(s.token_start, s.token_end, s.row_start, s.row_end) for s in plan.segments]
    return np.array(columns, dtype=np.int32).reshape(-1, 4)


def wanted_logits(plan: StepPlan, layout: Layout) -> WantedLogits:
    """Which hidden states the plan's rows ask logits of."""
    rows = plan.rows
    sampled = tuple(index for index, row in enumerate(rows) if row.sampling is not None)
    scored = tuple(index for index, row in enumerate(rows) if row.target_ids)
    is_every_token = layout.is_one_each and len(sampled) == len(rows)
    sampled_list = list(sampled)
    last_tokens = layout.query_start[1:][sampled_list] - 1
    return WantedLogits(
        sampled_rows=sampled,
        sampled_tokens=last_tokens,
        is_every_token=is_every_token,
        sampled_positions=(layout.starts + layout.lengths)[sampled_list],
        scored_rows=scored,
        scored_tokens=_scored_tokens(rows, scored, layout),
        target_ids=np.array(
            [token_id for index in scored for token_id in rows[index].target_ids], dtype=np.int64
        ),
        num_tops=tuple(
            rows[index].num_top_targets for index in scored for _ in rows[index].target_ids
        ),
        pooled=tuple(
            (index, int(layout.query_start[index]) + first, int(layout.query_start[index + 1]))
            for index, row in enumerate(rows)
            if (first := row.pooled_from) is not None
        ),
    )


def _fill_from_previous(inputs: StepInputs, previous_tokens: Int64Array) -> None:
    """Replace the placeholders of rows that continue a row of the previous plan."""
    if not inputs.sources:
        return
    tokens = previous_tokens[list(inputs.sources.values())]
    assert int(tokens.min()) >= 0, "from_previous names a row that sampled nothing"
    inputs.input_ids[list(inputs.sources)] = tokens


def _scored_tokens(rows: Sequence[Row], scored: Sequence[int], layout: Layout) -> Int64Array:
    """[M] places on the token axis of all targets, row after row."""
    parts = [np.zeros(0, dtype=np.int64)]
    for index in scored:
        row = rows[index]
        first = int(layout.query_start[index]) + row.target_start
        last = first + len(row.target_ids)
        is_inside = row.target_start >= 0 and last <= int(layout.query_start[index + 1])
        assert is_inside, f"row {index}: targets reach past the row's inputs"
        parts.append(np.arange(first, last))
    return np.concatenate(parts)
