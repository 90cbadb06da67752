"""From sampling parameters and adjustments to the arrays of `kernels.sampling_rows`.

A row's adjusted tokens, from its prompt, output, bias and mask, become distinct entries without a
sort: each token writes its index to the token's place in a table, and the index found there
afterwards is the entry. Cost: a scatter, a gather and a few passes over the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..schedule.plan import Adjustment
from ..schedule.sampling_params import MIN_TEMPERATURE, SamplingParams


def sampling_arrays(
    params: Sequence[SamplingParams], positions: npt.NDArray[np.int64]
) -> dict[str, npt.NDArray[Any]]:
    """The fields of SamplingRows by name, for N rows; positions [N]: each row's new token's."""
    num_rows = len(params)
    temperature = np.fromiter([row.temperature for row in params], np.float64, num_rows)
    temperature[temperature < MIN_TEMPERATURE] = 0.0
    return {
        "temperature": temperature,
        "top_k": np.fromiter([row.top_k or 0 for row in params], np.int64, num_rows),
        "top_p": np.fromiter([row.top_p for row in params], np.float64, num_rows),
        "min_p": np.fromiter([row.min_p for row in params], np.float64, num_rows),
        "seed": np.fromiter([row.seed for row in params], np.int64, num_rows),
        "position": positions,
    }


Int64Array = npt.NDArray[np.int64]

# Where a token comes from; a row's tokens are in this order.
_NUM_SOURCES = 4
_PROMPT, _OUTPUT, _BIAS, _MASKED = range(_NUM_SOURCES)
# Size of the table, so that it stays in or near a core's second-level cache (a guess).
_TABLE_SIZE = 1 << 19


@dataclass(frozen=True, slots=True)
class RowAdjustment:
    """A row of logits to change, and the changes."""

    place: int  # the row's index in the logits
    params: SamplingParams
    adjustment: Adjustment
    latest: int = -1  # previous step's row whose token ends the output; -1: the output is known


def adjusted_arrays(rows: Sequence[RowAdjustment], vocab_size: int) -> dict[str, npt.NDArray[Any]]:
    """The fields of AdjustedRows by name, for R rows, one or more.

    Banned ids beyond the vocabulary are left out, as they cannot be sampled anyway.
    """
    parts = [part for row in rows for part in _tokens_of(row, vocab_size)]
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    token_ids = np.concatenate(parts)
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths.reshape(-1, _NUM_SOURCES).sum(axis=1), out=starts[1:])
    is_entry, entry_of = _distinct(token_ids, starts, vocab_size)
    num_entries = int(np.count_nonzero(is_entry))
    source = np.repeat(np.tile(np.arange(_NUM_SOURCES, dtype=np.int8), len(rows)), lengths)

    is_in_prompt = np.zeros(num_entries, dtype=bool)
    is_in_prompt[entry_of[source == _PROMPT]] = True
    bias = np.zeros(num_entries)
    values = [np.frombuffer(row.adjustment.bias_values) for row in rows]
    bias[entry_of[source == _BIAS]] = np.concatenate(values)
    bias[entry_of[source == _MASKED]] = -np.inf
    num_before = np.append(0, np.cumsum(is_entry, dtype=np.int64))
    return {
        "place": np.array([row.place for row in rows], dtype=np.int64),
        "repetition": np.array([row.params.repetition_penalty for row in rows], dtype=np.float64),
        "frequency": np.array([row.params.frequency_penalty for row in rows], dtype=np.float64),
        "presence": np.array([row.params.presence_penalty for row in rows], dtype=np.float64),
        "latest": np.array([row.latest for row in rows], dtype=np.int64),
        "entry_start": num_before[starts],
        "token_id": token_ids[is_entry].astype(np.int64),
        "count": np.bincount(entry_of[source == _OUTPUT], minlength=num_entries),
        "is_in_prompt": is_in_prompt,
        "bias": bias,
    }


def _tokens_of(row: RowAdjustment, vocab_size: int) -> tuple[npt.NDArray[np.intc], ...]:
    """The row's token ids from each source."""
    change, params = row.adjustment, row.params
    is_counted = params.has_output_penalty or params.has_repetition_penalty
    return (
        np.frombuffer(change.prompt_ids, dtype=np.intc),
        np.frombuffer(change.output_ids if is_counted else b"", dtype=np.intc),
        np.frombuffer(change.bias_ids, dtype=np.intc),
        np.array([i for i in change.masked_ids if i < vocab_size], dtype=np.intc),
    )


def _distinct(
    token_ids: npt.NDArray[np.intc], starts: Int64Array, vocab_size: int
) -> tuple[npt.NDArray[np.bool_], Int64Array]:
    """Which of the tokens [K] are the entries of their rows, and for each token the index of its
    entry, counted over all rows; row r has the tokens from starts[r] to starts[r + 1]."""
    num_rows, order = len(starts) - 1, np.arange(len(token_ids), dtype=np.int32)
    rows_at_once = min(max(1, _TABLE_SIZE // vocab_size), num_rows)
    table = np.empty(rows_at_once * vocab_size, dtype=np.int32)
    offsets = np.repeat(np.arange(num_rows) % rows_at_once * vocab_size, np.diff(starts))
    places = offsets + token_ids
    owner = np.empty_like(order)
    for first in range(0, num_rows, rows_at_once):
        own = slice(starts[first], starts[min(first + rows_at_once, num_rows)])
        table[places[own]] = order[own]
        owner[own] = table[places[own]]
    is_entry = owner == order
    return is_entry, (np.cumsum(is_entry, dtype=np.int64) - 1)[owner]
