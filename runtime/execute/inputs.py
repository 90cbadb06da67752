"""Converts a `StepPlan` of plain integers to the inputs of one forward pass.

    row 0          row 1      row 2
    |..............|.|........|....|      the flat token axis, T tokens
    0              query_start[1], ...    row r owns [query_start[r], query_start[r + 1])

No loop here runs over tokens: rows are visited in Python, tokens by numpy.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ...kernels.attention_rows import AttentionRows
from ...kernels.model_options import AttentionOptions, LatentOptions
from ...kernels.ops import KVLayer
from ...kernels.registry import Kernels
from ...kernels.sparse_latent import plan_latent_attention
from ...kernels.state_rows import StateRows
from ..checkpoint.config.model_config import ModelConfig
from ..schedule.plan import Row, StepPlan

Int64Array = npt.NDArray[np.int64]

# In `StepInputs.sources`: the token is known.
NO_SOURCE = -1


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The places of the R rows on the token axis."""

    table_rows: Int64Array  # [R]
    starts: Int64Array  # [R] position of the first input
    lengths: Int64Array  # [R] number of inputs, >= 1
    query_start: Int64Array  # [R + 1]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> StepLayout:
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


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a forward pass, on the host. T tokens, R rows."""

    layout: StepLayout
    token_ids: Int64Array  # [T], 0 where the token is not known yet
    # [T] row of the previous plan that sampled the token, or NO_SOURCE; None: all are known
    sources: Int64Array | None
    positions: Int64Array  # [T], or [3, T]; see `ForwardBatch`
    slots: Int64Array  # [T]
    attention_rows: AttentionRows
    adapters: npt.NDArray[np.int32] | None  # [T] slots, 0: no adapter; None: no token has one
    state_rows: StateRows

    @property
    def num_tokens(self) -> int:
        return self.layout.num_tokens

    def check_sources(self, is_sampled: npt.NDArray[np.bool_]) -> None:
        """is_sampled [rows of the previous plan]: which of them sampled a token."""
        if self.sources is not None:
            taken = self.sources[self.sources != NO_SOURCE]
            assert is_sampled[taken].all(), "from_previous names a row that sampled nothing"


@dataclass(frozen=True, slots=True)
class WantedLogits:
    """Which of the step's T hidden states are turned into logits, or summed. N are sampled, M
    scored."""

    sampled_rows: tuple[int, ...]  # [N] rows of the plan that sample, once for each draw
    sampled_tokens: Int64Array | None  # [N] on the token axis; None: every token, in order
    sampled_positions: Int64Array  # [N] place that the new token will have in its text
    scored_rows: tuple[int, ...]  # rows of the plan with targets
    scored_tokens: Int64Array | None  # [M] on the token axis, row after row; None: M = 0
    target_ids: Int64Array  # [M]
    pooled: tuple[tuple[int, int, int], ...]  # (row of the plan, first, end on the token axis)


class PageTable:
    """Page ids by table row: `entries` [max_running_requests, max_pages] int32, and `num_spare`
    rows, from `first_spare_row` on, and columns more.

    A row's entries beyond the written ones are stale and must not be read.
    """

    def __init__(self, max_running_requests: int, max_pages: int, num_spare: int = 0) -> None:
        shape = (max_running_requests + num_spare, max_pages + num_spare)
        self.entries = np.zeros(shape, dtype=np.int32)
        self.first_spare_row = max_running_requests
        self.num_spare = num_spare

    def apply(self, rows: Sequence[Row]) -> None:
        """Write the rows' updates; most are one page (decode), written in one assignment."""
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

    def exchange(self, table_row: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Exchange entries of a row in pairs."""
        entries = self.entries[table_row]
        for entry, other in pairs:
            entries[[entry, other]] = entries[[other, entry]]


class InputBuilder:
    """Converts plans, one after the other; owns the host's page table.

    `spare_slot`: of the KV pool, for KV that is there already; needed where rows have such.
    """

    def __init__(
        self,
        *,
        page_size: int,
        max_running_requests: int,
        max_model_len: int,
        num_spare: int = 0,
    ) -> None:
        """num_spare: see `PageTable`."""
        max_pages = -(-max_model_len // page_size)
        self.page_table = PageTable(max_running_requests, max_pages, num_spare)
        self.page_size = page_size
        self.spare_slot: int | None = None

    def build(self, plan: StepPlan) -> StepInputs:
        """Apply the plan's page updates and lay out its tokens."""
        rows = plan.rows
        self.page_table.apply(rows)
        layout = StepLayout.of(rows)
        positions = layout.positions()
        token_ids = np.fromiter(
            chain.from_iterable([row.input_ids for row in rows]), np.int64, layout.num_tokens
        )
        attention_rows = AttentionRows(
            query_start=layout.query_start.astype(np.int32),
            seq_lens=(layout.starts + layout.lengths).astype(np.int32),
            page_table=self.page_table.entries,
            table_rows=layout.table_rows.astype(np.int32),
            page_size=self.page_size,
            segments=_segments(plan),
        )
        if any(row.images for row in rows):
            np.maximum(token_ids, 0, out=token_ids)  # an image's are no ids of the vocabulary
        return StepInputs(
            layout=layout,
            token_ids=token_ids,
            sources=_sources(rows, layout),
            positions=_turned(rows, layout, positions),
            slots=self._slots(rows, layout, positions),
            attention_rows=attention_rows,
            adapters=_adapters(rows, layout),
            state_rows=_state_rows(rows, layout),
        )

    def build_decode(
        self,
        table_rows: Int64Array,
        positions: Int64Array,
        token_ids: Int64Array,
        rope_shifts: Int64Array,
    ) -> StepInputs:
        """One token [R] of each of these rows of the page table [R], at these positions [R], of a
        model without recurrent states; rope_shifts [R]: see `Row`."""
        num_rows = len(table_rows)
        none = np.zeros(num_rows, np.int64)
        layout = StepLayout(
            table_rows, positions, np.ones(num_rows, np.int64), np.arange(num_rows + 1)
        )
        pages, offsets = np.divmod(positions, self.page_size)
        entries = self.page_table.entries[table_rows, pages].astype(np.int64)
        attention_rows = AttentionRows(
            query_start=layout.query_start.astype(np.int32),
            seq_lens=(positions + 1).astype(np.int32),
            page_table=self.page_table.entries,
            table_rows=table_rows.astype(np.int32),
            page_size=self.page_size,
            segments=np.empty((0, 4), np.int32),
        )
        return StepInputs(
            layout=layout,
            token_ids=token_ids,
            sources=None,
            positions=positions + rope_shifts,
            slots=entries * self.page_size + offsets,
            attention_rows=attention_rows,
            adapters=None,
            state_rows=StateRows(layout.query_start, none, positions == 0, none),
        )

    def _slots(self, rows: Sequence[Row], layout: StepLayout, positions: Int64Array) -> Int64Array:
        table_rows = layout.table_rows[layout.row_of_token()]
        pages, offsets = np.divmod(positions, self.page_size)
        entries = self.page_table.entries[table_rows, pages].astype(np.int64)
        slots: Int64Array = entries * self.page_size + offsets
        if any(row.kv_start > row.start for row in rows):
            assert self.spare_slot is not None, "there is no place for KV that is there already"
            kv_starts = np.array([row.kv_start for row in rows], dtype=np.int64)
            slots[positions < kv_starts[layout.row_of_token()]] = self.spare_slot
        return slots


def _turned(rows: Sequence[Row], layout: StepLayout, positions: Int64Array) -> Int64Array:
    """The positions by which queries and keys are turned: [T], with images in the step [3, T]."""
    shifts = np.array([row.rope_shift for row in rows], dtype=np.int64)
    has_images = any(row.images for row in rows)
    if not has_images and not shifts.any():
        return positions
    turned: Int64Array = positions + np.repeat(shifts, layout.lengths)
    if not has_images:
        return turned
    turned = np.tile(turned, (3, 1))
    for row, start, end in zip(rows, layout.query_start, layout.query_start[1:], strict=False):
        for part in row.images:
            first = int(start) + part.start
            behind = first + part.length
            at = np.arange(part.first, part.first + part.length)
            turned[0, first:behind] = part.base
            turned[1, first:behind] = part.base + at // part.columns
            turned[2, first:behind] = part.base + at % part.columns
            turned[:, behind:end] = positions[behind:end] + part.rope_shift
    return turned


def _segments(plan: StepPlan) -> npt.NDArray[np.int32]:
    """[S, 4], the columns of AttentionRows.segments."""
    columns = [(s.token_start, s.token_end, s.row_start, s.row_end) for s in plan.segments]
    return np.array(columns, dtype=np.int32).reshape(-1, 4)


def _adapters(rows: Sequence[Row], layout: StepLayout) -> npt.NDArray[np.int32] | None:
    slots = [row.adapter for row in rows]
    if not any(slots):
        return None
    return np.repeat(np.array(slots, dtype=np.int32), layout.lengths)


def _state_rows(rows: Sequence[Row], layout: StepLayout) -> StateRows:
    slots = np.array([row.state_slot for row in rows], dtype=np.int64)
    num_drafts = np.array([row.num_drafts for row in rows], dtype=np.int64)
    return StateRows(layout.query_start, slots, layout.starts == 0, num_drafts)


def accepted_drafts(plan: StepPlan, before: StateRows) -> Int64Array:
    """[R] of the rows of the step before: how many of their drafts were right."""
    numbers = dict(plan.state_accepts)
    assert numbers.keys() <= set(before.slots.tolist()), "the step before had no such drafts"
    return np.array([numbers.get(slot, 0) for slot in before.slots.tolist()], dtype=np.int64)


def page_updates(rows: Sequence[Row]) -> npt.NDArray[np.int32]:
    """[U, 3], the columns of `ops.UpdatePages`."""
    updates = [(row.table_row, row.page_update) for row in rows if row.page_update is not None]
    lengths = [len(update.pages) for _, update in updates]
    columns = np.empty((sum(lengths), 3), dtype=np.int32)
    columns[:, 0] = np.repeat(np.array([row for row, _ in updates], dtype=np.int32), lengths)
    ends = np.cumsum(np.array(lengths, dtype=np.int32), dtype=np.int32)
    shift = np.array([update.first for _, update in updates], dtype=np.int32) + lengths - ends
    columns[:, 1] = np.arange(len(columns), dtype=np.int32) + np.repeat(shift, lengths)
    pages = array("i")
    for _, update in updates:
        pages.extend(update.pages)
    columns[:, 2] = pages
    return columns


def wanted_logits(plan: StepPlan, layout: StepLayout) -> WantedLogits:
    """Which hidden states the plan's rows need logits of."""
    rows = plan.rows
    sampled = [index for index, row in enumerate(rows) if row.sampling is not None]
    scored = tuple(index for index, row in enumerate(rows) if row.target_ids)
    is_every_token = layout.is_one_each and len(sampled) == len(rows)
    at = layout.lengths[sampled] - 1  # inputs to sample after, counted within their rows
    if any(rows[index].sampled_at for index in sampled):
        draws = [rows[index].sampled_at or (len(rows[index].input_ids) - 1,) for index in sampled]
        sampled = np.repeat(sampled, [len(places) for places in draws]).tolist()
        at = np.fromiter(chain.from_iterable(draws), np.int64, len(sampled))
    num_dropped = np.array([rows[index].num_dropped for index in sampled], dtype=np.int64)
    return WantedLogits(
        sampled_rows=tuple(sampled),
        sampled_tokens=None if is_every_token else layout.query_start[sampled] + at,
        sampled_positions=layout.starts[sampled] + at + 1 + num_dropped,
        scored_rows=scored,
        scored_tokens=_scored_tokens(rows, scored, layout) if scored else None,
        target_ids=np.array(
            [token_id for index in scored for token_id in rows[index].target_ids], dtype=np.int64
        ),
        pooled=tuple(
            (index, int(layout.query_start[index]) + first, int(layout.query_start[index + 1]))
            for index, row in enumerate(rows)
            if (first := row.pooled_from) is not None
        ),
    )


def _sources(rows: Sequence[Row], layout: StepLayout) -> Int64Array | None:
    """[T], see StepInputs; a row that continues another has one input."""
    pairs = [(i, row.from_previous) for i, row in enumerate(rows) if row.from_previous is not None]
    if not pairs:
        return None
    sources: Int64Array = np.full(layout.num_tokens, NO_SOURCE, dtype=np.int64)
    taking, taken = zip(*pairs, strict=True)
    sources[layout.query_start[list(taking)]] = taken
    return sources


def _scored_tokens(rows: Sequence[Row], scored: Sequence[int], layout: StepLayout) -> Int64Array:
    """[M] places of all targets on the token axis, row after row."""
    parts = []
    for index in scored:
        row = rows[index]
        first = int(layout.query_start[index]) + row.target_start
        last = first + len(row.target_ids)
        is_inside = row.target_start >= 0 and last <= int(layout.query_start[index + 1])
        assert is_inside, f"row {index}: targets reach past the row's inputs"
        parts.append(np.arange(first, last))
    return np.concatenate(parts)


def plan_attentions(
    kernels: Kernels,
    rows: AttentionRows,
    kv_layers: Sequence[KVLayer],
    config: ModelConfig,
    padded_tokens: int | None = None,
) -> tuple[object, ...]:
    """In the order of `config.attention_kinds`; see `ops.PlanAttention`."""
    kinds = [config.layer_kinds[layer] for layer in config.attention_layers]
    return tuple(
        _plan(kernels, rows, kv_layers[kinds.index(kind)], config, options, padded_tokens)
        for kind, options in enumerate(config.attention_kinds)
    )


def _plan(
    kernels: Kernels,
    rows: AttentionRows,
    kv_layer: KVLayer,
    config: ModelConfig,
    options: AttentionOptions | LatentOptions,
    padded_tokens: int | None,
) -> object:
    if isinstance(options, LatentOptions):
        assert isinstance(kv_layer, Tensor), "latents are not quantized"
        return plan_latent_attention(
            kernels, rows, kv_layer, config.num_heads, options, padded_tokens
        )
    return kernels.plan_attention(rows, kv_layer, config.num_heads, options, padded_tokens)
