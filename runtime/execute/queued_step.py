"""A step that was queued, and what of it goes back to the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
from torch import Tensor

from ..memory.queued_transfer import QueuedCopies
from ..step import RowResult, StepPlan, StepResult, TokenLogprob
from .accelerator import Accelerator, Event
from .inputs import WantedLogits
from .row_results import NOTHING, pooled_result, sampling_of, scored_results, why_not_finite

Array = npt.NDArray[Any]


class ReadBack:
    """Tensors on their way to the host, by name; to be read once the step has ended."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._pinned: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Queue the copy of a contiguous tensor."""
        pinned = self._accelerator.pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        self._accelerator.copy(pinned, tensor)
        self._pinned[name] = pinned

    def __contains__(self, name: str) -> bool:
        return name in self._pinned

    def __getitem__(self, name: str) -> Array:
        array: Array = self._pinned[name].numpy()
        return array


@dataclass(frozen=True, slots=True)
class QueuedStep:
    """A PendingStep."""

    plan: StepPlan
    wanted: WantedLogits | None  # None: the plan has no rows
    copies: QueuedCopies
    read_back: ReadBack
    began: Event
    moved: Event  # the copies between tiers were made
    ended: Event

    def result(self) -> StepResult:
        """Waits until the step is done.

        A row whose logits or sums are not finite gets `error`; the others are not affected.
        """
        self.ended.wait()
        plan, wanted = self.plan, self.wanted
        payloads = self.copies.payloads()
        transfer_s = self.moved.seconds_since(self.began) if plan.transfers else None
        if wanted is None:
            return StepResult(plan.step_id, (), None, transfer_s, payloads)
        results = [NOTHING] * len(plan.rows)
        self._take_sampled(wanted, results)
        self._take_scores(wanted, results)
        for index, _, _ in wanted.pooled:
            results[index] = pooled_result(self.read_back[f"pooled.{index}"])
        duration_s = self.ended.seconds_since(self.moved)
        return StepResult(plan.step_id, tuple(results), duration_s, transfer_s, payloads)

    def _take_sampled(self, wanted: WantedLogits, results: list[RowResult]) -> None:
        if not wanted.sampled_rows:
            return
        token_ids, is_finite = self.read_back["sampled"][:, : len(wanted.sampled_rows)].tolist()
        told = 0
        for place, index in enumerate(wanted.sampled_rows):
            row = self.plan.rows[index]
            result = RowResult(token_id=token_ids[place])
            if sampling_of(row).logprobs is not None:
                result = self._with_logprobs(result, told, sampling_of(row).logprobs or 0)
                told += 1
            if not is_finite[place]:
                result = RowResult(error=why_not_finite(self.plan, row))
            results[index] = result

    def _with_logprobs(self, result: RowResult, place: int, count: int) -> RowResult:
        tops = _tops(self.read_back, "top", place, count)
        return replace(result, logprob=float(self.read_back["logprobs"][place]), top_logprobs=tops)

    def _take_scores(self, wanted: WantedLogits, results: list[RowResult]) -> None:
        logprobs: list[float] = []
        best: list[int] = []
        tops: list[tuple[TokenLogprob, ...]] = []
        part = 0
        while f"scores.{part}.logprobs" in self.read_back:
            name = f"scores.{part}"
            logprobs += self.read_back[f"{name}.logprobs"].tolist()
            best += self.read_back[f"{name}.best"].tolist()
            counts = wanted.num_tops[len(tops) : len(logprobs)]
            tops += [
                _tops(self.read_back, f"{name}.top", place, count)
                for place, count in enumerate(counts)
            ]
            part += 1
        scored_results(self.plan, wanted.scored_rows, logprobs, best, tops, results)


def _tops(read_back: ReadBack, name: str, place: int, count: int) -> tuple[TokenLogprob, ...]:
    """The best `count` tokens of one row, best first."""
    if not count:
        return ()
    token_ids = read_back[f"{name}_ids"][place, :count].tolist()
    return tuple(
        map(TokenLogprob, token_ids, read_back[f"{name}_logprobs"][place, :count].tolist())
    )
