"""Parameters for adjusting and sampling rows of logits: one tensor each, on the logits' device.

What the parameters mean, and how draws are derived: docs/how-it-works/sampling.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """N rows."""

    # [N] float64; 0: the best token; else >= 1e-100, so that a logit divided by it is finite
    temperature: Tensor
    top_k: Tensor  # [N] int64, >= 0; 0: all
    top_p: Tensor  # [N] float64, in (0, 1]
    min_p: Tensor  # [N] float64, in [0, 1]
    seed: Tensor  # [N] int64, the bits of an unsigned number
    position: Tensor  # [N] int64, of the new token in its sequence


@dataclass(frozen=True, slots=True)
class AdjustedRows:
    """Which rows of logits to change before sampling, and how. R rows with K entries in all; the
    token ids of a row are distinct.

        entries   |..row 0..|.row 1.|......row 2......|      entry_start [R + 1]

    In this order: repetition penalty, frequency and presence penalties, bias, banned tokens.
    """

    place: Tensor  # [R] int64, the row's index in the logits; -1: padding, ignored
    repetition: Tensor  # [R] float64, > 0; 1: none
    frequency: Tensor  # [R] float64
    presence: Tensor  # [R] float64
    # [R] int64: index of the row's latest token among the previous step's, not counted in the
    # entries; -1: the entries are complete
    latest: Tensor
    entry_start: Tensor  # [R + 1] int64, ascending from 0
    token_id: Tensor  # [K] int64, in [0, vocab_size)
    count: Tensor  # [K] int64, occurrences in the output; 0: only in the prompt, or in neither
    is_in_prompt: Tensor  # [K] bool, subject to the repetition penalty (so is count > 0)
    bias: Tensor  # [K] float64; -inf: must not be sampled


def top_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """logits [N, vocab_size] float32 or float64, without NaN -> token ids [N, count] int64, best
    first, and their log-probabilities [N, count] (natural log, at temperature 1) in the logits'
    dtype.

    Among equal ones the smaller id comes first, and takes precedence at the cut. `count` is at most
    vocab_size.
    """
    token_ids = best_tokens(logits, count)
    return token_ids, logits.gather(-1, token_ids) - logits.logsumexp(dim=-1, keepdim=True)


def best_tokens(logits: Tensor, count: int) -> Tensor:
    """The ids of `top_logprobs`; a logit may be -inf."""
    if logits.dtype != torch.float32:
        return logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    # One int64 key a token orders by logit, then by id, and no two are equal: torch.topk guarantees
    # no order of ties. The integer of a negative float falls as it rises; -0.0 counts as 0.0.
    bits = (logits + 0.0).view(torch.int32).long()
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    last = logits.shape[-1] - 1
    ids = torch.arange(last, -1, -1, device=logits.device)
    keys = (ascending << 32) + ids
    return last - (keys.topk(count).values & 0xFFFFFFFF)
