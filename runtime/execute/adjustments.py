"""Changing logits before the draw: penalties, bias, and tokens that must not come yet.

In this order: the repetition penalty (CTRL, Keskar et al. 2019, section 4.1, as Hugging Face has
it) on the model's own logits, frequency and presence penalties (OpenAI), bias, mask. Each row's
result depends on its own tokens only. Cost: one gather and scatter over the tokens that count, for
all rows at once; nothing here runs over the vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..sampling_params import SamplingParams
from ..step import Adjustment

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# A row's index and a token id in one 64-bit key.
_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1


@dataclass(frozen=True, slots=True)
class AdjustedRow:
    """A row of logits that is changed, and what by."""

    place: int  # the row's index in the logits
    params: SamplingParams
    adjustment: Adjustment


def adjust_logits(logits: Tensor, rows: Sequence[AdjustedRow]) -> None:
    """Change some rows of logits [N, vocab_size], float32 or float64, contiguous, in place."""
    _penalise_repetition(logits, [row for row in rows if row.params.has_repetition_penalty])
    _penalise_output(logits, [row for row in rows if row.params.has_output_penalty])
    _add_bias(logits, [row for row in rows if row.adjustment.bias_ids])
    _mask(logits, [row for row in rows if row.adjustment.masked_ids])


def _penalise_repetition(logits: Tensor, rows: Sequence[AdjustedRow]) -> None:
    """A positive logit is divided by the penalty, a negative one multiplied, however often the
    token occurs."""
    if not rows:
        return
    parts = [ids for r in rows for ids in (r.adjustment.prompt_ids, r.adjustment.output_ids)]
    lengths = [len(r.adjustment.prompt_ids) + len(r.adjustment.output_ids) for r in rows]
    at = _places(logits, rows, lengths, _joined(parts))
    penalty = _values(logits, np.repeat([r.params.repetition_penalty for r in rows], lengths))
    found = logits.view(-1).index_select(0, at)
    # NOTE: a token that occurs twice is written twice, with the same value.
    logits.view(-1).scatter_(0, at, torch.where(found > 0, found / penalty, found * penalty))


def _penalise_output(logits: Tensor, rows: Sequence[AdjustedRow]) -> None:
    if not rows:
        return
    lengths = [len(r.adjustment.output_ids) for r in rows]
    keys = np.repeat(np.arange(len(rows)), lengths) << _ID_BITS
    keys |= _joined([r.adjustment.output_ids for r in rows])
    distinct, counts = np.unique(keys, return_counts=True)
    index, token_ids = distinct >> _ID_BITS, distinct & _ID_MASK
    frequency = np.array([r.params.frequency_penalty for r in rows])
    presence = np.array([r.params.presence_penalty for r in rows])
    at = _places(logits, rows, np.bincount(index, minlength=len(rows)), token_ids)
    _add(logits, at, -(frequency[index] * counts + presence[index]))


def _add_bias(logits: Tensor, rows: Sequence[AdjustedRow]) -> None:
    if not rows:
        return
    token_ids = _joined([r.adjustment.bias_ids for r in rows])
    amounts = np.concatenate([np.frombuffer(r.adjustment.bias_values) for r in rows])
    _add(
        logits,
        _places(logits, rows, [len(r.adjustment.bias_ids) for r in rows], token_ids),
        amounts,
    )


def _mask(logits: Tensor, rows: Sequence[AdjustedRow]) -> None:
    """Ids beyond the vocabulary cannot be sampled anyhow."""
    if not rows:
        return
    known = [[i for i in r.adjustment.masked_ids if i < logits.shape[-1]] for r in rows]
    token_ids = np.array([i for ids in known for i in ids], dtype=np.int64)
    at = _places(logits, rows, [len(ids) for ids in known], token_ids)
    logits.view(-1).index_fill_(0, at, -torch.inf)


def _joined(parts: Sequence[array[int]]) -> Int64Array:
    """Token ids of several arrays, one after the other."""
    return np.concatenate([np.frombuffer(part, dtype=np.intc) for part in parts], dtype=np.int64)


def _places(
    logits: Tensor,
    rows: Sequence[AdjustedRow],
    lengths: Sequence[int] | Int64Array,
    token_ids: Int64Array,
) -> Tensor:
    """Where `lengths[i]` tokens of each row lie in the flat logits: [K] int64."""
    starts = np.array([row.place for row in rows], dtype=np.int64) * logits.shape[-1]
    return torch.from_numpy(np.repeat(starts, lengths) + token_ids).to(logits.device)


def _add(logits: Tensor, at: Tensor, amounts: FloatArray) -> None:
    """Add to flat logits at distinct places."""
    logits.view(-1).index_add_(0, at, _values(logits, amounts))


def _values(logits: Tensor, values: FloatArray) -> Tensor:
    return torch.from_numpy(values).to(logits.device, logits.dtype)
