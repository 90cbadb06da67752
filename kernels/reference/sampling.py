"""Samples the next token of each row by sorting it: the ground truth.

    token = argmax over the kept set of  logit / temperature + Gumbel(seed, position, token_id)

A draw is a pure function of these values (docs/how-it-works/sampling.md), so it is the same in any
batch, in any order, after a preemption and on every backend. Float64 throughout.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..gumbel import FloatArray, Int64Array, gumbel
from ..sampling_rows import AdjustedRows, SamplingRows
from .dense import placed


def sample(
    logits: Tensor, rows: SamplingRows, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    values: FloatArray = logits.double().cpu().numpy()
    token_ids = np.empty(len(values), dtype=np.int64)
    is_finite = np.empty(len(values), dtype=bool)
    for i, row_logits in enumerate(values):
        token_ids[i] = best = int(np.argmax(row_logits))  # the first NaN, if there is one
        is_finite[i] = np.isfinite(row_logits[best])
        temperature, top_k = float(rows.temperature[i]), int(rows.top_k[i])
        if not is_finite[i] or temperature == 0.0 or top_k == 1:
            continue
        top_p, min_p = float(rows.top_p[i]), float(rows.min_p[i])
        kept = kept_tokens(row_logits, temperature, top_k, top_p, min_p)
        seed = np.array([int(rows.seed[i])]).view(np.uint64)
        noise = gumbel(seed, np.array([int(rows.position[i])], dtype=np.uint64), kept)
        token_ids[i] = kept[np.argmax(row_logits[kept] / temperature + noise)]
    into_ids, into_finite = out or (None, None)
    return (
        placed(torch.from_numpy(token_ids).to(logits.device), into_ids),
        placed(torch.from_numpy(is_finite).to(logits.device), into_finite),
    )


def kept_tokens(
    logits: FloatArray, temperature: float, top_k: int, top_p: float, min_p: float
) -> Int64Array:
    """Ids of the set that one row of logits [vocab_size] is drawn from, ascending.

    top-k first, then top-p over the rest, ties won by the smaller id, then min-p.
    """
    best_first = np.argsort(-logits, kind="stable")[: top_k or None]
    below = logits[best_first] - logits[best_first[0]]
    if top_p < 1.0:
        reached = np.cumsum(np.exp(below / temperature))
        count = int(np.searchsorted(reached, top_p * reached[-1])) + 1
        best_first, below = best_first[:count], below[:count]
    # In logits: an exponential near 1 is rounded to it.
    least = math.log(min_p) * temperature if min_p > 0.0 else -math.inf
    return np.sort(best_first[below >= least])


def token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    chosen = logits.gather(-1, token_ids[:, None])[:, 0]
    return chosen - logits.logsumexp(dim=-1)


def apply_token_mask(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    bits = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device) & 1
    is_allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~is_allowed, -torch.inf)


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
