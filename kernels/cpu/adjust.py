"""Adjusts logits before sampling with numpy: one gather, one scatter over all rows' entries.

Order and sources: `reference.adjust`. Nothing here runs over the vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..sampling_rows import AdjustedRows

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def adjust_logits(logits: Tensor, rows: AdjustedRows, previous_tokens: Tensor) -> None:
    row, token_id, count, is_in_prompt, bias = _entries(rows, previous_tokens)
    flat: npt.NDArray[Any] = logits.view(-1).numpy()
    at = rows.place.numpy()[row] * logits.shape[1] + token_id
    found = flat[at]
    was_sampled = count > 0
    repetition = rows.repetition.numpy()
    if (repetition != 1.0).any():
        penalty = repetition.astype(found.dtype)[row]
        penalised = np.where(found > 0, found / penalty, found * penalty)
        found = np.where(was_sampled | is_in_prompt, penalised, found)
    frequency, presence = rows.frequency.numpy(), rows.presence.numpy()
    if frequency.any() or presence.any():
        amount = frequency[row] * count + presence[row] * was_sampled
        found = found - amount.astype(found.dtype)
    found = found + bias.astype(found.dtype)
    found[bias == -np.inf] = -np.inf
    flat[at] = found


def _entries(
    rows: AdjustedRows, previous_tokens: Tensor
) -> tuple[Int64Array, Int64Array, Int64Array, BoolArray, npt.NDArray[np.float64]]:
    """Row, token id, count, whether in the prompt, and bias of each entry that changes a logit,
    including the latest tokens."""
    lengths = np.diff(rows.entry_start.numpy())
    row = np.repeat(np.arange(len(lengths)), lengths)
    token_id, count = rows.token_id.numpy()[: len(row)], rows.count.numpy()[: len(row)]
    is_in_prompt, bias = rows.is_in_prompt.numpy()[: len(row)], rows.bias.numpy()[: len(row)]
    latest = rows.latest.numpy()
    if (latest >= 0).any():
        newest = np.where(latest >= 0, previous_tokens.numpy()[latest], -1)
        is_newest = token_id == newest[row]
        count = count + is_newest
        is_missing = (latest >= 0) & (np.bincount(row[is_newest], minlength=len(latest)) == 0)
        missing = np.flatnonzero(is_missing)
        row = np.concatenate((row, missing))
        token_id = np.concatenate((token_id, newest[missing]))
        count = np.concatenate((count, np.ones_like(missing)))
        is_in_prompt = np.concatenate((is_in_prompt, np.zeros(len(missing), dtype=bool)))
        bias = np.concatenate((bias, np.zeros(len(missing))))
    if (rows.place.numpy() < 0).any():
        is_real = rows.place.numpy()[row] >= 0
        return row[is_real], token_id[is_real], count[is_real], is_in_prompt[is_real], bias[is_real]
    return row, token_id, count, is_in_prompt, bias
