"""Samples the next token of each row with numpy: finds the kept set by a threshold, not by a sort.

Steps and rule for ties: docs/how-it-works/sampling.md. If few tokens are kept, noise is computed
for these alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..gumbel import WORDS_PER_BLOCK, FloatArray, Int64Array, gumbel, gumbel_of_all
from ..reference.dense import placed
from ..sampling_rows import SamplingRows

LogitsArray = npt.NDArray[np.floating]

# For top-p without top-k, the number of top tokens to try before the whole vocabulary is sorted
# (a guess).
_FIRST_TOP_P = 512
# Philox blocks computed at a time: their arrays of 8 bytes stay in a core's second-level cache.
_BLOCKS_AT_ONCE = 8192


class Truncation(NamedTuple):
    """The parameters that narrow the set of tokens for one row."""

    temperature: float  # > 0
    top_k: int  # 0: all
    top_p: float
    min_p: float

    @property
    def num_best(self) -> int:
        """Among how many of the top logits to look for the kept set first."""
        return self.top_k or (_FIRST_TOP_P if self.top_p < 1.0 else 0)


def sample(
    logits: Tensor, rows: SamplingRows, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    values: LogitsArray = logits.numpy()
    # numpy's argmax is 7 times faster than torch's (which does not vectorise it); both take the
    # first best, and a NaN before all.
    token_ids: Int64Array = values.argmax(axis=-1)
    is_finite = np.isfinite(values[np.arange(len(values)), token_ids])
    is_greedy = (rows.temperature.numpy() == 0.0) | (rows.top_k.numpy() == 1)
    drawn: Int64Array = np.flatnonzero(is_finite & ~is_greedy)
    if len(drawn):
        picked = logits[drawn] if len(drawn) < len(values) else logits
        token_ids[drawn] = _draw(picked, rows, drawn)
    into_ids, into_finite = out or (None, None)
    return (
        placed(torch.from_numpy(token_ids), into_ids),
        placed(torch.from_numpy(is_finite), into_finite),
    )


def kept_tokens(logits: LogitsArray, cut: Truncation, best: LogitsArray) -> Int64Array | None:
    """Ids of the top-k/top-p/min-p set of one row of logits [vocab_size], ascending; None: all.

    `best`: the row's largest logits in descending order, at least top_k of them if top_k is set; if
    they contain the top-p set, the vocabulary need not be sorted.
    """
    vocab_size = len(logits)
    count = min(cut.top_k, vocab_size) if cut.top_k else vocab_size
    if cut.top_p < 1.0:
        count, best = _top_p_count(logits, count, cut, best)
    kept = None if count == vocab_size else _first_tokens(logits, count, best[count - 1])
    return kept if cut.min_p == 0.0 else _min_p_of(logits, kept, cut)


def truncations(rows: SamplingRows, drawn: Int64Array) -> list[Truncation]:
    """Of the rows `drawn`."""
    fields = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    return [Truncation(*row) for row in zip(*(field.numpy()[drawn].tolist() for field in fields))]


def _draw(logits: Tensor, rows: SamplingRows, drawn: Int64Array) -> Int64Array:
    """logits [R, vocab_size] of the rows `drawn` [R] -> their token ids [R]."""
    cuts = truncations(rows, drawn)
    best = _best_logits(logits, cuts)
    values: LogitsArray = logits.numpy()
    # NOTE: each row uses its own number of top logits only, not the batch's: rounding in the sum of
    # a top-p set must not depend on the other rows.
    kept = [kept_tokens(values[i], cut, best[i][: cut.num_best]) for i, cut in enumerate(cuts)]
    return best_draws(values, kept, rows, drawn)[0]


def best_draws(
    values: LogitsArray,
    kept: Sequence[Int64Array | None],
    rows: SamplingRows,
    drawn: Int64Array,
    first_id: int = 0,
) -> tuple[Int64Array, FloatArray]:
    """values [R, vocab_size] of the rows `drawn` [R]; kept: the ids of each that may be drawn,
    None: all -> their token ids [R], and the scores [R] by which they won; -inf, and any id, where
    none may be drawn. first_id: the token whose logits are the first column, from which ids count.
    """
    size = values.shape[1]
    seeds = rows.seed.numpy()[drawn].view(np.uint64)
    positions = rows.position.numpy()[drawn].astype(np.uint64)
    scale = rows.temperature.numpy()[drawn]
    token_ids = np.zeros(len(drawn), dtype=np.int64)
    best = np.full(len(drawn), -np.inf)

    few = [
        i for i, ids in enumerate(kept) if ids is not None and len(ids) > 0 and _is_few(ids, size)
    ]
    if few:
        sets = [ids for i in few if (ids := kept[i]) is not None]
        sizes = [len(ids) for ids in sets]
        noise = gumbel(
            np.repeat(seeds[few], sizes),
            np.repeat(positions[few], sizes),
            np.concatenate(sets) + first_id,
        )
        for i, ids, own in zip(few, sets, np.split(noise, np.cumsum(sizes)[:-1]), strict=True):
            own += values[i][ids].astype(np.float64) / scale[i]
            token_ids[i], best[i] = ids[own.argmax()], own.max()

    many = [i for i, ids in enumerate(kept) if ids is None or not _is_few(ids, size)]
    num_rows = max(1, _BLOCKS_AT_ONCE * WORDS_PER_BLOCK // size)
    for first in range(0, len(many), num_rows):
        part = many[first : first + num_rows]
        scores = gumbel_of_all(seeds[part], positions[part], size, first_id)
        scores += values[part].astype(np.float64) / scale[part][:, None]
        for i, row_scores in zip(part, scores, strict=True):
            ids = kept[i]
            token_ids[i] = row_scores.argmax() if ids is None else ids[row_scores[ids].argmax()]
            best[i] = row_scores[token_ids[i]]
    return token_ids, best


def _is_few(ids: Int64Array, vocab_size: int) -> bool:
    """Whether individual draws cost less than a draw for every token id."""
    return len(ids) * WORDS_PER_BLOCK < vocab_size


def _best_logits(logits: Tensor, cuts: Sequence[Truncation]) -> LogitsArray:
    """The largest logits of each row in descending order, as many as any row needs."""
    wanted = min(max(cut.num_best for cut in cuts), logits.shape[-1])
    values: LogitsArray = logits.topk(wanted).values.numpy()
    return values


def _first_tokens(logits: LogitsArray, count: int, threshold: np.floating) -> Int64Array:
    """Ids of the `count` top tokens, ascending; `threshold` is the logit of the last of them."""
    above = np.flatnonzero(logits > threshold)
    equal = np.flatnonzero(logits == threshold)[: count - len(above)]
    return np.sort(np.concatenate((above, equal)))


def _min_p_of(logits: LogitsArray, kept: Int64Array | None, cut: Truncation) -> Int64Array | None:
    """The kept tokens whose probability is >= min_p of the highest one's."""
    values = (logits if kept is None else logits[kept]).astype(np.float64)
    least = math.log(cut.min_p) * cut.temperature
    is_likely: npt.NDArray[np.bool_] = values - values.max() >= least
    if kept is not None:
        return np.compress(is_likely, kept)
    return None if is_likely.all() else np.flatnonzero(is_likely)


def _top_p_count(
    logits: LogitsArray, count: int, cut: Truncation, best: LogitsArray
) -> tuple[int, LogitsArray]:
    """The smallest number of top tokens whose share of the probability of the `count` top ones is
    >= top_p; and `best`, extended if needed."""
    if len(best) < count:
        total = unnormalised(logits, best[0], cut.temperature).sum()
        mass = np.cumsum(unnormalised(best, best[0], cut.temperature))
        if mass[-1] >= cut.top_p * total:
            return int(np.searchsorted(mass, cut.top_p * total)) + 1, best
        best = np.sort(logits)[::-1]
    mass = np.cumsum(unnormalised(best[:count], best[0], cut.temperature))
    return min(int(np.searchsorted(mass, cut.top_p * mass[-1])) + 1, count), best


def unnormalised(
    logits: LogitsArray, highest: np.floating | float, temperature: float
) -> FloatArray:
    """The probabilities before they are made to sum to 1: that of the `highest` logit is 1."""
    wide: FloatArray = logits.astype(np.float64)
    return np.exp((wide - float(highest)) / temperature)


# [256, 8]: inf if the bit allows the token, -inf if not.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BOUNDS: dict[str, npt.NDArray[np.floating]] = {
    name: np.where(_BITS == 1, np.inf, -np.inf).astype(name) for name in ("float32", "float64")
}


def apply_token_mask(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    values, words = logits.numpy(), masks.numpy()
    bounds = _BOUNDS[values.dtype.name]
    for row, bits in zip(rows.tolist(), words.view(np.uint8)):
        bound = bounds[bits].ravel()[: values.shape[1]]
        np.fmin(values[row], bound, out=values[row])
