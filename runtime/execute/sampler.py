"""Choosing the next token of each row: greedy, or drawn with the Gumbel-max trick.

    token = argmax over the kept set of  logit / temperature + Gumbel(seed, position, token_id)

A draw is a pure function of these values (docs/sampling.md), so it is the same in any batch, in
any order, after a preemption and on every backend. The kept set is exact: top-k first, then top-p
over what top-k left, ties settled by the smaller token id.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..sampling_params import SamplingParams
from .philox import UInt64Array, philox_4x32

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
LogitsArray = npt.NDArray[np.floating]

# Of the top-p set, so many best tokens are tried before the whole vocabulary is sorted (a guess).
_FIRST_TOP_P = 512
_WORDS_PER_BLOCK = 4


def sample(
    logits: Tensor, params: Sequence[SamplingParams], positions: Int64Array
) -> Int64Array:
    """logits [N, vocab_size] float32 or float64, finite or -inf; positions [N]: of the new token
    in its sequence -> token ids [N]. Rows of `params` and `positions` go with those of `logits`.
    """
    token_ids: Int64Array = logits.argmax(dim=-1).cpu().numpy()
    drawn = [index for index, row_params in enumerate(params) if not row_params.is_greedy]
    if not drawn:
        return token_ids
    values = logits[drawn].cpu().numpy() if len(drawn) < len(params) else logits.cpu().numpy()
    token_ids = token_ids.copy()
    for row, index in enumerate(drawn):
        token_ids[index] = _draw(values[row], params[index], int(positions[index]))
    return token_ids


def gumbel(seed: int, position: int, token_ids: Int64Array) -> FloatArray:
    """The Gumbel noise of given tokens [K] at one position of one seed."""
    tokens = token_ids.astype(np.uint64)
    words = _words(seed, position, tokens >> np.uint64(2))
    return _gumbel_of(np.choose(token_ids & 3, words))


def gumbel_of_all(seed: int, position: int, vocab_size: int) -> FloatArray:
    """The Gumbel noise of every token id, [vocab_size]; four tokens share a Philox block."""
    num_blocks = -(-vocab_size // _WORDS_PER_BLOCK)
    words = _words(seed, position, np.arange(num_blocks, dtype=np.uint64))
    return _gumbel_of(np.stack(words, axis=-1).reshape(-1)[:vocab_size])


def kept_tokens(scaled: FloatArray, top_k: int | None, top_p: float) -> Int64Array | None:
    """Ids of the top-k/top-p set of `scaled` logits [vocab_size], ascending; None: all."""
    vocab_size = len(scaled)
    limit = vocab_size if top_k is None else min(top_k, vocab_size)
    if top_p < 1.0:
        limit = _top_p_count(scaled, limit, top_p)
    return _best(scaled, limit) if limit < vocab_size else None


def _draw(logits: LogitsArray, params: SamplingParams, position: int) -> int:
    scaled = logits.astype(np.float64) / params.temperature
    kept = kept_tokens(scaled, params.top_k, params.top_p)
    if kept is None:
        noise = gumbel_of_all(params.seed, position, len(scaled))
        return int(np.argmax(scaled + noise))
    noise = gumbel(params.seed, position, kept)
    return int(kept[np.argmax(scaled[kept] + noise)])


def _best(values: FloatArray, count: int) -> Int64Array:
    """Ids of the `count` largest values, ascending; of equal ones the smaller ids."""
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > threshold)
    equal = np.flatnonzero(values == threshold)[: count - len(above)]
    return np.sort(np.concatenate((above, equal)))


def _top_p_count(scaled: FloatArray, limit: int, top_p: float) -> int:
    """The least number of best tokens, of the `limit` best, whose share of their mass is >= top_p.
    """
    highest = scaled.max()
    for tried in (min(_FIRST_TOP_P, limit), limit):
        best = np.sort(_largest(scaled, tried))[::-1]
        mass = np.cumsum(np.exp(best - highest))
        total = mass[-1] if tried == limit else _total_mass(scaled, highest, limit)
        if mass[-1] >= top_p * total or tried == limit:
            break
    return min(int(np.searchsorted(mass, top_p * total, side="left")) + 1, tried)


def _total_mass(scaled: FloatArray, highest: np.float64, limit: int) -> np.float64:
    values = scaled if limit == len(scaled) else _largest(scaled, limit)
    total: np.float64 = np.exp(values - highest).sum()
    return total


def _largest(values: FloatArray, count: int) -> FloatArray:
    """The `count` largest values, in no order."""
    return np.partition(values, len(values) - count)[len(values) - count :]


def _words(
    seed: int, position: int, blocks: UInt64Array
) -> tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array]:
    """Philox of counter (block, position low, position high, 0) under the seed's two halves."""
    place, key = np.uint64(position), np.uint64(seed)
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    zeros = np.zeros_like(blocks)
    counter = (blocks, zeros + (place & low), zeros + (place >> shift), zeros)
    return philox_4x32(counter, (zeros + (key & low), zeros + (key >> shift)))


def _gumbel_of(words: UInt64Array) -> FloatArray:
    """-log(-log(u)) with u = (word + 1/2) / 2**32, which lies in the open interval (0, 1)."""
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    return -np.log(-np.log(uniform))
