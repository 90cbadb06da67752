"""Draws and log-probabilities over a vocabulary that ranks share; each has its tokens' logits.

No rank sees another's logits: they exchange the largest ones, sums of exponentials and winners. All
ranks come to the same result, which is that of one rank with all logits, but for the order in which
exponentials are added. A draw is an argmax (docs/how-it-works/sampling.md), so the best of the
ranks' winners wins; what top-k and top-p keep follows from the largest logits of each, as many as
are kept at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..gumbel import FloatArray, Int64Array
from ..ops import AdjustLogits, ApplyTokenMask, Communicator
from ..sampling_rows import AdjustedRows, SamplingRows, best_tokens
from .sampling import LogitsArray, Truncation, best_draws, truncations, unnormalised

_MORE = 8  # times as many of the largest logits, where those were too few for a top-p set
_WORD_BITS = 32


class SharedVocabulary:
    """This rank's side, whose share of the tokens is [first, end); `first` is a multiple of 32.

    Logits are [N, end - first], token ids those of the whole vocabulary. Every rank calls the same
    methods in the same order, and gets the same results.
    """

    def __init__(
        self,
        communicator: Communicator,
        share: tuple[int, int],
        vocab_size: int,
        adjust_logits: AdjustLogits,
        apply_token_mask: ApplyTokenMask,
    ) -> None:
        self._ranks = communicator
        self._first, self._end = share
        assert self._first % _WORD_BITS == 0
        self._vocab_size = vocab_size
        self._adjust_logits = adjust_logits
        self._apply_token_mask = apply_token_mask

    def log_softmax(self, logits: Tensor) -> Tensor:
        """[N, end - first] -> this rank's part of log_softmax over the whole."""
        return logits - self._logsumexp(logits)[:, None]

    def adjust(self, logits: Tensor, rows: AdjustedRows, previous: Tensor) -> None:
        """See `ops.AdjustLogits`; every row's latest token is counted in the entries."""
        assert bool((rows.latest < 0).all()), "where ranks share a vocabulary, plans name tokens"
        is_own = (rows.token_id >= self._first) & (rows.token_id < self._end)
        num_before = torch.cat((torch.zeros(1, dtype=torch.int64), is_own.cumsum(0)))
        own = replace(
            rows,
            entry_start=num_before[rows.entry_start],
            token_id=rows.token_id[is_own] - self._first,
            count=rows.count[is_own],
            is_in_prompt=rows.is_in_prompt[is_own],
            bias=rows.bias[is_own],
        )
        self._adjust_logits(logits, own, previous)

    def apply_mask(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """See `ops.ApplyTokenMask`; masks of the whole vocabulary."""
        words = slice(self._first // _WORD_BITS, -(-self._end // _WORD_BITS))
        self._apply_token_mask(logits, rows, masks[:, words].contiguous())

    def argmax(self, logits: Tensor) -> Tensor:
        """[N] int64."""
        return self.best(logits, 1)[0][:, 0]

    def best(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The ids [N, count] of the largest logits, best first, of equal ones the smaller id first,
        and the logits; count: at most the whole vocabulary."""
        num_own = min(count, logits.shape[1])
        own_ids = best_tokens(logits, num_own)
        found = np.full((len(logits), count), -np.inf)
        ids = np.full((len(logits), count), np.iinfo(np.int64).max)
        found[:, :num_own] = logits.gather(-1, own_ids).numpy()
        ids[:, :num_own] = own_ids.numpy() + self._first
        all_found, all_ids = self._ranks.all_gather(found), self._ranks.all_gather(ids)
        together = np.concatenate(list(all_found), axis=1)
        # Ranks' ids ascend, and so do each rank's among equals: a stable sort keeps that.
        order = np.argsort(-together, axis=1, kind="stable")[:, :count]
        token_ids = np.take_along_axis(np.concatenate(list(all_ids), axis=1), order, 1)
        values = np.take_along_axis(together, order, 1)
        return torch.from_numpy(token_ids), torch.from_numpy(values).to(logits.dtype)

    def top_logprobs(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `sampling_rows.top_logprobs`."""
        token_ids, values = self.best(logits, count)
        return token_ids, values - self._logsumexp(logits)[:, None]

    def logprobs(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """See `ops.TokenLogprobs`."""
        is_own = (token_ids >= self._first) & (token_ids < self._end)
        own = (token_ids - self._first).masked_fill(~is_own, 0)
        chosen = logits.gather(-1, own[:, None])[:, 0].masked_fill(~is_own, -torch.inf)
        of_all = torch.from_numpy(self._ranks.all_gather(chosen.numpy()).max(axis=0))
        return of_all - self._logsumexp(logits)

    def sample(self, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        """See `ops.Sample`."""
        values: LogitsArray = logits.numpy()
        token_ids: Int64Array = values.argmax(axis=-1)
        highest = values[np.arange(len(values)), token_ids].astype(np.float64)
        scores = highest.copy()
        is_greedy = (rows.temperature.numpy() == 0.0) | (rows.top_k.numpy() == 1)
        drawn = np.flatnonzero(~is_greedy)
        if len(drawn):
            kept = self._kept(values[drawn], highest[drawn], truncations(rows, drawn))
            token_ids[drawn], scores[drawn] = best_draws(
                values[drawn], kept, rows, drawn, self._first
            )
        mine = np.stack((highest, scores, (token_ids + self._first).astype(np.float64)))
        all_highest, all_scores, all_ids = self._ranks.all_gather(mine).transpose(1, 0, 2)
        is_finite = np.isfinite(all_highest.max(axis=0))  # one that is no number stays none
        with np.errstate(invalid="ignore"):
            winners = np.where(np.isnan(all_scores), -np.inf, all_scores).argmax(axis=0)
        best_ids = all_ids[winners, np.arange(len(winners))].astype(np.int64)
        return torch.from_numpy(best_ids), torch.from_numpy(is_finite)

    def _kept(
        self, values: LogitsArray, highest: FloatArray, cuts: Sequence[Truncation]
    ) -> list[Int64Array | None]:
        """Of each row [R, end - first] the columns of the set that may be drawn; None: all."""
        kept: list[Int64Array | None] = [None] * len(cuts)
        rows = [i for i, cut in enumerate(cuts) if cut.num_best or cut.min_p]
        width = max([cuts[i].num_best for i in rows], default=0)
        while rows:
            width = min(width, self._vocab_size)
            gathered = self._ranks.all_gather(self._largest(values, highest, cuts, rows, width))
            unsure = []
            for place, i in enumerate(rows):
                peaks, masses, tops = np.split(gathered[:, place], (1, 2), axis=1)
                if not np.isfinite(peaks.max()):
                    continue  # the row has failed
                best = np.sort(tops.ravel())[::-1][:width]
                count = self._num_kept(cuts[i], peaks[:, 0], masses[:, 0], best)
                if count is None:
                    unsure.append(i)
                    continue
                columns = None
                if count < self._vocab_size:
                    columns = self._first_columns(values[i], tops, best[:count])
                kept[i] = _likely(values[i], columns, peaks.max(), cuts[i])
            rows, width = unsure, width * _MORE
        return kept

    def _largest(
        self,
        values: LogitsArray,
        highest: FloatArray,
        cuts: Sequence[Truncation],
        rows: Sequence[int],
        width: int,
    ) -> FloatArray:
        """[rows, 2 + width]: a row's largest logit here, the sum of its unnormalised probabilities
        (the largest logit's is 1), and the `width` largest logits, filled up with -inf."""
        found = np.full((len(rows), 2 + width), -np.inf)
        num_own = min(width, values.shape[1])
        if num_own:
            largest = torch.from_numpy(values[rows]).topk(num_own).values
            found[:, 2 : 2 + num_own] = largest.numpy()
        found[:, 0] = highest[rows]
        for place, i in enumerate(rows):
            is_finite = np.isfinite(highest[i])
            mass = (
                unnormalised(values[i], highest[i], cuts[i].temperature).sum() if is_finite else 0
            )
            found[place, 1] = mass
        return found

    def _num_kept(
        self, cut: Truncation, peaks: FloatArray, masses: FloatArray, best: FloatArray
    ) -> int | None:
        """How many of the top tokens top-k and top-p keep; None: more than the `best` ones, which
        are the largest logits of all ranks. peaks, masses [num_ranks]: see `_largest`."""
        count = min(cut.top_k, self._vocab_size) if cut.top_k else self._vocab_size
        if cut.top_p == 1.0:
            return count
        mass = np.cumsum(unnormalised(best[:count], peaks.max(), cut.temperature))
        total = mass[-1]
        if len(best) < count:
            total = (masses * np.exp((peaks - peaks.max()) / cut.temperature)).sum()
        num_needed = int(np.searchsorted(mass, cut.top_p * total)) + 1
        if num_needed > len(mass) and len(best) < count:
            return None
        return min(num_needed, count)

    def _first_columns(self, values: LogitsArray, tops: FloatArray, best: FloatArray) -> Int64Array:
        """The columns here of the tokens whose logits are `best`; of equal ones the smaller ids are
        taken first. tops [num_ranks, width]: each rank's largest logits."""
        threshold = best[-1]
        num_equal = int((best == threshold).sum())
        before = int((tops[: self._ranks.rank] == threshold).sum())
        equal = np.flatnonzero(values == threshold)[: max(0, num_equal - before)]
        return np.sort(np.concatenate((np.flatnonzero(values > threshold), equal)))

    def _logsumexp(self, logits: Tensor) -> Tensor:
        """[N], over the whole vocabulary, in the logits' dtype."""
        gathered = self._ranks.all_gather(logits.double().logsumexp(dim=-1).numpy())
        return torch.from_numpy(gathered).logsumexp(dim=0).to(logits.dtype)


def _likely(
    values: LogitsArray, columns: Int64Array | None, peak: float, cut: Truncation
) -> Int64Array | None:
    """Of these columns (None: all) those that min-p keeps; peak: the largest logit of all ranks."""
    if cut.min_p == 0.0:
        return columns
    own: LogitsArray = values if columns is None else values[columns]
    is_likely = own.astype(np.float64) - peak >= math.log(cut.min_p) * cut.temperature
    if columns is not None:
        return columns[is_likely]
    return None if is_likely.all() else np.flatnonzero(is_likely)
