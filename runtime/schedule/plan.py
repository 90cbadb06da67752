"""What the host half asks of the device half, and what comes back: plain data, no torch.

The scheduler hands over a `StepPlan`; the executor returns a `StepResult` whose rows answer the
plan's rows one to one. Nothing else crosses between the two halves, so each is tested without the
other, and every tensor-parallel rank can be sent the same plan.

    one row's tokens:   0 ........ start ................ start + len(input_ids)
                        |  KV is there  |  computed in this step  |

Rows are named tuples: one is made for each token that is decoded, in a third of the time that a
frozen dataclass takes.

A row's KV is stored before attention within each layer, and a row may read pages that another row
of the same plan writes (a shared prompt computed once): rows therefore must all store first.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..memory.copies import TierCopy
from ..memory.disk.block_file import Payload
from .sampling_params import SamplingParams


class PageUpdate(NamedTuple):
    """New entries of a row's page table: `pages[i]` becomes entry `first + i`."""

    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Adjustment:
    """What changes a row's logits before sampling, besides the penalties of its SamplingParams.

    `output_ids` lacks the token that `from_previous` stands for; the executor knows it.
    """

    prompt_ids: array[int]  # 'i'; the prompt's tokens, each once; none without repetition penalty
    bias_ids: array[int]  # 'i', distinct
    bias_values: array[float]  # 'd', one for each of bias_ids
    output_ids: array[int]  # 'i'; sampled before this step
    masked_ids: tuple[int, ...] = ()  # not to be sampled in this step


class Row(NamedTuple):
    """One request's share of a step.

    `table_row` names the row of the executor's page table [max_running_requests, max_pages]; it
    belongs to the request from its admission to its end or preemption, and only changes travel
    (`page_update`). `input_ids` are the tokens at positions `start, start + 1, ...`.
    `from_previous`, when set, is the index of the row in the previous plan whose sampled token is
    this row's one input; `input_ids` then holds one placeholder 0.
    """

    request_id: int
    table_row: int
    start: int
    input_ids: tuple[int, ...]
    page_update: PageUpdate | None = None
    from_previous: int | None = None
    sampling: SamplingParams | None = None  # set: sample one token after the last input
    adjustment: Adjustment | None = None  # set: change the logits before sampling
    target_ids: tuple[int, ...] = ()  # score these: target_ids[i] against the logits at ...
    target_start: int = 0  # ... input index target_start + i
    mask: int | None = None  # set: sample only tokens of this row of the plan's masks
    pooled_from: int | None = None  # set: sum the final hidden states from this input on
    num_top_targets: int = 0  # so many of the best tokens are told beside each target
    adapter: int = 0  # slot of the adapter that its tokens go through; 0: none


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """KV that consecutive rows have in common: tokens [token_start, token_end) of the rows
    [row_start, row_end), in the same pages for each of them (read off the first one's table).

    All of it lies before the first input of each row. Attention over it may be computed once.
    """

    token_start: int
    token_end: int
    row_start: int
    row_end: int

    @property
    def num_saved_tokens(self) -> int:
        """Tokens of KV that the rows would read without the segment, and do not with it."""
        return (self.token_end - self.token_start) * (self.row_end - self.row_start - 1)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: rows in depth-first order of the radix tree, and the segments that they share.

    A plan may have transfers and no rows.

    Segments may be nested; the outermost come first, and those of a row follow each other from
    token 0 on without a gap.
    """

    step_id: int
    rows: tuple[Row, ...]
    segments: tuple[SharedSegment, ...] = ()
    # [num_masked_rows, ceil(vocab_size / 32)] uint32: bit i % 32 of word i // 32 allows token i.
    # NOTE: a mask needs the token before it, so a masked row never has `from_previous`.
    masks: npt.NDArray[np.uint32] | None = field(default=None, compare=False)
    # NOTE: to be made in their order, before the rows are computed.
    transfers: tuple[TierCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, over all rows."""
        return sum(len(row.input_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token id with its log probability (natural log, at temperature 1, before truncation)."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class RowResult:
    """What came of a row. `error` is set when this row alone failed (non-finite logits)."""

    token_id: int | None = None
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
    target_logprobs: tuple[float, ...] = ()
    target_argmax: tuple[int, ...] = ()  # the best token at each scored position
    # [hidden_size]: the sum that `pooled_from` asked for, of normed states as the head sees them
    pooled: npt.NDArray[np.float64] | None = field(default=None, compare=False)
    target_tops: tuple[tuple[TokenLogprob, ...], ...] = ()  # the same, the best few
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Answers to a plan's rows, in their order."""

    step_id: int
    rows: tuple[RowResult, ...]
    # Of computing, where that is known; the time that a step waited for the one before is none.
    duration_s: float | None = None
    transfer_s: float | None = None  # of the transfers before
    payloads: tuple[Payload, ...] = ()  # of the plan's BlockSaves, in their order


class PendingStep(Protocol):
    """A step that the executor has taken on, and may still be computing."""

    def result(self) -> StepResult:
        """Waits until it is done; called once, and in the order of the steps. Raises what went
        wrong with the step as a whole: what was submitted behind it is then of no use."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was computed when it was submitted."""

    outcome: StepResult

    def result(self) -> StepResult:
        """The answers."""
        return self.outcome


@dataclass(frozen=True, slots=True)
class FailedStep:
    """A step that could not be submitted."""

    error: Exception

    def result(self) -> StepResult:
        """Raises what was wrong."""
        raise self.error
