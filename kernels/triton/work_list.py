"""A step's attention as integers: which queries see which keys, split into items of similar size.

    run     a tile of query tokens of consecutive rows by a range of one page-table row's KV, which
            all the tile's tokens see whole, or each up to its own position
    item    a part of a run's KV: a program's unit of work, for one KV head

Runs have two widths. A row with few queries (a decode) is one narrow run over all its KV; a longer
row is split into wide runs, each over the KV that its last token sees. A segment is a run for the
tokens of all its rows, narrow or wide by their number. With a window, KV before it is not part of a
run; the sinks are a short run of their own.

Runs are split into equal parts so that a single row fills the device: the number depends on that
row's (or segment's) lengths and on the shape, not on the rest of the step, and so does its result.
Items of a token are numbered from 0: segments, outermost first, then sinks, then its own. They
write that many partial results, from partial_start[token] on; a token with one item has none and
gets its result directly.

With `padded_tokens` the arrays have a fixed capacity. If a step would exceed it (more than four
levels of segments on average, or many very long rows), segments are left to their rows and parts
get longer: the work moves, results stay correct.

Cost: some 35 array operations and a loop over segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..attention_rows import AttentionRows, IntArray
from ..chunked_rows import has_chunks, split_at_chunks

# A run's columns; the kernel reads them by these indices.
TOKEN, NUM_TOKENS, TABLE_ROW, FIRST_KEY, END_KEY, POSITION, FIRST_PART, PART_KEYS, FIRST_ITEM = (
    range(9)
)
NUM_COLUMNS = 9
SEEN_WHOLE = -1  # as a position: every token sees every key of the run
DIRECT = -1  # as a first part: the run's tokens have no other item

# Programs that fill an H200 (132 multiprocessors): three narrow tiles or one wide tile on each.
_NARROW_PROGRAMS = 384
_WIDE_PROGRAMS = 132
_WIDE_ROUNDS = 4
# A part's keys are a multiple of this, so that only the last has a partly filled block of keys
# (except in wide tiles of 64 numbers a head, whose blocks are 128).
_PART_MULTIPLE = 64
# A wide part is at least this long: writing its partial results takes a tenth of its time
# (2 * 128 rows * 512 bytes against 512 keys * 512 bytes, from the second-level cache; a guess).
_MIN_WIDE_PART = 512
# Levels of segments that padded arrays have room for: so many over this many tokens (decode rows of
# a tree), one over the rest (prompts).
_MAX_LEVELS = 4
_LEVELLED_TOKENS = 1024

_ONE = np.ones(1, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The inputs of the split besides the rows."""

    num_heads: int
    num_kv_heads: int
    num_slots: int  # of the KV pool
    narrow_rows: int  # rows (tokens by query heads of a KV head) of a narrow tile
    wide_rows: int
    window: int | None = None
    num_sink_tokens: int = 0
    chunk: int | None = None

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def narrow_tokens(self) -> int:
        """Tokens of a narrow tile."""
        return max(1, self.narrow_rows // self.group)

    @property
    def wide_tokens(self) -> int:
        return max(1, self.wide_rows // self.group)

    @property
    def has_sinks(self) -> bool:
        return self.window is not None and self.num_sink_tokens > 0

    @property
    def min_narrow_part(self) -> int:
        """Keys of a narrow part: enough that writing and reading its partial result (8 bytes a
        number and query head) is about 1/8 of reading its KV at worst, and few if few KV heads
        leave the device empty."""
        fewest = min(max(64 * self.num_kv_heads, 128), 512)
        return -(-max(fewest, 16 * self.group) // _PART_MULTIPLE) * _PART_MULTIPLE

    @property
    def max_narrow_parts(self) -> int:
        """The most narrow parts of a row's KV."""
        return max(1, _NARROW_PROGRAMS // self.num_kv_heads)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes that suffice for every step of at most `padded_tokens` tokens."""

    tokens: int
    segments: int
    segment_tokens: int  # summed over segments
    narrow_runs: int
    narrow_items: int
    wide_runs: int
    wide_items: int
    partials: int

    @classmethod
    def of(cls, padded_tokens: int, max_rows: int, shape: AttentionShape) -> Capacity:
        """max_rows: rows of the page table."""
        rows = min(padded_tokens, max_rows)
        if shape.chunk is not None:  # a row of n tokens is cut n / chunk + 1 times at most
            rows = min(padded_tokens, 2 * rows + padded_tokens // shape.chunk)
        passes = 2 if shape.has_sinks else 1
        narrow_runs = rows * (passes + 1)
        narrow_splits = min(
            rows * shape.max_narrow_parts, shape.num_slots // shape.min_narrow_part + rows
        )
        long_rows = min(rows, padded_tokens // (shape.narrow_tokens + 1))
        segment_tokens = padded_tokens
        segment_tokens += (_MAX_LEVELS - 1) * min(padded_tokens, _LEVELLED_TOKENS)
        wide_runs = wide_splits = 0
        if padded_tokens > shape.narrow_tokens:  # else nothing is wide, and that launch is omitted
            wide_runs = passes * (padded_tokens // shape.wide_tokens + long_rows)
            wide_runs += segment_tokens // shape.wide_tokens + rows
            wide_splits = _WIDE_ROUNDS * _WIDE_PROGRAMS // shape.num_kv_heads
        return cls(
            tokens=padded_tokens,
            segments=rows,
            segment_tokens=segment_tokens,
            narrow_runs=narrow_runs,
            narrow_items=narrow_runs + narrow_splits,
            wide_runs=wide_runs,
            wide_items=wide_runs + wide_splits,
            partials=segment_tokens
            + passes * padded_tokens
            + narrow_splits
            + wide_splits * min(padded_tokens, shape.wide_tokens),
        )


@dataclass(frozen=True, slots=True)
class WorkList:
    """A step's items. R runs, I items of a width, T tokens; all int32.

    An item i is part `i - FIRST_ITEM of its run`; a run's items follow each other.
    """

    narrow_runs: IntArray  # [NUM_COLUMNS, R]
    narrow_items: IntArray  # [I] run of each
    wide_runs: IntArray  # [NUM_COLUMNS, R]
    wide_items: IntArray  # [I]
    num_items: IntArray  # [2] narrow and wide
    partial_start: IntArray  # [T + 1] ascending from 0
    num_tokens: IntArray  # [1] of the step: those behind are padding
    max_partials: int  # of every step with these sizes; at least partial_start[T]

    def arrays(self) -> dict[str, npt.NDArray[np.int32]]:
        """The arrays to copy to the device, by name."""
        return {
            "narrow_runs": self.narrow_runs,
            "narrow_items": self.narrow_items,
            "wide_runs": self.wide_runs,
            "wide_items": self.wide_items,
            "num_items": self.num_items,
            "partial_start": self.partial_start,
            "num_tokens": self.num_tokens,
        }

    def light_arrays(self) -> dict[str, npt.NDArray[np.int32]] | None:
        """The same without room for wide items, where there are none; None: there are."""
        if self.num_items[1]:
            return None
        arrays = self.arrays()
        return {**arrays, **{name: arrays[name][..., :0] for name in ("wide_runs", "wide_items")}}


def plan_work(
    rows: AttentionRows, shape: AttentionShape, padded_tokens: int | None = None
) -> WorkList:
    """The work list of a step; its array shapes depend only on `padded_tokens`, if given, on the
    page table's rows and on `shape`."""
    num_tokens = int(rows.query_start[-1])
    capacity = None
    if padded_tokens is not None:
        assert padded_tokens >= num_tokens, f"{num_tokens} tokens in {padded_tokens}"
        capacity = Capacity.of(padded_tokens, len(rows.page_table), shape)
    if shape.chunk is not None and has_chunks(rows, shape.chunk):
        rows, first_key = split_at_chunks(rows, shape.chunk)
        runs = _Runs(rows, shape)
        runs.add_rows(first_key)
        return runs.finish(capacity)
    runs = _Runs(rows, shape)
    own_start = runs.add_segments(capacity)
    runs.add_rows(own_start)
    return runs.finish(capacity)


class _Runs:
    """Collects runs; those of a token are in the order of their partial results."""

    def __init__(self, rows: AttentionRows, shape: AttentionShape) -> None:
        self.rows = rows
        self.shape = shape
        self.groups: list[_Group] = []

    def add_segments(self, capacity: Capacity | None) -> IntArray:
        """Returns where each row's own KV begins, [num_rows].

        A segment that the window cuts for some row, or that does not fit, is left out; the segments
        inside it then begin where it did.
        """
        rows, window = self.rows, self.shape.window
        own_start = np.zeros(rows.num_rows, dtype=np.int32)
        if not len(rows.segments):
            return own_start
        query_start = rows.query_start.tolist()
        num_left, tokens_left = len(rows.segments), len(rows.segments) * query_start[-1]
        if capacity is not None:
            num_left, tokens_left = capacity.segments, capacity.segment_tokens
        level = np.zeros(rows.num_rows, dtype=np.int32)
        levels: list[list[tuple[int, ...]]] = []  # columns to END_KEY; none of a level share rows
        for _, token_end, row, row_end in rows.segments.tolist():
            num_tokens = query_start[row_end] - query_start[row]
            is_cut = window is not None and int(rows.seq_lens[row:row_end].max()) > window
            if is_cut or num_left == 0 or tokens_left < num_tokens:
                continue
            num_left, tokens_left = num_left - 1, tokens_left - num_tokens
            depth, first_key = int(level[row]), int(own_start[row])
            if depth == len(levels):
                levels.append([])
            place = query_start[row], num_tokens, int(rows.table_rows[row])
            levels[depth].append((*place, first_key, token_end))
            level[row:row_end] += 1
            own_start[row:row_end] = token_end
        for segments in levels:
            self._add_level(np.array(segments, dtype=np.int32).T)
        return own_start

    def add_rows(self, own_start: IntArray) -> None:
        """Add the rows' KV outside of segments."""
        is_narrow = self.rows.num_queries <= self.shape.narrow_tokens
        for narrow in (True, False):
            chosen = np.flatnonzero(is_narrow == narrow).astype(np.int32)
            if len(chosen):
                self._add_rows(chosen, own_start[chosen], narrow)

    def _add_level(self, segments: IntArray) -> None:
        """segments [5, S], the columns from TOKEN to END_KEY."""
        is_narrow = segments[NUM_TOKENS] <= self.shape.narrow_tokens
        for narrow in (True, False):
            chosen = segments[:, is_narrow == narrow]
            if chosen.shape[1] == 0:
                continue
            runs = np.empty((NUM_COLUMNS, chosen.shape[1]), dtype=np.int32)
            runs[: len(chosen)] = chosen
            num_tiles = _ONE
            if not narrow:
                runs, num_tiles = _tiles(runs, self.shape.wide_tokens)
            runs[POSITION] = SEEN_WHOLE
            self._add(runs, narrow, self._max_parts(narrow, num_tiles))

    def _add_rows(self, chosen: IntArray, own_start: IntArray, is_narrow: bool) -> None:
        rows, shape = self.rows, self.shape
        runs = np.empty((NUM_COLUMNS, len(chosen)), dtype=np.int32)
        runs[TOKEN] = rows.query_start[chosen]
        runs[NUM_TOKENS] = rows.query_start[chosen + 1] - runs[TOKEN]
        runs[TABLE_ROW] = rows.table_rows[chosen]
        runs[FIRST_KEY] = own_start
        runs[END_KEY] = rows.seq_lens[chosen]
        runs[POSITION] = runs[END_KEY] - runs[NUM_TOKENS]
        num_tiles = _ONE
        if not is_narrow:
            runs, num_tiles = _tiles(runs, shape.wide_tokens)
            runs[END_KEY] = runs[POSITION] + runs[NUM_TOKENS]
        if shape.window is not None:
            nearest = runs[POSITION] - np.int32(shape.window - 1)
            self._add_sinks(runs, np.minimum(nearest, shape.num_sink_tokens), is_narrow)
            np.maximum(runs[FIRST_KEY], nearest, out=runs[FIRST_KEY])
        self._add(runs, is_narrow, self._max_parts(is_narrow, num_tiles))

    def _add_sinks(self, runs: IntArray, num_before: IntArray, is_narrow: bool) -> None:
        """Runs over the sinks before all of a tile's windows, `num_before` of them."""
        has_sinks = num_before > 0
        if has_sinks.any():
            sinks = runs[:, has_sinks]
            sinks[FIRST_KEY], sinks[END_KEY] = 0, num_before[has_sinks]
            sinks[POSITION] = SEEN_WHOLE
            self._add(sinks, is_narrow, 1)  # they are few

    def _max_parts(self, is_narrow: bool, num_tiles: IntArray) -> IntArray | int:
        """Parts that fill the device; num_tiles: of the same row or segment.

        If one row has more wide tiles than fit at once, they are split until their last round,
        which may be nearly empty, is one of four.
        """
        if is_narrow:
            return self.shape.max_narrow_parts
        num_units = num_tiles * np.int32(self.shape.num_kv_heads)
        rounds = np.where(num_units <= _WIDE_PROGRAMS, 1, _WIDE_ROUNDS)
        return np.maximum(rounds * np.int32(_WIDE_PROGRAMS) // num_units, 1)

    def _add(self, runs: IntArray, is_narrow: bool, max_parts: IntArray | int) -> None:
        least = self.shape.min_narrow_part if is_narrow else _MIN_WIDE_PART
        num_keys = runs[END_KEY] - runs[FIRST_KEY]
        num_parts = np.minimum(np.maximum(num_keys // least, 1), max_parts)
        runs[PART_KEYS] = (-(-num_keys // num_parts) + (_PART_MULTIPLE - 1)) & -_PART_MULTIPLE
        self.groups.append(_Group(runs, is_narrow, _num_parts(runs)))

    def finish(self, capacity: Capacity | None) -> WorkList:
        if capacity is not None:
            self._fit(capacity)
        num_tokens = int(self.rows.query_start[-1])
        parts_of_token = np.zeros(num_tokens, dtype=np.int32)
        for group in self.groups:
            group.number_parts(parts_of_token)
        parts_of_token[parts_of_token == 1] = 0
        for group in self.groups:
            group.runs[FIRST_PART][parts_of_token[group.runs[TOKEN]] == 0] = DIRECT
        size = num_tokens if capacity is None else capacity.tokens
        partial_start = np.zeros(size + 1, dtype=np.int32)
        np.cumsum(parts_of_token, out=partial_start[1 : num_tokens + 1])
        num_partials = int(partial_start[num_tokens])
        partial_start[num_tokens + 1 :] = num_partials
        narrow_runs, narrow_items = self._items(True)
        wide_runs, wide_items = self._items(False)
        num_items = np.array([len(narrow_items), len(wide_items)], dtype=np.int32)
        if capacity is not None:
            narrow_runs = _padded(narrow_runs, capacity.narrow_runs)
            narrow_items = _padded(narrow_items, capacity.narrow_items)
            wide_runs = _padded(wide_runs, capacity.wide_runs)
            wide_items = _padded(wide_items, capacity.wide_items)
            assert num_partials <= capacity.partials
            num_partials = capacity.partials
        return WorkList(
            narrow_runs,
            narrow_items,
            wide_runs,
            wide_items,
            num_items,
            partial_start,
            np.array([num_tokens], dtype=np.int32),
            num_partials,
        )

    def _fit(self, capacity: Capacity) -> None:
        """Double the parts' length until all arrays hold them."""
        while True:
            totals = {True: 0, False: 0}
            num_partials = 0
            for group in self.groups:
                totals[group.is_narrow] += int(group.num_parts.sum())
                num_partials += int(group.num_parts @ group.runs[NUM_TOKENS])
            too_narrow = totals[True] > capacity.narrow_items
            too_wide = totals[False] > capacity.wide_items
            too_many = num_partials > capacity.partials
            if not (too_narrow or too_wide or too_many):
                return
            assert any(group.num_parts.max() > 1 for group in self.groups), "too little capacity"
            for group in self.groups:
                if too_many or (too_narrow if group.is_narrow else too_wide):
                    group.runs[PART_KEYS] *= 2
                    group.num_parts = _num_parts(group.runs)

    def _items(self, is_narrow: bool) -> tuple[IntArray, IntArray]:
        """Runs of one width, long parts first, and the run of each item."""
        groups = [group for group in self.groups if group.is_narrow == is_narrow]
        if not groups:
            return np.zeros((NUM_COLUMNS, 0), dtype=np.int32), np.zeros(0, dtype=np.int32)
        runs, num_parts = groups[0].runs, groups[0].num_parts
        if len(groups) > 1:
            runs = np.concatenate([group.runs for group in groups], axis=1)
            num_parts = np.concatenate([group.num_parts for group in groups])
        order = np.argsort(-runs[PART_KEYS], kind="stable")
        runs, num_parts = runs.take(order, axis=1), num_parts[order]
        runs[FIRST_ITEM] = np.cumsum(num_parts) - num_parts
        return runs, np.repeat(np.arange(len(num_parts), dtype=np.int32), num_parts)


@dataclass(slots=True)
class _Group:
    """Runs of one width, none of which share a token."""

    runs: IntArray
    is_narrow: bool
    num_parts: IntArray  # of each run

    def number_parts(self, parts_of_token: IntArray) -> None:
        """Count this group's parts after those that its tokens have already."""
        tokens, num_tokens = self.runs[TOKEN], self.runs[NUM_TOKENS]
        self.runs[FIRST_PART] = parts_of_token[tokens]
        if int(num_tokens.max()) == 1:
            parts_of_token[tokens] += self.num_parts
            return
        first = np.cumsum(num_tokens) - num_tokens
        places = np.arange(int(num_tokens.sum())) + np.repeat(tokens - first, num_tokens)
        parts_of_token[places] += np.repeat(self.num_parts, num_tokens)


def _num_parts(runs: IntArray) -> IntArray:
    num_parts: IntArray = -((runs[FIRST_KEY] - runs[END_KEY]) // runs[PART_KEYS])
    return num_parts


def _tiles(runs: IntArray, tile_tokens: int) -> tuple[IntArray, IntArray]:
    """Runs split into tiles of tokens, and the number of tiles of each one's run."""
    num_tokens = runs[NUM_TOKENS]
    num_tiles = -(-num_tokens // np.int32(tile_tokens))
    run = np.repeat(np.arange(len(num_tiles), dtype=np.int32), num_tiles)
    first = np.cumsum(num_tiles, dtype=np.int32) - num_tiles
    start = (np.arange(len(run), dtype=np.int32) - first[run]) * np.int32(tile_tokens)
    tiles = runs[:, run]
    tiles[TOKEN] += start
    tiles[NUM_TOKENS] = np.minimum(num_tokens[run] - start, tile_tokens)
    tiles[POSITION] += start
    return tiles, num_tiles[run]


def _padded(array: IntArray, size: int) -> IntArray:
    """Pads the last axis to `size`; the padding is not read."""
    assert array.shape[-1] <= size, f"{array.shape[-1]} entries in {size}"
    padded = np.empty((*array.shape[:-1], size), dtype=np.int32)
    padded[..., : array.shape[-1]] = array
    return padded
