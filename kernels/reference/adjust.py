"""Changing logits before the draw, row by row in plain torch: the truth.

In this order: the repetition penalty (CTRL, Keskar et al. 2019, section 4.1, as Hugging Face has
it) on the model's own logits, frequency and presence penalties (OpenAI), bias, forbidden tokens.
Computed in the logits' dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..adjusted_rows import AdjustedRows


def adjust_logits(logits: Tensor, rows: AdjustedRows, previous_tokens: Tensor) -> None:
    for r, place in enumerate(rows.place.tolist()):
        if place >= 0:
            _adjust_row(logits[place], rows, r, previous_tokens)


def _adjust_row(logits: Tensor, rows: AdjustedRows, r: int, previous_tokens: Tensor) -> None:
    """logits [vocab_size]"""
    own = slice(int(rows.entry_start[r]), int(rows.entry_start[r + 1]))
    token_id, count = rows.token_id[own], rows.count[own]
    is_in_prompt, bias = rows.is_in_prompt[own], rows.bias[own]
    if rows.latest[r] >= 0:
        latest = previous_tokens[rows.latest[r]]
        count = count + (token_id == latest)
        if not (token_id == latest).any():
            token_id = torch.cat((token_id, latest[None]))
            count = torch.cat((count, count.new_ones(1)))
            is_in_prompt = torch.cat((is_in_prompt, is_in_prompt.new_zeros(1)))
            bias = torch.cat((bias, bias.new_zeros(1)))
    found, penalty = logits[token_id], rows.repetition[r].to(logits.dtype)
    penalised = torch.where(found > 0, found / penalty, found * penalty)
    found = torch.where((count > 0) | is_in_prompt, penalised, found)
    amount = rows.frequency[r] * count + torch.where(count > 0, rows.presence[r], 0.0)
    found = found - amount.to(logits.dtype) + bias.to(logits.dtype)
    logits[token_id] = torch.where(bias == -torch.inf, -torch.inf, found)
