"""One call as the scheduler sees it: its tokens, how far their KV is computed, and how it ended."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ..images.image import ImageSpan
from .plan import Adjustment, Encoding, RowResult, StreamedKV, TokenLogprob
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from ...constrained.serving.follower import Follower
    from ...constrained.serving.grammar_state import PendingGrammar
    from ...radix.leases import Lease
    from ...radix.tree import Node
    from ..checkpoint.lora.adapter import Adapter
    from ..memory.peers.wire import StreamKey
    from .compression import Compaction, CompressedPrefix, Recompression
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
    """A request's owner; called between steps, when it may submit and abort other requests."""

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        """A token was appended; a returned reason ends the request."""

    def on_finish(self, request: Request) -> None:
        """The request has ended; called exactly once."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """Score `targets[i]` against the logits at position `start + i`; nothing is sampled. Reports
    the `num_top` top tokens beside each."""

    start: int
    targets: tuple[int, ...]
    num_top: int = 0


@dataclass(slots=True, eq=False)
class HiddenSum:
    """The final hidden states for a request's embedding: of its last token, or of all tokens,
    summed as their chunks are computed. Nothing is sampled.

    Invariant: with `is_mean`, `total` is over the first `num_tokens` tokens. It outlives a
    preemption: tokens computed again are not summed again.
    """

    is_mean: bool
    num_tokens: int = 0
    total: npt.NDArray[np.float64] | None = None  # [hidden_size]

    def first_wanted(self, start: int, end: int, num_tokens: int) -> int | None:
        """The first of the inputs [start, end), counted from `start`, that a step is to sum, for a
        request of `num_tokens`; None: no input."""
        first = self.num_tokens if self.is_mean else num_tokens - 1
        return max(first - start, 0) if first < end else None

    def add(self, part: npt.NDArray[np.float64], end: int) -> None:
        """Add the sum over a chunk that ends at `end`."""
        self.total = part if self.total is None else self.total + part
        self.num_tokens = end

    def pooled(self) -> npt.NDArray[np.float64]:
        """The result, once all tokens are computed."""
        assert self.total is not None, "nothing was computed"
        return self.total / self.num_tokens if self.is_mean else self.total


class Beam(Protocol):
    """A beam search as its requests see it (`beams.BeamGroup`)."""

    @property
    def leader(self) -> Request:
        """The request that stands for the call."""

    @property
    def num_best(self) -> int:
        """How many of a hypothesis's next tokens may be of use."""

    def report(self, request: Request, best: tuple[TokenLogprob, ...]) -> None:
        """A request has computed its last token."""

    def has_reported(self, request: Request) -> bool:
        """Whether it has nothing to do until all others have."""

    def forget(self, request: Request) -> None:
        """What a request has reported may be wrong: it computes again."""


@dataclass(slots=True, eq=False)
class KVStream:
    """A prompt's KV from token `first` on, on its way to the engine that has asked for it."""

    key: StreamKey
    first: int
    on_proved: Callable[[int], None]  # the KV of so many tokens is right, and was sent
    num_sent: int = 0  # tokens before the next to be sent, once any was
    num_proved: int = 0

    def take(self, end: int, pages: array[int], page_size: int) -> StreamedKV | None:
        """What a step that computes the tokens before `end` is to send."""
        start = max(self.first, self.num_sent)
        if end <= start:
            return None
        self.num_sent = end
        in_pages = pages[start // page_size : -(-end // page_size)]
        return StreamedKV(self.key, start, end, in_pages)

    def prove(self, end: int) -> None:
        """The step that computed the tokens before `end` has succeeded."""
        self.num_proved = end
        if end > self.first:
            self.on_proved(end)

    def begin_again(self) -> None:
        """What was sent since the last proof may be wrong."""
        self.num_sent = self.num_proved


@dataclass(slots=True, eq=False)
class Request:
    """A request's tokens are `prompt`, then those sampled or forced by its grammar; KV of the first
    `num_computed_tokens` of them is in `pages`. While its grammar, or what the grammar allows next,
    is on its way, all but the last token may be computed.

    Invariant: num_computed_tokens <= num_scheduled_tokens <= num_tokens + 1; the two are equal
    unless plans in flight compute the tokens between (schedule/in_flight.py) and sample the one
    beyond. `pages[: num_published / page_size]` belong to the tree, the rest to the request;
    num_published <= num_scheduled_tokens, unless tokens are computed again for their state alone.
    """

    id: int
    prompt: array[int]  # 'i'
    sampling: SamplingParams
    listener: Listener
    namespace: Hashable = ""  # of its KV; an adapter has its own
    adapter: Adapter | None = None  # applied to its tokens
    client: Hashable = ""  # output length is predicted by client (queue/policy.py)
    priority: int = 0  # in [-1000, 1000]; higher runs first, under the policy of that name
    program: ProgramRecord | None = None  # that made the call, if known
    deadline_s: float | None = None  # by time.perf_counter(): when its output must be there
    scoring: Scoring | None = None
    hidden: HiddenSum | None = None  # set: compute an embedding
    encoding: Encoding | None = None  # set: an encoder computes it, whole and in one step
    vector: npt.NDArray[np.float64] | None = None  # that the encoder has made
    images: tuple[ImageSpan, ...] = ()  # among the prompt's tokens
    stop_ids: frozenset[int] = frozenset()  # tokens that end it: stop tokens, and EOS
    grammar: PendingGrammar | None = None  # that the output must match
    prediction: array[int] = field(default_factory=lambda: array("i"))  # of the output; see drafter
    # What the output is known to begin with, since it began elsewhere: not what is drawn there.
    begun: array[int] = field(default_factory=lambda: array("i"))
    history: Hashable = ""  # whose texts may be its drafts
    op_key: Hashable = None  # the op of a function that made it; None: not known
    jump_forward: bool = True  # append forced tokens at once, not one by one
    beam: Beam | None = None  # the search one of whose hypotheses it computes
    is_ahead: bool = False  # nobody has asked for it yet
    stream: KVStream | None = None  # set: another engine has asked for its KV
    shared_ends: tuple[int, ...] = ()  # where other calls are known to part from its prompt
    compressed: CompressedPrefix | None = None  # with which the prompt begins
    compaction: Compaction | None = None  # set: it makes a compressed prefix of its prompt
    recompression: Recompression | None = None  # set: it goes on from fewer tokens at times
    text_ids: array[int] | None = None  # of the prompt, where `compressed` stands for some of them

    max_output_tokens: int = 0  # sampling.max_tokens, cut to what fits; 0 if it does not sample
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_kind: str = "EngineError"  # the class of `error`
    follower: Follower | None = None  # the output's state in its grammar, once compiled
    token_ids: array[int] = field(default_factory=lambda: array("i"))  # prompt, then output
    earlier: array[int] = field(default_factory=lambda: array("i"))  # output, in `prompt` by now
    num_computed_tokens: int = 0  # by steps whose results are in
    num_scheduled_tokens: int = 0  # these plus those of plans in flight: the next plan starts here
    # Prompt tokens not computed for it by its first admission; of a compressed prefix all that it
    # stands for.
    num_cached_tokens: int = 0
    is_admitted: bool = False  # has run at least once
    is_followed: bool = True  # by the draft model, see `Row`; decided when it runs first
    num_to_compress: int = 0  # tokens computed to make its compressed prefix
    num_host_tokens: int = 0  # of the cached ones: loaded from the host tier
    num_disk_tokens: int = 0  # of the cached ones: loaded from the disk tier
    num_forced_tokens: int = 0  # of the output: forced by its grammar, not sampled
    num_drafted_tokens: int = 0  # guesses that were verified
    num_accepted_tokens: int = 0  # of these: were right
    num_accepted_prediction: int = 0  # of these: from `prediction`
    num_rejected_prediction: int = 0  # guesses from `prediction` that were wrong
    num_preemptions: int = 0
    num_calls_after: int = 0  # calls of its program known to follow this one in sequence
    evicted: dict[str, int] = field(default_factory=dict)  # tokens evicted for it, by their owner

    # Owned by KVCacheManager while running.
    pages: array[int] = field(default_factory=lambda: array("i"))
    node: Node | None = None
    num_published: int = 0
    copied_end: int = 0  # of the tokens copied into its own first page; 0: none were
    num_sent_pages: int = 0  # leading entries of `pages` that the executor's table has
    table_row: int = -1
    adapter_slot: int = 0  # while it runs, if it has an adapter
    lease: Lease | None = None  # keeps its KV while it is preempted
    # Of a model with recurrent layers (cache/state_cache.py):
    state_slot: int = 0  # of its live state; 0: none
    branch_at: int = 0  # where its KV was cached and its state was not; 0: nowhere

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
            self._adjustment = _adjustment_of(self.text_ids or self.prompt, self.sampling)

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
        """Tokens that may be computed now: without the last one while it `awaits_grammar`."""
        return len(self.token_ids) - self.awaits_grammar

    @property
    def awaits_grammar(self) -> bool:
        """Whether its grammar, or its output's position in it, is on its way."""
        return self.grammar is not None and (self.follower is None or not self.follower.is_ready)

    @property
    def num_ready(self) -> int:
        """Those of them that no plan computes yet: 1 while it decodes; below 1 while its next token
        is being sampled."""
        num_ready = len(self.token_ids) - self.num_scheduled_tokens
        return num_ready if self.grammar is None else num_ready - self.awaits_grammar

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that came with the request."""
        return len(self.prompt)

    @property
    def num_dropped(self) -> int:
        """Tokens of its text that are not among `token_ids`, since their KV is not kept."""
        return 0 if self.compressed is None else self.compressed.num_dropped

    @property
    def num_text_tokens(self) -> int:
        """Of the prompt that it came with, and of what that stood for."""
        return len(self.prompt) + self.num_dropped - len(self.earlier)

    @property
    def rope_shift(self) -> int:
        """What is added to the positions of tokens that are no image's, nor behind any."""
        return 0 if self.compressed is None else self.compressed.rope_shift

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.earlier) + len(self.token_ids) - len(self.prompt)

    @property
    def num_new_tokens(self) -> int:
        """Tokens that may still be sampled."""
        return max(0, self.max_output_tokens - self.num_output_tokens)

    @property
    def num_growing_tokens(self) -> int:
        """By how many tokens it may become longer before it goes on from fewer, or ends."""
        if self.recompression is None:
            return self.num_new_tokens
        return min(self.num_new_tokens, self.recompression.num_more)

    @property
    def output_ids(self) -> array[int]:
        """Tokens sampled so far."""
        return self.earlier + self.token_ids[len(self.prompt) :]

    @property
    def program_key(self) -> Hashable:
        """The number of the program that made the call; None: not known."""
        return None if self.program is None else self.program.number or None

    @property
    def samples(self) -> bool:
        """Whether it generates tokens."""
        return self.scoring is None and self.hidden is None and self.encoding is None

    @property
    def min_chunk(self) -> int:
        """The fewest of its next tokens that a step may compute."""
        if self.encoding is not None:
            return self.num_missing
        compaction = self.compaction
        is_last = (
            compaction is not None
            and compaction.has_queries
            and self.num_scheduled_tokens >= compaction.first_observed
        )
        return self.num_tokens - self.num_scheduled_tokens if is_last else 1

    @property
    def is_call(self) -> bool:
        """Whether a program asked for it: of a beam search's requests only the first, none that
        another engine's program waits for, and none that makes a compressed prefix, or computes
        what a program may ask for."""
        if self.stream is not None or self.compaction is not None or self.is_ahead:
            return False
        return self.beam is None or self.beam.leader is self

    @property
    def is_finished(self) -> bool:
        """Whether a finish reason is set."""
        return self.finish_reason is not None

    @property
    def match_limit(self) -> int:
        """At most this many tokens may come from the cache: the rest is needed for logits or hidden
        states."""
        if self.encoding is not None:
            return 0
        if self.scoring is not None:
            return self.scoring.start + len(self.scores)
        if self.hidden is not None and self.hidden.is_mean:
            return self.hidden.num_tokens
        return self.num_tokens - 1

    @property
    def adjustment(self) -> Adjustment | None:
        """The changes to the logits of the next token, if any."""
        return self.adjustment_after(0)

    def adjustment_after(self, num_unknown: int) -> Adjustment | None:
        """The same for the token `num_unknown` tokens later, whatever those will be."""
        if self._adjustment is None:
            return None
        is_early = self.num_output_tokens + num_unknown < self.sampling.min_tokens
        if not is_early and not self.sampling.changes_logits:
            return None
        return self._adjustment_behind(self.output_ids, is_early)

    def adjustments_behind(
        self, drafts: Sequence[int], at: Iterable[int]
    ) -> tuple[Adjustment, ...]:
        """The same for the tokens behind the first `at` of these drafts; none if none changes the
        logits."""
        if self.adjustment is None:
            return ()
        output = self.output_ids
        outputs = [output + array("i", drafts[:end]) for end in at]
        least = self.sampling.min_tokens
        return tuple([self._adjustment_behind(each, len(each) < least) for each in outputs])

    def _adjustment_behind(self, output: array[int], is_early: bool) -> Adjustment:
        assert self._adjustment is not None
        masked = tuple(self.stop_ids) if is_early else ()
        return replace(self._adjustment, output_ids=output, masked_ids=masked)

    def append_token(self, token_id: int) -> None:
        """Add a sampled or forced token."""
        self.note_first_token()
        self.token_ids.append(token_id)

    def begin_with(self, prefix: CompressedPrefix, num_replaced: int) -> None:
        """Have a compressed prefix stand for the first `num_replaced` tokens. It does not run."""
        assert self.state is not RequestState.RUNNING
        self.earlier = self.output_ids
        self.prompt = prefix.ids + self.token_ids[num_replaced:]
        self.token_ids = self.prompt[:]
        self.compressed = prefix

    def note_first_token(self) -> None:
        """Note that a token was sampled, even one that only ends the request."""
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter()


def _adjustment_of(prompt: array[int], params: SamplingParams) -> Adjustment:
    """The part that is the same in all of a request's steps, built once."""
    prompt_ids = {t for t in set(prompt) if t >= 0} if params.has_repetition_penalty else ()
    return Adjustment(
        prompt_ids=array("i", prompt_ids),
        bias_ids=array("i", (token_id for token_id, _ in params.logit_bias)),
        bias_values=array("d", (value for _, value in params.logit_bias)),
        output_ids=array("i"),
    )
