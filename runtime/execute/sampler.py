"""From a step's hidden states to tokens, log-probabilities and sums, and to the rows' results.

    arrays   numpy, from the plan    ->  the device
    launch   device tensors          ->  outputs, device tensors by name
    results  the outputs in numpy    ->  RowResults

On a CPU the three are called one after the other; on an accelerator the outputs are read a step
later. Nothing in `launch` waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.sampling_rows import AdjustedRows, SamplingRows
from ..models.language_model import LanguageModel
from ..schedule.plan import Row, RowResult, StepPlan, TokenLogprob
from ..schedule.sampling_params import SamplingParams
from .inputs import WantedLogits
from .sampling_arrays import RowAdjustment, adjusted_arrays, sampling_arrays
from .vocabulary import Vocabulary

Arrays = dict[str, npt.NDArray[Any]]
Answers = Mapping[str, npt.NDArray[Any]]

# The draws of a step that makes none.
NO_DRAWS: Arrays = {
    **sampling_arrays((), np.zeros(0, dtype=np.int64)),
    "rows": np.zeros(0, dtype=np.int64),
}
NON_FINITE = "the model produced non-finite logits"
NON_FINITE_STATES = "the model produced non-finite hidden states"
NOTHING_ALLOWED = "the grammar allows no token"
_NOTHING = RowResult()
# Scored positions whose logits are in memory at a time: 256 x 152k float32 is 155 MB.
_SCORED_AT_ONCE = 256
# Of these, positions whose top tokens are found at a time (a key of 8 bytes a logit).
_TOLD_AT_ONCE = 32


class Drawn(NamedTuple):
    """A step's draws, as `ops.Sample` gives them."""

    token_ids: Tensor  # [N] int64
    is_finite: Tensor  # [N] bool


class Tensors(Protocol):
    """A step's arrays on the device, by name."""

    def __getitem__(self, name: str) -> Tensor: ...


class Sampler:
    """One step's sampler; made with the plan, asked for results when the step is done."""

    def __init__(self, plan: StepPlan, wanted: WantedLogits, vocab_size: int) -> None:
        self._plan = plan
        self._sampling = Sampling(plan, wanted, vocab_size) if wanted.sampled_rows else None
        self._scoring = Scoring(plan, wanted, vocab_size) if wanted.scored_rows else None
        self._pooled = wanted.pooled
        self.is_sampled = np.zeros(len(plan.rows), dtype=bool)
        self.is_sampled[list(wanted.sampled_rows)] = True

    def arrays(self, is_drawn: bool = False) -> Arrays:
        """What `launch` needs on the device; is_drawn: it is given the draws."""
        parts = [part.arrays() for part in (self._sampling, self._scoring) if part is not None]
        if self._sampling is not None and not is_drawn:
            parts.append(_named("draws", self._sampling.draws()))
        return {name: array for part in parts for name, array in part.items()}

    def draws(self) -> Arrays:
        """The fields of SamplingRows, and `rows`, those of the plan: N of each, which may be 0."""
        return NO_DRAWS if self._sampling is None else self._sampling.draws()

    @property
    def changes_logits(self) -> bool:
        """Whether they are not drawn from as they are."""
        return self._sampling is not None and self._sampling.changes_logits

    def launch(
        self,
        vocabulary: Vocabulary,
        model: LanguageModel,
        hidden: Tensor,
        logits: Tensor | None,
        staged: Tensors,
        previous: Tensor,
        drawn: Drawn | None = None,
    ) -> dict[str, Tensor]:
        """hidden [>= T, hidden_size]; logits [N, vocab_size] of the rows that sample, changed IN
        PLACE; previous [P] int64: the tokens sampled by the rows of the previous step, overwritten
        with this step's. drawn: what was drawn from the logits as they are, and is in `previous`
        already; None: the draws are made here."""
        answers: dict[str, Tensor] = {}
        if self._sampling is not None:
            assert logits is not None
            answers |= self._sampling.launch(vocabulary, logits, staged, previous, drawn)
        if self._scoring is not None:
            answers |= self._scoring.launch(vocabulary, model, hidden, staged)
        if self._pooled:
            sums = [
                hidden[first:end].sum(dim=0, dtype=torch.float64) for _, first, end in self._pooled
            ]
            answers["pooled"] = torch.stack(sums)
        return answers

    def results(self, answers: Answers) -> tuple[RowResult, ...]:
        """One for each row of the plan; a row whose values are not finite gets `error`."""
        results = [_NOTHING] * len(self._plan.rows)
        if self._sampling is not None:
            self._sampling.fill(results, answers)
        if self._scoring is not None:
            self._scoring.fill(results, answers)
        for place, (index, _, _) in enumerate(self._pooled):
            # A copy: the next step may reuse the outputs' memory.
            results[index] = _pooled(answers["pooled"][place].copy())
        return tuple(results)


class Sampling:
    """The N draws of a step: one of each row that samples, and more of those with drafts."""

    def __init__(self, plan: StepPlan, wanted: WantedLogits, vocab_size: int) -> None:
        self._plan = plan
        self._indices = wanted.sampled_rows
        self._positions = wanted.sampled_positions
        self._vocab_size = vocab_size
        rows = [plan.rows[index] for index in self._indices]
        self._draws = _numbered(self._indices)
        self._params = [_sampling_of(row) for row in rows]
        self._wanted = [i for i, params in enumerate(self._params) if params.logprobs is not None]
        self._masks = [  # [N] rows of the plan's masks; None: everything is allowed
            None if row.mask is None else row.mask + draw for row, draw in zip(rows, self._draws)
        ]
        self._masked = [(i, mask) for i, mask in enumerate(self._masks) if mask is not None]
        # Of those whose log-probabilities are told: at which of these, and the mask's row.
        self._told = [
            (at, mask)
            for at, place in enumerate(self._wanted)
            if (mask := self._masks[place]) is not None
        ]
        self._num_best = [min(row.num_best, vocab_size) for row in rows]
        self._beams = [i for i, num_best in enumerate(self._num_best) if num_best]
        self._adjusted = [
            RowAdjustment(
                place,
                _sampling_of(row),
                row.adjustments[draw],
                -1 if row.from_previous is None else row.from_previous,
            )
            for place, (row, draw) in enumerate(zip(rows, self._draws))
            if row.adjustments
        ]

    @property
    def changes_logits(self) -> bool:
        """See `Sampler.changes_logits`."""
        return bool(self._beams or self._adjusted or self._masked)

    def draws(self) -> Arrays:
        """See `Sampler.draws`."""
        rows = np.array(self._indices, dtype=np.int64)
        return {**sampling_arrays(self._params, self._positions), "rows": rows}

    def arrays(self) -> Arrays:
        arrays: Arrays = {}
        if self._wanted:
            arrays["wanted"] = np.array(self._wanted, dtype=np.int64)
        if self._beams:
            arrays["beams"] = np.array(self._beams, dtype=np.int64)
        if self._adjusted:
            arrays |= _named("adjusted", adjusted_arrays(self._adjusted, self._vocab_size))
        if self._masked:
            masks = self._plan.masks
            assert masks is not None, "a row has a mask, the plan has none"
            places, order = zip(*self._masked, strict=True)
            arrays["masked"] = np.array(places, dtype=np.int64)
            arrays["masks"] = masks[list(order)].view(np.int32)
        if self._told:
            assert self._plan.masks is not None
            places, order = zip(*self._told, strict=True)
            arrays["told"] = np.array(places, dtype=np.int64)
            arrays["told_masks"] = self._plan.masks[list(order)].view(np.int32)
        return arrays

    def launch(
        self,
        vocabulary: Vocabulary,
        logits: Tensor,
        staged: Tensors,
        previous: Tensor,
        drawn: Drawn | None,
    ) -> dict[str, Tensor]:
        assert drawn is None or not self.changes_logits
        # The model's own logits, before they are changed.
        said = logits.index_select(0, staged["wanted"]) if self._wanted else None
        if self._beams:  # what changes logits changes log-probabilities there
            beams = staged["beams"]
            own = vocabulary.log_softmax(logits.index_select(0, beams))
            logits.index_copy_(0, beams, own)
        if self._adjusted:
            adjusted = AdjustedRows(**_fields(AdjustedRows, "adjusted", staged))
            vocabulary.adjust(logits, adjusted, previous)
        if self._masked:
            vocabulary.apply_mask(logits, staged["masked"], staged["masks"])
        answers: dict[str, Tensor] = {}
        if self._beams:
            changed, count = logits.index_select(0, beams), max(self._num_best)
            answers["best_ids"], answers["best_logprobs"] = vocabulary.best(changed, count)
        if drawn is None:
            rows = SamplingRows(**_fields(SamplingRows, "draws", staged))
            drawn = Drawn(*vocabulary.sample(logits, rows))
            # A failed row's token is never shown, but a plan made ahead may refer to it.
            previous.index_copy_(0, staged["draws.rows"], drawn.token_ids)
        token_ids = drawn.token_ids
        answers |= drawn._asdict()
        if said is not None:
            chosen = token_ids.index_select(0, staged["wanted"])
            answers["logprobs"] = vocabulary.logprobs(said, chosen)
            if count := max(self._num_top(place) for place in self._wanted):
                answers["top_ids"], answers["top_logprobs"] = vocabulary.top_logprobs(said, count)
            if self._told:
                answers |= self._lost(vocabulary, said, chosen, answers["logprobs"], staged)
        return answers

    def _lost(
        self,
        vocabulary: Vocabulary,
        said: Tensor,
        chosen: Tensor,
        logprobs: Tensor,
        staged: Tensors,
    ) -> dict[str, Tensor]:
        """What grammars take from the model's own logits [K, vocab_size], which are changed IN
        PLACE. An allowed token's log-probability is less, before the mask, by the logarithm of what
        all allowed ones have together."""
        told = staged["told"]
        best = vocabulary.argmax(said).index_select(0, told)
        vocabulary.apply_mask(said, told, staged["told_masks"])
        among_allowed = vocabulary.logprobs(said, chosen)
        return {
            "told_best": best,
            "allowed_logprobs": (logprobs - among_allowed).index_select(0, told).clamp(max=0.0),
        }

    def fill(self, results: list[RowResult], answers: Answers) -> None:
        drawn = [RowResult(token_id=token_id) for token_id in answers["token_ids"].tolist()]
        for i, place in enumerate(self._wanted):
            num_top = self._num_top(place)
            tops = _tops(answers["top_ids"][i], answers["top_logprobs"][i]) if num_top else ()
            logprob = float(answers["logprobs"][i])
            drawn[place] = drawn[place]._replace(logprob=logprob, top_logprobs=tops[:num_top])
        for i, (at, mask) in enumerate(self._told):
            place = self._wanted[at]
            allowed = float(answers["allowed_logprobs"][i])
            is_redirected = not self._allows(mask, int(answers["told_best"][i]))
            drawn[place] = drawn[place]._replace(
                allowed_logprob=allowed, is_redirected=is_redirected
            )
        for i, place in enumerate(self._beams):
            best = _tops(answers["best_ids"][i], answers["best_logprobs"][i])
            drawn[place] = drawn[place]._replace(best=best[: self._num_best[place]])
        for place in np.flatnonzero(~answers["is_finite"]).tolist():
            drawn[place] = RowResult(error=self._why_not_finite(self._masks[place]))
        if not any(self._draws):
            for index, result in zip(self._indices, drawn, strict=True):
                results[index] = result
            return
        for index, places in groupby(range(len(drawn)), self._indices.__getitem__):
            first, *later = [drawn[place] for place in places]
            results[index] = first._replace(later=tuple(later)) if later else first

    def _allows(self, mask: int, token_id: int) -> bool:
        assert self._plan.masks is not None
        return bool(int(self._plan.masks[mask, token_id // 32]) >> token_id % 32 & 1)

    def _num_top(self, place: int) -> int:
        return min(self._params[place].logprobs or 0, self._vocab_size)

    def _why_not_finite(self, mask: int | None) -> str:
        masks = self._plan.masks
        is_empty = masks is not None and mask is not None and not masks[mask].any()
        return NOTHING_ALLOWED if is_empty else NON_FINITE


class Scoring:
    """The rows of a step that have targets, M targets in all."""

    def __init__(self, plan: StepPlan, wanted: WantedLogits, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        assert wanted.scored_tokens is not None
        self._tokens, self._target_ids = wanted.scored_tokens, wanted.target_ids
        self._rows = [(index, plan.rows[index]) for index in wanted.scored_rows]

    def arrays(self) -> Arrays:
        return {"scored_tokens": self._tokens, "target_ids": self._target_ids}

    def launch(
        self, vocabulary: Vocabulary, model: LanguageModel, hidden: Tensor, staged: Tensors
    ) -> dict[str, Tensor]:
        tokens, targets = staged["scored_tokens"], staged["target_ids"]
        logprobs, best = [], []
        wanted: dict[str, list[Tensor]] = {}
        for first in range(0, len(targets), _SCORED_AT_ONCE):
            part = slice(first, first + _SCORED_AT_ONCE)
            logits = model.compute_logits(hidden.index_select(0, tokens[part]))
            logprobs.append(vocabulary.logprobs(logits, targets[part]))
            best.append(vocabulary.argmax(logits))
            self._put_wanted(vocabulary, logits, first, wanted)
        answers = {"target_logprobs": torch.cat(logprobs), "target_argmax": torch.cat(best)}
        return answers | {name: torch.cat(parts) for name, parts in wanted.items()}

    def _put_wanted(
        self,
        vocabulary: Vocabulary,
        logits: Tensor,
        first: int,
        wanted: dict[str, list[Tensor]],
    ) -> None:
        """Add the top tokens at the targets from `first` on, whose logits are given."""
        for index, start, end, count in self._wants_tops():
            own = range(max(start - first, 0), min(end - first, len(logits)), _TOLD_AT_ONCE)
            for at in own:
                few = logits[at : min(at + _TOLD_AT_ONCE, own.stop)]
                token_ids, logprobs = vocabulary.top_logprobs(few, count)
                wanted.setdefault(f"target_top_ids.{index}", []).append(token_ids)
                wanted.setdefault(f"target_top_logprobs.{index}", []).append(logprobs)

    def _wants_tops(self) -> list[tuple[int, int, int, int]]:
        """(row of the plan, first and end of its targets, number of top tokens) for rows that want
        any."""
        ends = np.cumsum([len(row.target_ids) for _, row in self._rows]).tolist()
        return [
            (index, end - len(row.target_ids), end, min(row.num_top_targets, self._vocab_size))
            for (index, row), end in zip(self._rows, ends, strict=True)
            if row.num_top_targets
        ]

    def fill(self, results: list[RowResult], answers: Answers) -> None:
        logprobs, best = answers["target_logprobs"].tolist(), answers["target_argmax"].tolist()
        first = 0
        for index, row in self._rows:
            own = slice(first, first + len(row.target_ids))
            first = own.stop
            results[index] = _with_targets(results[index], logprobs[own], best[own])
            if row.num_top_targets and results[index].error is None:
                found = (answers[f"target_top_{kind}.{index}"] for kind in ("ids", "logprobs"))
                tops = tuple(_tops(*at_target) for at_target in zip(*found, strict=True))
                results[index] = results[index]._replace(target_tops=tops)


def _sampling_of(row: Row) -> SamplingParams:
    assert row.sampling is not None, "only rows that sample are asked for their parameters"
    return row.sampling


def _numbered(rows: Sequence[int]) -> list[int]:
    """For each draw the number of those of the same row before it, which are its neighbours."""
    draws: list[int] = []
    for place, row in enumerate(rows):
        draws.append(draws[-1] + 1 if place and rows[place - 1] == row else 0)
    return draws


def _named(prefix: str, arrays: Arrays) -> Arrays:
    return {f"{prefix}.{name}": array for name, array in arrays.items()}


def _fields(kind: type[Any], prefix: str, staged: Tensors) -> dict[str, Tensor]:
    return {field.name: staged[f"{prefix}.{field.name}"] for field in fields(kind)}


def _tops(
    token_ids: npt.NDArray[np.int64], logprobs: npt.NDArray[np.floating]
) -> tuple[TokenLogprob, ...]:
    return tuple(map(TokenLogprob, token_ids.tolist(), logprobs.tolist()))


def _with_targets(result: RowResult, logprobs: list[float], best: list[int]) -> RowResult:
    if not np.isfinite(logprobs).all():
        return RowResult(error=NON_FINITE)
    return result._replace(target_logprobs=tuple(logprobs), target_argmax=tuple(best))


def _pooled(total: npt.NDArray[np.float64]) -> RowResult:
    """total [hidden_size]: a float64 sum, whatever the states' dtype."""
    if not np.isfinite(total).all():
        return RowResult(error=NON_FINITE_STATES)
    return RowResult(pooled=total)
