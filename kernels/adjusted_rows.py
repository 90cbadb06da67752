"""Which rows of logits are changed before sampling, and what by: tensors on the logits' device.

    entries   |..row 0..|.row 1.|......row 2......|      entry_start [R + 1]

In this order, as docs/how-it-works/sampling.md has it: repetition penalty, frequency and presence
penalties, bias, forbidden tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdjustedRows:
    """R rows with K entries in all; the token ids of a row are distinct."""

    place: Tensor  # [R] int64, the row's index in the logits; -1: padding, nothing is done
    repetition: Tensor  # [R] float64, > 0; 1: none
    frequency: Tensor  # [R] float64
    presence: Tensor  # [R] float64
    # [R] int64: which of the previous step's tokens is the row's latest, not counted in the
    # entries; -1: the entries say all
    latest: Tensor
    entry_start: Tensor  # [R + 1] int64, ascending from 0
    token_id: Tensor  # [K] int64, in [0, vocab_size)
    count: Tensor  # [K] int64, occurrences in the output; 0: only in the prompt, or in neither
    is_in_prompt: Tensor  # [K] bool, meant by the repetition penalty (so is count > 0)
    bias: Tensor  # [K] float64; -inf: must not be sampled
