"""One call as the scheduler sees it: tokens, how far their KV is computed, and how it ended."""

from __future__ import annotations

import time
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from .plan import Adjustment, RowResult, TokenLogprob
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from ...constrained.serving.grammar_state import GrammarState, PendingGrammar
    from ...radix.leases import Lease
    from ...radix.tree import Node
    from ..checkpoint.lora.adapter import Adapter
    from .program_record import ProgramRecord


class RequestState(Enum):
    """waiting -> running -> finished; a preempted request waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    """Each request ends with exactly one of these."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Listener(Protocol):
    """Who asked for a request; called between steps, and free to submit and abort others then."""

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        """A token was appended; a reason ends the request."""

    def on_finish(self, request: Request) -> None:
        """The request has ended; called exactly once."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """Score `targets[i]` against the logits at position `start + i`; nothing is sampled. Beside
    each the `num_top` best tokens are told."""

    start: int
    targets: tuple[int, ...]
    num_top: int = 0


@dataclass(slots=True, eq=False)
class HiddenSum:
    """The final hidden states that a request's embedding is made of: of its last token, or of all
    of them, summed as their chunks are computed. Nothing is sampled.

    Invariant: with `is_mean`, `total` is of the first `num_tokens` tokens. It outlives a
    preemption: what is computed again is not summed again.
    """

    is_mean: bool
    num_tokens: int = 0
    total: npt.NDArray[np.float64] | None = None  # [hidden_size]

    def first_wanted(self, start: int, end: int, num_tokens: int) -> int | None:
        """From which of the inputs [start, end) of a request of `num_tokens` a step is to sum,
        counted from `start`; None: from none of them."""
        first = self.num_tokens if self.is_mean else num_tokens - 1
        return max(first - start, 0) if first < end else None

    def add(self, part: npt.NDArray[np.float64], end: int) -> None:
        """The sum over a chunk that ends at `end`."""
        self.total = part if self.total is None else self.total + part
        self.num_tokens = end

    def pooled(self) -> npt.NDArray[np.float64]:
        """What was asked for, once all tokens are computed."""
        assert self.total is not None, "nothing was computed"
        return self.total / self.num_tokens if self.is_mean else self.total


@dataclass(slots=True, eq=False)
class Request:
    """A request's tokens are `prompt` and what was sampled, or followed from its grammar; KV of the
    first `num_computed_tokens` of them is in `pages`. Until the grammar is there, all but the last
    token may be computed.

    Invariant: num_computed_tokens <= num_scheduled_tokens <= num_tokens + 1; the two are equal
    unless plans in flight compute what lies between (schedule/in_flight.py), and the one token
    beyond is sampled by them. num_published <= num_scheduled_tokens, and
    `pages[: num_published / page_size]` belong to the tree, the rest to the request.
    """

    id: int
    prompt: array[int]  # 'i'
    sampling: SamplingParams
    listener: Listener
    namespace: Hashable = ""  # of its KV: an adapter's is its own
    adapter: Adapter | None = None  # that its tokens go through
    client: Hashable = ""  # whose habits tell what it will generate (queue/policy.py)
    priority: int = 0  # in [-1000, 1000]; higher runs first, under the policy of that name
    program: ProgramRecord | None = None  # whose call it is, where that is known
    deadline_s: float | None = None  # by time.perf_counter(): when its output must be there
    scoring: Scoring | None = None
    hidden: HiddenSum | None = None  # set: an embedding is asked for
    stop_ids: frozenset[int] = frozenset()  # tokens that end it: stop tokens, and EOS
    grammar: PendingGrammar | None = None  # what the output must be
    jump_forward: bool = True  # append what is forced at once, not token by token

    max_output_tokens: int = 0  # sampling.max_tokens, cut to what fits; 0 when nothing is
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_kind: str = "EngineError"  # the class of `error`
    follower: GrammarState | None = None  # where the output is in its grammar, once that is there
    token_ids: array[int] = field(default_factory=lambda: array("i"))  # prompt, then output
    num_computed_tokens: int = 0  # by steps whose results are in
    num_scheduled_tokens: int = 0  # by these and by the plans in flight: the next one goes on here
    num_cached_tokens: int = 0  # prompt tokens that needed no computing, at the first admission
    is_admitted: bool = False  # was running at least once
    num_host_tokens: int = 0  # of the cached ones: loaded from the host tier
    num_disk_tokens: int = 0  # of the cached ones: loaded from the disk tier
    num_forced_tokens: int = 0  # of the output: forced by its grammar, not sampled
    num_preemptions: int = 0
    num_calls_after: int = 0  # of its program: known to follow this one, one after the other
    evicted: dict[str, int] = field(default_factory=dict)  # tokens it displaced, by whose they were

    # Owned by KVCacheManager while running.
    pages: array[int] = field(default_factory=lambda: array("i"))
    node: Node | None = None
    num_published: int = 0
    num_sent_pages: int = 0  # entries of `pages` that the executor's table already has
    table_row: int = -1
    adapter_slot: int = 0  # while it runs, where it has an adapter
    lease: Lease | None = None  # keeps its KV while it is preempted

    _adjustment: Adjustment | None = field(init=False, default=None)  # before any output
    scores: list[float] = field(default_factory=list)
    score_argmax: list[int] = field(default_factory=list)
    score_tops: list[tuple[TokenLogprob, ...]] = field(default_factory=list)  # with num_top
    created_s: float = field(default_factory=time.perf_counter)
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = array("i", self.prompt)
        if self.sampling.changes_logits or self.sampling.min_tokens:
            self._adjustment = _adjustment_of(self.prompt, self.sampling)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return len(self.token_ids)

    @property
    def num_missing(self) -> int:
        """Tokens without KV."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_ready_tokens(self) -> int:
        """Tokens that may be computed now: the last one only when it can be sampled after."""
        is_waiting = self.grammar is not None and self.follower is None
        return len(self.token_ids) - is_waiting

    @property
    def num_ready(self) -> int:
        """Those of them that no plan computes yet: 1 while it decodes; below 1 where its next token
        is being sampled."""
        is_waiting = self.grammar is not None and self.follower is None
        return len(self.token_ids) - is_waiting - self.num_scheduled_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that came with the request."""
        return len(self.prompt)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - len(self.prompt)

    @property
    def num_new_tokens(self) -> int:
        """Tokens that may still be sampled."""
        return max(0, self.max_output_tokens - self.num_output_tokens)

    @property
    def output_ids(self) -> Sequence[int]:
        """Tokens sampled so far."""
        return self.token_ids[len(self.prompt) :]

    @property
    def samples(self) -> bool:
        """Whether it is to generate anything."""
        return self.scoring is None and self.hidden is None

    @property
    def is_finished(self) -> bool:
        """Whether a finish reason is set."""
        return self.finish_reason is not None

    @property
    def match_limit(self) -> int:
        """At most this many tokens may come from the cache: logits, or hidden states, must still be
        computed."""
        if self.scoring is not None:
            return self.scoring.start + len(self.scores)
        if self.hidden is not None and self.hidden.is_mean:
            return self.hidden.num_tokens
        return self.num_tokens - 1

    @property
    def adjustment(self) -> Adjustment | None:
        """What changes the logits of the next token, if anything does."""
        return self.adjustment_after(0)

    def adjustment_after(self, num_unknown: int) -> Adjustment | None:
        """The same for the token that comes so many after it, whatever those will be."""
        if self._adjustment is None:
            return None
        is_early = self.num_output_tokens + num_unknown < self.sampling.min_tokens
        if not is_early and not self.sampling.changes_logits:
            return None
        masked = tuple(self.stop_ids) if is_early else ()
        output = self.token_ids[len(self.prompt) :]
        return replace(self._adjustment, output_ids=output, masked_ids=masked)

    def append_token(self, token_id: int) -> None:
        """A token was sampled, or had to follow."""
        self.note_first_token()
        self.token_ids.append(token_id)

    def note_first_token(self) -> None:
        """A token was sampled, though perhaps one that only ends the request."""
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter()


def _adjustment_of(prompt: array[int], params: SamplingParams) -> Adjustment:
    """What stays the same over a request's steps, built once."""
    prompt_ids = set(prompt) if params.has_repetition_penalty else ()
    return Adjustment(
        prompt_ids=array("i", prompt_ids),
        bias_ids=array("i", (token_id for token_id, _ in params.logit_bias)),
        bias_values=array("d", (value for _, value in params.logit_bias)),
        output_ids=array("i"),
    )
