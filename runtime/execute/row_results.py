"""What comes of a plan's rows, and why one of them failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..sampling_params import SamplingParams
from ..step import Row, RowResult, StepPlan, TokenLogprob

NON_FINITE = "the model produced non-finite logits"
NON_FINITE_STATES = "the model produced non-finite hidden states"
NOTHING_ALLOWED = "the grammar allows no token"
NOTHING = RowResult()


def sampling_of(row: Row) -> SamplingParams:
    """Of a row that samples."""
    assert row.sampling is not None, "only rows that sample are asked for their parameters"
    return row.sampling


def why_not_finite(plan: StepPlan, row: Row) -> str:
    """The error of a row whose best logit is not finite."""
    has_mask = plan.masks is not None and row.mask is not None
    is_empty = has_mask and not plan.masks[row.mask].any()  # type: ignore[index]
    return NOTHING_ALLOWED if is_empty else NON_FINITE


def scored_results(
    plan: StepPlan,
    scored_rows: Sequence[int],
    logprobs: Sequence[float],
    best: Sequence[int],
    tops: Sequence[tuple[TokenLogprob, ...]],
    results: list[RowResult],
) -> None:
    """Fill in the scores of the rows that have targets; a place of `logprobs`, `best` and `tops`
    for each target, row after row."""
    first = 0
    for index in scored_rows:
        row = plan.rows[index]
        part = slice(first, first + len(row.target_ids))
        first = part.stop
        if not np.isfinite(logprobs[part]).all():
            results[index] = RowResult(error=NON_FINITE)
            continue
        scored = {"target_logprobs": tuple(logprobs[part]), "target_argmax": tuple(best[part])}
        target_tops = tuple(tops[part]) if row.num_top_targets else ()
        results[index] = replace(results[index], **scored, target_tops=target_tops)


def pooled_result(total: npt.NDArray[np.float64]) -> RowResult:
    """Of the sum [hidden_size] of a row's hidden states."""
    if not np.isfinite(total).all():
        return RowResult(error=NON_FINITE_STATES)
    return RowResult(pooled=total)
