"""Whose tokens a step's recurrent layers compute, as integers on the device: made once a step.

    rows     all of them, one after the other on the token axis; those after the last own no token
    few      those that are scanned token by token: of few tokens, or with drafts
    long     the others, which are cut into chunks
    chunks   of 64 tokens, a row's side by side, the last one shorter

All shapes follow from the number of tokens (of the padded step), so that a captured graph serves
any step of its size: programs of rows and chunks that are not in use return at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..ops import DeviceArrays, DevicePlan
from ..state_rows import StateRows

CHUNK_TOKENS = 64  # as in the papers' own kernels
# Below, a chunk's products are mostly empty, and its two launches take longer than so many tokens
# one by one (guess).
MIN_CHUNKED_TOKENS = 32

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RecurrencePlan:
    """A bound plan, all on the device. Rows' columns: first token, first draft, end, slot, whether
    it begins its sequence."""

    rows: Tensor  # [5, N] int32
    row_of_token: Tensor  # [P] int32; -1: padding
    few: Tensor  # [5, N] int32
    long: Tensor  # [5, L] int32: first token, end, slot, whether it begins, first chunk
    chunks: Tensor  # [M, 2] int32: first token, end
    drafts: Tensor | None  # [D] int64: their tokens, row after row; None: there are none
    draft_starts: Tensor | None  # [N] int32: each row's first one in `drafts`
    # For each op of the step, what moves its states on behind the drafts that were right: called
    # with rows like those above, of the tokens that it has kept.
    kept: list[Callable[[Tensor], None]] = field(default_factory=list)


def plan_recurrence(rows: StateRows, padded_tokens: int | None = None) -> DevicePlan:
    """Steps with drafts are not padded: what is kept of these has their number."""
    num_tokens = int(rows.query_start[-1])
    size = num_tokens if padded_tokens is None else padded_tokens
    num_rows = len(rows.slots) if padded_tokens is None else padded_tokens
    lengths = np.diff(rows.query_start)
    is_long = (lengths >= MIN_CHUNKED_TOKENS) & (rows.num_drafts == 0)
    ends = rows.query_start[1:]
    columns = np.stack(
        (rows.query_start[:-1], ends - rows.num_drafts, ends, rows.slots, rows.is_first)
    ).astype(np.int32)
    row_of_token = np.full(size, -1, dtype=np.int32)
    row_of_token[:num_tokens] = np.repeat(np.arange(len(lengths)), lengths)
    most_long = size // MIN_CHUNKED_TOKENS
    long, chunks = _chunked(columns[:, is_long], CHUNK_TOKENS)
    arrays: dict[str, npt.NDArray[Any]] = {
        "rows": _wide(columns, num_rows),
        "row_of_token": row_of_token,
        "few": _wide(columns[:, ~is_long], num_rows),
        "long": _wide(long, most_long),
        "chunks": np.ascontiguousarray(_wide(chunks, size // CHUNK_TOKENS + most_long).T),
    }
    if rows.num_drafts.any():
        assert padded_tokens is None, "drafts in a padded step"
        is_draft = np.arange(num_tokens) >= np.repeat(columns[1], lengths)
        arrays["drafts"] = np.flatnonzero(is_draft)
        arrays["draft_starts"] = (np.cumsum(rows.num_drafts) - rows.num_drafts).astype(np.int32)

    def bind(on_device: DeviceArrays, page_table: Tensor) -> RecurrencePlan:
        return RecurrencePlan(
            on_device["rows"],
            on_device["row_of_token"],
            on_device["few"],
            on_device["long"],
            on_device["chunks"],
            on_device.get("drafts"),
            on_device.get("draft_starts"),
        )

    return DevicePlan(arrays, bind)


def accept_drafts(plan: object, accepted: Tensor) -> None:
    assert isinstance(plan, RecurrencePlan) and plan.draft_starts is not None
    starts, slots = plan.draft_starts, plan.rows[3]
    ends = starts + accepted.to(torch.int32)
    rows = torch.stack((starts, ends, ends, slots, torch.zeros_like(slots)))
    for move_on in plan.kept:
        move_on(rows)


def _chunked(rows: Int32Array, chunk_tokens: int) -> tuple[Int32Array, Int32Array]:
    """Rows' columns -> those of `RecurrencePlan.long`, and its chunks."""
    firsts, _, ends, slots, is_first = rows
    counts = -(-(ends - firsts) // chunk_tokens)
    first_chunks = (np.cumsum(counts) - counts).astype(np.int32)
    within = np.arange(counts.sum()) - np.repeat(first_chunks, counts)
    starts = np.repeat(firsts, counts) + chunk_tokens * within
    lasts = np.minimum(starts + chunk_tokens, np.repeat(ends, counts))
    long = np.stack((firsts, ends, slots, is_first, first_chunks))
    return long.astype(np.int32), np.stack((starts, lasts)).astype(np.int32)


def _wide(columns: Int32Array, size: int) -> Int32Array:
    """[n, m] -> [n, size], with zeros behind: rows and chunks without tokens."""
    assert columns.shape[1] <= size
    whole = np.zeros((len(columns), size), dtype=np.int32)
    whole[:, : columns.shape[1]] = columns
    return whole
