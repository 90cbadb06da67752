"""The interface between the host half and the device half: plain data, no torch.

The scheduler passes a `StepPlan`; the executor returns a `StepResult` with one row for each row of
the plan. Nothing else crosses between the two halves, so each is tested without the other, and
every tensor-parallel rank can be sent the same plan.

    one row's tokens:   0 ........ start ................ start + len(input_ids)
                        |  KV is there  |  computed in this step  |

Rows and their results are named tuples: one is made for each decoded token, in a third of the time
that a frozen dataclass takes.

A row's KV is stored before attention within each layer, and a row may read pages that another row
of the same plan writes (a shared prompt computed once): so all rows must store before any attends.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ...frontend.protocol.kv_policy import KVPolicy
from ..memory.copies import SlotCopy, StateCopy, TierCopy
from ..memory.disk.block_file import Payload
from ..memory.peers.wire import StreamKey
from .sampling_params import SamplingParams

MAX_BRANCH_TOKENS = 64  # of a step's drafts: those of all its branches


class PageUpdate(NamedTuple):
    """New entries of a row's page table: `pages[i]` becomes entry `first + i`."""

    first: int
    pages: Sequence[int]  # of a plan: an array, 'i'; a cached prefix may have a million


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Changes to a row's logits before sampling, besides the penalties of its SamplingParams.

    `output_ids` lacks the token of `from_previous`, which only the executor knows.
    """

    prompt_ids: array[int]  # 'i'; the prompt's distinct tokens; none without repetition penalty
    bias_ids: array[int]  # 'i', distinct
    bias_values: array[float]  # 'd', one for each of bias_ids
    output_ids: array[int]  # 'i'; sampled before this step
    masked_ids: tuple[int, ...] = ()  # not to be sampled in this step


class Encoding(NamedTuple):
    """What an encoder is to make of a whole text, or of a pair of texts."""

    pooling: str = "cls"  # of `ir.POOLINGS`
    has_scores: bool = False  # a score for each label, pooled as its head does
    num_first: int | None = None  # of a pair with types: tokens of the first one


class ImagePart(NamedTuple):
    """The part of an image that a row computes: `length` tokens from input `start` on.

    Positions in its grid are `(base, base + row, base + column)`, its tokens row by row; what is
    behind it goes on at `rope_shift` beyond the tokens' own positions.
    """

    key: int  # of the image's features
    start: int  # index of the first of the row's inputs that is the image's
    length: int
    first: int  # which of the image's tokens that is
    base: int  # where its grid begins
    columns: int  # tokens a row of the grid
    rope_shift: int


class Selection(NamedTuple):
    """What is kept of the KV of a row's tokens, all of them: chosen behind its last input, as the
    policy does, and copied to `pages`, in their order and turned as it is. Without pages the row's
    queries are only looked at: a later one of the request goes on from where it ends."""

    policy: KVPolicy
    pages: array[int] = array("i")  # 'i'; full
    candidates: tuple[tuple[int, int], ...] | None = None  # tokens that may be dropped; None: all


class Branch(NamedTuple):
    """Drafts beside a row's own: a path of the tree of all its drafts.

    The inputs follow token `behind` of the row; its tokens are numbered over its inputs, then over
    those of its branches, in order. They are computed in the same step, as a sequence that begins
    with all up to that token. Their KV goes to the pages that the row's page table has from entry
    `page_at` on, behind all that it can come to need in this step; pages hold one token then.
    """

    behind: int
    input_ids: tuple[int, ...]
    page_at: int
    sampled_at: tuple[int, ...] = ()  # of these inputs, those to sample after; ascending
    adjustments: tuple[Adjustment, ...] = ()  # as a row's
    mask: int | None = None  # as a row's


class Row(NamedTuple):
    """One request's part of a step.

    `table_row` names the row of the executor's page table [max_running_requests, max_pages]; it
    belongs to the request from its admission to its end or preemption, and only changes are sent
    (`page_update`). `input_ids` are the tokens at positions `start, start + 1, ...`.
    `from_previous`, when set, is the index of the row in the previous plan whose sampled token is
    this row's one input; `input_ids` then holds one placeholder 0.

    A row may carry *drafts*, guesses of the tokens that follow, as its last inputs. It then samples
    after several of them: what is sampled after a token counts only if all inputs up to that one
    turned out right, which the scheduler finds out (`schedule/outputs.py`). Drafts may be a tree:
    `branches` are then the paths beside that of the inputs. The pages of those tokens of branches
    that are right by the draws alone become the row's at their positions, in exchange for the pages
    there, in the executor's table, too (`schedule/draft_tree.py`).
    """

    request_id: int
    table_row: int
    start: int
    input_ids: tuple[int, ...]
    page_update: PageUpdate | None = None
    from_previous: int | None = None
    sampling: SamplingParams | None = None  # set: sample a token after the last input
    adjustments: tuple[Adjustment, ...] = ()  # of the logits before each draw; none: unchanged
    target_ids: tuple[int, ...] = ()  # score these: target_ids[i] against the logits at ...
    target_start: int = 0  # ... input index target_start + i
    mask: int | None = None  # set: draw i samples only tokens of row `mask + i` of the plan's masks
    pooled_from: int | None = None  # set: sum the final hidden states from this input on
    num_top_targets: int = 0  # number of top tokens reported beside each target
    adapter: int = 0  # slot of its tokens' adapter; 0: none
    sampled_at: tuple[int, ...] = ()  # inputs to sample after, ascending; none: after the last one
    num_drafts: int = 0  # of the inputs, the last ones: may turn out wrong
    num_best: int = 0  # with `sampling`: report so many of the likeliest tokens (beam search)
    state_slot: int = 0  # of its recurrent state, where the model has one
    kv_start: int = 0  # KV of the inputs before this position is there already: it is kept
    encoding: Encoding | None = None  # set, and the inputs are a whole text: an encoder's row
    # What is added to the inputs' positions to turn them: images before them take fewer, and
    # dropped tokens leave theirs. Up to the first of `images`, each of which says it for what
    # follows.
    rope_shift: int = 0
    num_dropped: int = 0  # tokens of its text that have no place among its inputs' positions
    images: tuple[ImagePart, ...] = ()  # ascending; their inputs are no ids of the vocabulary
    # With `sampling`: so many tokens behind what is drawn are to be guessed by the draft model, for
    # the next plan; there are pages for all but the last.
    num_ahead: int = 0
    is_output: bool = False  # nobody else can use the KV of its inputs before the request ends
    # Whether the draft model, if it has KV of its own, computes that of the inputs, too; else it is
    # known to be missing, and nothing is guessed of the row.
    is_followed: bool = True
    selection: Selection | None = None  # with at least as many inputs as the policy observes
    branches: tuple[Branch, ...] = ()
    num_beside: int = 0  # of each token ahead: so many other candidates, for branches
    # With `num_beside`: the entry of the page table from which on there is a page for each token
    # ahead but the last, for one that is gone on behind in its place; 0: none is.
    expand_at: int = 0

    @property
    def num_tokens(self) -> int:
        """The tokens that it computes."""
        num_tokens = len(self.input_ids)
        if not self.branches:
            return num_tokens
        return num_tokens + sum([len(branch.input_ids) for branch in self.branches])

    @property
    def known_end(self) -> int:
        """The position behind the inputs that are no drafts."""
        return self.start + len(self.input_ids) - self.num_drafts


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """KV that consecutive rows share: tokens [token_start, token_end) of the rows
    [row_start, row_end), in the same pages for each of them (read from the first one's table).

    All of it is before the first input of each row. Attention over it may be computed once.
    """

    token_start: int
    token_end: int
    row_start: int
    row_end: int

    @property
    def num_saved_tokens(self) -> int:
        """How many tokens of KV the segment saves the rows from reading."""
        return (self.token_end - self.token_start) * (self.row_end - self.row_start - 1)


class ImageSource(Protocol):
    """An image to be encoded, as the executor sees it."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""

    def patches(self) -> npt.NDArray[np.float32]:
        """[rows * columns, patch_dim], as the vision tower takes them. Raises for bytes that are
        no image after all."""


@dataclass(frozen=True, slots=True)
class EncodeSlice:
    """So many blocks more of an image's way through the vision tower; behind the last one its
    features are kept as `key`. `source`: with the first slice."""

    key: int
    num_blocks: int
    source: ImageSource | None = field(default=None, compare=False)


class StreamedKV(NamedTuple):
    """KV to be sent to another engine as the step's layers are computed: of a row's tokens
    [start, end), those that are cached among them."""

    key: StreamKey
    start: int
    end: int
    pages: array[int]  # 'i', from that of token `start` on


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: rows in depth-first order of the radix tree, and the segments they share.

    A plan may have copies or images to encode, and no rows.

    Segments may be nested; the outermost come first, and those of a row cover its tokens from 0 on
    without a gap.
    """

    step_id: int
    rows: tuple[Row, ...]
    segments: tuple[SharedSegment, ...] = ()
    # [num_masked_rows, ceil(vocab_size / 32)] uint32: bit i % 32 of word i // 32 allows token i.
    # NOTE: a mask needs the token before it, so a masked row never has `from_previous`.
    masks: npt.NDArray[np.uint32] | None = field(default=None, compare=False)
    # NOTE: to be made in order, before the rows are computed.
    transfers: tuple[TierCopy, ...] = ()
    # Of recurrent states, first of all: (slot, how many of the drafts that its row had in the plan
    # before were right, from 1 on). A row leaves the state behind its inputs that are no drafts.
    state_accepts: tuple[tuple[int, int], ...] = ()
    # Copies of recurrent states, in order: before the rows, between all tiers, and behind them.
    state_loads: tuple[StateCopy, ...] = ()
    state_saves: tuple[SlotCopy, ...] = ()
    dropped_images: tuple[int, ...] = ()  # keys whose features are not needed: before the next
    encodes: tuple[EncodeSlice, ...] = ()  # in order, before the rows are computed
    streams: tuple[StreamedKV, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, over all rows."""
        return sum([row.num_tokens for row in self.rows])


class TokenLogprob(NamedTuple):
    """A token id with its log probability (natural log, at temperature 1, before truncation)."""

    token_id: int
    logprob: float


class SideGuess(NamedTuple):
    """A token that may follow guess `behind` of a row in place of the one that is guessed there.
    Guesses are numbered from 0 on, those `ahead` first; -1: what was drawn."""

    behind: int
    token_id: int
    logprob: float  # as of a TokenLogprob, by the draft model
    rank: int  # so many candidates for the place come before it; 0: it is behind one of these


class RowResult(NamedTuple):
    """The result of a row. `error` is set if only this row failed (non-finite logits).

    `later`: the results after a row's other inputs of `sampled_at`, in order. `branches`: one for
    each of the row's, with that after its first input of `sampled_at`, and `later` of its own.
    """

    token_id: int | None = None
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
    # Beside `logprob`, under a grammar: the logarithm of the model's probability of all that it
    # allows here, at most 0, and whether the model's likeliest token is not among it.
    allowed_logprob: float | None = None
    is_redirected: bool = False
    target_logprobs: tuple[float, ...] = ()
    target_argmax: tuple[int, ...] = ()  # the best token at each scored position
    # [hidden_size]: the sum for `pooled_from`, of normed states as the output projection sees them;
    # [size] of an encoder's row: the vector, or the labels' logits
    pooled: npt.NDArray[np.float64] | None = None
    target_tops: tuple[tuple[TokenLogprob, ...], ...] = ()  # the top tokens at each
    # `num_best` tokens, best first: log-probabilities that the row's adjustment and mask have
    # changed, without making them sum to 1 again; -inf: not allowed
    best: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    later: tuple[RowResult, ...] = ()
    # What the draft model guesses to follow the last token that counts, at most `num_ahead`, each
    # with its log-probability by that model.
    ahead: tuple[TokenLogprob, ...] = ()
    beside: tuple[SideGuess, ...] = ()  # what else it guesses, parents before children
    branches: tuple[RowResult, ...] = ()


class Guessing(NamedTuple):
    """What a draft model did for a step, behind it."""

    seconds: float = 0.0  # of the step's: for the KV of what counts, and to guess ahead ...
    num_passes: int = 0  # ... so many tokens of each row that wanted as many


NO_GUESSES = Guessing()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a plan's rows, in order."""

    step_id: int
    rows: tuple[RowResult, ...]
    # Time of computing, if known; excludes the wait for the previous step.
    duration_s: float | None = None
    transfer_s: float | None = None  # of the transfers before
    payloads: tuple[Payload, ...] = ()  # of the plan's BlockSaves, in order
    state_payloads: tuple[Payload, ...] = ()  # and of its StateSaves
    image_errors: tuple[tuple[int, str], ...] = ()  # keys that have no features, and why
    guessing: Guessing = NO_GUESSES


class PendingStep(Protocol):
    """A step that was submitted to the executor, and may still be computing."""

    def result(self) -> StepResult:
        """Wait until it is done; called once, in the order of the steps. Raises the error of the
        step as a whole: steps submitted after it are then void."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step whose result was computed at submission."""

    outcome: StepResult

    def result(self) -> StepResult:
        """Return the result."""
        return self.outcome


@dataclass(frozen=True, slots=True)
class FailedStep:
    """A step that could not be submitted."""

    error: Exception

    def result(self) -> StepResult:
        """Raises the error of the submission."""
        raise self.error
