"""Choosing the next token of each row: greedy, or drawn with the Gumbel-max trick.

    token = argmax over the kept set of  logit / temperature + Gumbel(seed, position, token_id)

A draw is a pure function of these values (docs/sampling.md), so it is the same in any batch, in
any order, after a preemption and on every backend. The kept set is exact: top-k first, then top-p
over what top-k left, ties settled by the smaller token id, then min-p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..sampling_params import SamplingParams
from .philox import UInt64Array, philox_4x32

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
LogitsArray = npt.NDArray[np.floating]

# Of a top-p set without top-k, so many best tokens are tried before the vocabulary is sorted
# (a guess).
_FIRST_TOP_P = 512
_WORDS_PER_BLOCK = 4
# Philox blocks computed in one go: their arrays of 8 bytes stay in a core's second-level cache.
_BLOCKS_AT_ONCE = 8192
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen for each row."""

    token_ids: Int64Array  # [N]
    is_finite: npt.NDArray[np.bool_]  # [N]; False: NaN or +inf among the logits, or all are -inf


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Int64Array) -> Sampled:
    """logits [N, vocab_size] float32 or float64; positions [N]: of the new token in its sequence.

    Rows of `params` and `positions` go with those of `logits`. -inf masks a token. The token of a
    row that is not finite is some valid id.
    """
    values: LogitsArray = logits.cpu().numpy()
    # numpy's argmax is 7 times faster than torch's on a CPU (which does not vectorise it); both
    # take the first best, and a NaN before all.
    token_ids: Int64Array = values.argmax(axis=-1)
    is_finite = np.isfinite(values[np.arange(len(values)), token_ids])
    drawn = [i for i, row in enumerate(params) if not row.is_greedy and is_finite[i]]
    if drawn:
        picked = logits[drawn] if len(drawn) < len(params) else logits
        token_ids[drawn] = _draw(picked, [params[i] for i in drawn], positions[drawn])
    return Sampled(token_ids, is_finite)


def gumbel(seeds: UInt64Array, positions: UInt64Array, token_ids: Int64Array) -> FloatArray:
    """Gumbel noise of given tokens [K], each with its seed and position ([K], or broadcasting)."""
    words = _words(seeds, positions, (token_ids // _WORDS_PER_BLOCK).astype(np.uint64))
    return _gumbel_of(np.choose(token_ids % _WORDS_PER_BLOCK, words))


def gumbel_of_all(seeds: UInt64Array, positions: UInt64Array, vocab_size: int) -> FloatArray:
    """Gumbel noise of every token id under R seeds and positions [R] -> [R, vocab_size].

    The same numbers as `gumbel`'s at a quarter of the cost: four tokens share a Philox block.
    """
    num_blocks = -(-vocab_size // _WORDS_PER_BLOCK)
    blocks = np.arange(num_blocks, dtype=np.uint64)
    words = np.stack(_words(seeds[:, None], positions[:, None], blocks), axis=-1)
    return _gumbel_of(words.reshape(len(seeds), -1)[:, :vocab_size])


def kept_tokens(
    logits: LogitsArray, params: SamplingParams, best: LogitsArray
) -> Int64Array | None:
    """Ids of the top-k/top-p/min-p set of one row of logits [vocab_size], ascending; None: all.

    `best`: the row's largest logits in descending order, at least top_k of them where top_k is
    set; more of them than the top-p set holds save sorting the vocabulary.
    """
    vocab_size = len(logits)
    count = vocab_size if params.top_k is None else min(params.top_k, vocab_size)
    if params.top_p < 1.0:
        count, best = _top_p_count(logits, count, params, best)
    kept = None if count == vocab_size else _first_tokens(logits, count, best[count - 1])
    return kept if params.min_p == 0.0 else _min_p_of(logits, kept, params)


def _draw(logits: Tensor, params: Sequence[SamplingParams], positions: Int64Array) -> Int64Array:
    """logits [R, vocab_size] -> drawn token ids [R]."""
    vocab_size = logits.shape[-1]
    best = _best_logits(logits, params)
    values: LogitsArray = logits.cpu().numpy()
    # NOTE: each row sees its own number of best logits only, not the batch's: rounding in the sum
    # of a top-p set must not depend on the other rows.
    kept = [
        kept_tokens(values[i], row_params, best[i][: _num_best(row_params)])
        for i, row_params in enumerate(params)
    ]
    seeds = np.array([row_params.seed for row_params in params], dtype=np.uint64)
    places = positions.astype(np.uint64)
    scale = np.array([row_params.temperature for row_params in params])
    token_ids = np.zeros(len(params), dtype=np.int64)

    few = [i for i, ids in enumerate(kept) if ids is not None and _is_few(ids, vocab_size)]
    if few:
        sets = [ids for i in few if (ids := kept[i]) is not None]
        sizes = [len(ids) for ids in sets]
        noise = gumbel(
            np.repeat(seeds[few], sizes), np.repeat(places[few], sizes), np.concatenate(sets)
        )
        for i, ids, own in zip(few, sets, np.split(noise, np.cumsum(sizes)[:-1]), strict=True):
            token_ids[i] = ids[np.argmax(values[i][ids].astype(np.float64) / scale[i] + own)]

    many = [i for i, ids in enumerate(kept) if ids is None or not _is_few(ids, vocab_size)]
    num_rows = max(1, _BLOCKS_AT_ONCE * _WORDS_PER_BLOCK // vocab_size)
    for first in range(0, len(many), num_rows):
        part = many[first : first + num_rows]
        scores = gumbel_of_all(seeds[part], places[part], vocab_size)
        scores += values[part].astype(np.float64) / scale[part][:, None]
        for i, row_scores in zip(part, scores, strict=True):
            ids = kept[i]
            token_ids[i] = row_scores.argmax() if ids is None else ids[row_scores[ids].argmax()]
    return token_ids


def _is_few(ids: Int64Array, vocab_size: int) -> bool:
    """Whether single draws cost less than a draw for every token id."""
    return len(ids) * _WORDS_PER_BLOCK < vocab_size


def _best_logits(logits: Tensor, params: Sequence[SamplingParams]) -> LogitsArray:
    """The largest logits of each row in descending order, as many as any row asks for."""
    wanted = min(max(_num_best(row) for row in params), logits.shape[-1])
    values: LogitsArray = logits.topk(wanted).values.cpu().numpy()
    return values


def _num_best(params: SamplingParams) -> int:
    return params.top_k or (_FIRST_TOP_P if params.top_p < 1.0 else 0)


def _first_tokens(logits: LogitsArray, count: int, threshold: np.floating) -> Int64Array:
    """Ids of the `count` best tokens, ascending; `threshold` is the logit of the last of them."""
    above = np.flatnonzero(logits > threshold)
    equal = np.flatnonzero(logits == threshold)[: count - len(above)]
    return np.sort(np.concatenate((above, equal)))


def _min_p_of(
    logits: LogitsArray, kept: Int64Array | None, params: SamplingParams
) -> Int64Array | None:
    """Those of the kept tokens whose probability is >= min_p of the highest one's."""
    values = (logits if kept is None else logits[kept]).astype(np.float64)
    least = math.log(params.min_p) * params.temperature
    is_likely: npt.NDArray[np.bool_] = values - values.max() >= least
    if kept is not None:
        return np.compress(is_likely, kept)
    return None if is_likely.all() else np.flatnonzero(is_likely)


def _top_p_count(
    logits: LogitsArray, count: int, params: SamplingParams, best: LogitsArray
) -> tuple[int, LogitsArray]:
    """The least number of best tokens, of the `count` best, whose share of the probability of
    these is >= top_p; and `best`, long enough for it."""
    if len(best) < count:
        total = _mass(logits, best[0], params.temperature).sum()
        mass = np.cumsum(_mass(best, best[0], params.temperature))
        if mass[-1] >= params.top_p * total:
            return int(np.searchsorted(mass, params.top_p * total)) + 1, best
        best = np.sort(logits)[::-1]
    mass = np.cumsum(_mass(best[:count], best[0], params.temperature))
    return min(int(np.searchsorted(mass, params.top_p * mass[-1])) + 1, count), best


def _mass(logits: LogitsArray, highest: np.floating, temperature: float) -> FloatArray:
    """Unnormalised probabilities, the highest being 1."""
    wide: FloatArray = logits.astype(np.float64)
    return np.exp((wide - float(highest)) / temperature)


def _words(
    seeds: UInt64Array, positions: UInt64Array, blocks: UInt64Array
) -> tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array]:
    """Philox of counter (block, position low, position high, 0) under the seed's two halves."""
    zero = np.zeros((1,) * positions.ndim, dtype=np.uint64)
    counter = (blocks, positions & _LOW, positions >> _SHIFT, zero)
    return philox_4x32(counter, (seeds & _LOW, seeds >> _SHIFT))


def _gumbel_of(words: UInt64Array) -> FloatArray:
    """-log(-log(u)) with u = (word + 1/2) / 2**32, which lies in the open interval (0, 1)."""
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    noise: FloatArray = -np.log(-np.log(uniform))
    return noise
