"""Steps that are computed when they are submitted, on a CPU.

Torch calls and compiled kernels on the calling thread's tensors; what is sampled is known before
the next step begins.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...constrained.matcher import Mask
from ...kernels.adjusted_rows import AdjustedRows
from ...kernels.registry import Kernels
from ...kernels.sampling_rows import SamplingRows
from ...kernels.top_logprobs import top_logprobs
from ..memory.transfer import KVTransfer
from ..models.registry import CausalLM
from ..sampling_params import SamplingParams
from ..step import FinishedStep, Row, RowResult, StepPlan, StepResult, TokenLogprob
from .adjustments import adjusted_arrays, adjusted_rows
from .captured import CapturedForward
from .inputs import NO_TOKEN, InputBuilder, Int64Array, WantedLogits, wanted_logits
from .row_results import NOTHING, pooled_result, sampling_of, scored_results, why_not_finite
from .sampling_inputs import sampling_arrays

# Scored positions whose logits are in memory at once: 256 x 152k float32 is 155 MB.
_SCORED_AT_ONCE = 256


class InOrderSteps:
    """Computes plans one after the other. Borrows the model and the pools."""

    can_overlap = False

    def __init__(
        self, model: CausalLM, kernels: Kernels, inputs: InputBuilder, transfer: KVTransfer
    ) -> None:
        self._model = model
        self._kernels = kernels
        self._inputs = inputs
        self._transfer = transfer
        self._previous_tokens: Int64Array = np.zeros(0, dtype=np.int64)
        self.forward = CapturedForward(model, kernels.capture)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> FinishedStep:
        """Compute the plan's step now."""
        return FinishedStep(self._execute(plan))

    def _execute(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        payloads = self._transfer.run(plan.transfers)
        transfer_s = time.perf_counter() - started if plan.transfers else None
        if not plan.rows:
            return StepResult(plan.step_id, (), None, transfer_s, payloads)
        started = time.perf_counter()
        batch, layout = self._inputs.build(plan, self._previous_tokens)
        wanted = wanted_logits(plan, layout)
        hidden = self.forward(batch)
        results = [NOTHING] * len(plan.rows)
        previous: Int64Array = np.full(len(plan.rows), NO_TOKEN, dtype=np.int64)
        if wanted.sampled_rows:
            self._sample(plan, wanted, hidden, results, previous)
        if wanted.scored_rows:
            self._score(plan, wanted, hidden, results)
        for index, first, end in wanted.pooled:
            total = hidden[first:end].sum(dim=0, dtype=torch.float64)
            results[index] = pooled_result(total.numpy())
        self._previous_tokens = previous
        duration_s = time.perf_counter() - started
        return StepResult(plan.step_id, tuple(results), duration_s, transfer_s, payloads)

    def _sample(
        self,
        plan: StepPlan,
        wanted: WantedLogits,
        hidden: Tensor,
        results: list[RowResult],
        previous: Int64Array,
    ) -> None:
        """Fill in the results and `previous` of the rows that sample."""
        is_every = wanted.is_every_token
        picked = hidden if is_every else hidden[torch.from_numpy(wanted.sampled_tokens)]
        logits = self._model.compute_logits(picked)
        params = [sampling_of(plan.rows[index]) for index in wanted.sampled_rows]
        raw = self._adjust([plan.rows[index] for index in wanted.sampled_rows], logits)
        if plan.masks is not None:
            self._mask(plan, plan.masks, wanted, logits)
        arrays = sampling_arrays(params, wanted.sampled_positions)
        token_ids, is_finite = self._kernels.sample(logits, SamplingRows(**_tensors(arrays)))
        # A failed row's token is never shown, but a plan made ahead may name it.
        previous[list(wanted.sampled_rows)] = token_ids.numpy()
        for index, token_id in zip(wanted.sampled_rows, token_ids.tolist(), strict=True):
            results[index] = RowResult(token_id=token_id)
        for place, index in enumerate(wanted.sampled_rows):
            if params[place].logprobs is not None:
                own = raw.get(place, logits[place])
                results[index] = self._with_logprobs(results[index], own, params[place])
        for place in np.flatnonzero(~is_finite.numpy()).tolist():
            index = wanted.sampled_rows[place]
            results[index] = RowResult(error=why_not_finite(plan, plan.rows[index]))

    def _adjust(self, rows: Sequence[Row], logits: Tensor) -> dict[int, Tensor]:
        """Change the logits [len(rows), vocab_size] of rows that ask for it; by place, what the
        model said of the rows that want logprobs, where that is or will be changed."""
        adjusted = adjusted_rows(rows)
        wanted = [
            place
            for place, row in enumerate(rows)
            if (row.adjustment is not None or row.mask is not None)
            and sampling_of(row).logprobs is not None
        ]
        raw = {place: logits[place].clone() for place in wanted}
        if adjusted:
            arrays = adjusted_arrays(adjusted, logits.shape[-1])
            previous_tokens = torch.from_numpy(self._previous_tokens)
            self._kernels.adjust_logits(logits, AdjustedRows(**_tensors(arrays)), previous_tokens)
        return raw

    def _mask(self, plan: StepPlan, masks: Mask, wanted: WantedLogits, logits: Tensor) -> None:
        """Leave the rows under a grammar only what it allows."""
        masked = [
            (place, mask)
            for place, index in enumerate(wanted.sampled_rows)
            if (mask := plan.rows[index].mask) is not None
        ]
        places, order = zip(*masked, strict=True)
        packed = torch.from_numpy(masks[list(order)].view(np.int32))
        rows = torch.tensor(places)
        self._kernels.apply_token_mask(logits, rows, packed)

    def _with_logprobs(
        self, result: RowResult, logits: Tensor, params: SamplingParams
    ) -> RowResult:
        assert result.token_id is not None and params.logprobs is not None
        chosen = torch.tensor([result.token_id], device=logits.device)
        return replace(
            result,
            logprob=float(self._kernels.token_logprobs(logits[None], chosen)[0]),
            top_logprobs=_tops(logits, params.logprobs),
        )

    def _score(
        self,
        plan: StepPlan,
        wanted: WantedLogits,
        hidden: Tensor,
        results: list[RowResult],
    ) -> None:
        """Fill in the target log-probabilities of the rows that have targets."""
        tokens = torch.from_numpy(wanted.scored_tokens)
        targets = torch.from_numpy(wanted.target_ids)
        logprobs: list[float] = []
        best: list[int] = []
        tops: list[tuple[TokenLogprob, ...]] = []
        for first in range(0, len(targets), _SCORED_AT_ONCE):
            part = slice(first, first + _SCORED_AT_ONCE)
            logits = self._model.compute_logits(hidden[tokens[part]])
            logprobs += self._kernels.token_logprobs(logits, targets[part]).tolist()
            best += logits.argmax(dim=-1).tolist()
            tops += [
                _tops(row, num) if num else () for row, num in zip(logits, wanted.num_tops[part])
            ]
        scored_results(plan, wanted.scored_rows, logprobs, best, tops, results)


def _tensors(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _tops(logits: Tensor, count: int) -> tuple[TokenLogprob, ...]:
    """The best tokens of one row of logits [vocab_size], best first."""
    token_ids, logprobs = top_logprobs(logits[None], min(count, logits.shape[-1]))
    return tuple(map(TokenLogprob, token_ids[0].tolist(), logprobs[0].tolist()))
