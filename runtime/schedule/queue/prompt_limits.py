"""How many tokens of which prompts a step takes while other requests decode.

A chunk makes the step longer for every request in it, and one that decodes waits a step for each
token. A short prompt does that once. A long one would do it for many steps, so beside decode rows
its chunks are kept so small that a step takes at most `slowdown` times what the decode rows alone
take. (Sarathi-Serve, Agrawal et al., OSDI 2024, chooses such a budget by profiling; here it follows
from the steps' own times, on any device, with any model.) Work is not lost: where the arithmetic is
the limit, a token costs the same in a small chunk. Where prompts never end, a step without any is
made now and then (`StepCosts.take_trial`), or nobody would know what the decode rows alone take.

Under policy `program`, prompts of programs that have had more service than one of those that decode
are kept within `LEVEL_SLOWDOWN` likewise, however short: else a program with many parallel calls
would slow down every token of a short one.

An encoder's step is as long as its texts, and whoever comes next waits for it. So a step is full
with the text with which it is expected to take `TEXT_STEP_S`: what larger ones would save is little
(docs/use/embeddings.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..request import Request
from .policy import level_of
from .step_costs import StepCosts

DEFAULT_SLOWDOWN = 1.6  # below 2, so that noise does not carry the 99th percentile past it
_LEAST_STAGE_TOKENS = 256  # with fewer a token of a prompt takes longer (guess)
LEVEL_SLOWDOWN = 1.6  # by prompts of programs that have had more service
LATE_LEVELS = 1  # of service between a prompt and a decode row, from which on the prompt gives way
TEXT_STEP_S = 0.25  # of an encoder
MIN_TEXT_TOKENS = 256  # of such a step: what each product and each step costs by itself is shared
_MIN_CHUNK = 8  # tokens


class PromptLimits:
    """Owns what the step that is being planned may still take of long prompts and of late programs'
    prompts. Invariant: a step without decode rows and whole texts has no limit but its token
    budget."""

    def __init__(
        self, costs: StepCosts, page_size: int, slowdown: float = DEFAULT_SLOWDOWN
    ) -> None:
        """`slowdown` >= 1 by long prompts, or 0: no limit."""
        self._costs = costs
        self._page_size = page_size
        self.slowdown = slowdown
        self._token_budget = 0
        self._long: int | None = None  # tokens; None: no limit
        self._late: int | None = None
        self._texts = MIN_TEXT_TOKENS  # that are whole; one more fits while any are left
        self._level = 0  # the least of the programs that decode

    def begin_step(
        self,
        token_budget: int,
        decoding: Sequence[Request],
        *,
        by_level: bool,
        num_stages: int = 1,
    ) -> None:
        """A step is being planned; these rows wait for it, spread over the stages of a pipeline;
        `by_level`: programs' levels count."""
        self._token_budget = token_budget
        num_rows = -(-len(decoding) // num_stages)
        self._long = self.within(self.slowdown, num_rows) if decoding else None
        self._late = None
        token_s = self._costs.prompt_token_s
        self._texts = (
            max(MIN_TEXT_TOKENS, int(TEXT_STEP_S / token_s)) if token_s else MIN_TEXT_TOKENS
        )
        if decoding and by_level:
            self._level = min(map(level_of, decoding))
            self._late = self.within(LEVEL_SLOWDOWN, num_rows)

    def within(self, slowdown: float, num_rows: int) -> int | None:
        """Prompt tokens beside so many decode rows with which a step takes at most `slowdown` times
        what the decode rows alone take; None: no limit, also while a cost is unknown."""
        decode_s, token_s = self._costs.decode_rows_s(num_rows), self._costs.prompt_token_s
        if not slowdown or decode_s is None or not token_s:
            return None
        return max(_MIN_CHUNK, int((slowdown - 1.0) * decode_s / token_s))

    def take_trial(self, num_rows: int, *, by_level: bool) -> bool:
        """Whether the step should have no prompts beside its decode rows, for the limits' sake."""
        return bool(self.slowdown or by_level) and self._costs.take_trial(num_rows)

    @property
    def num_left(self) -> int:
        """Tokens of long prompts that the step may still take."""
        return self._token_budget if self._long is None else self._long

    def max_chunk(self, request: Request, budget: int) -> int:
        """What is left of `budget` for a request's prompt; for a whole text all of it, or none."""
        if request.encoding is not None and self._texts <= 0:
            return 0
        if self._long is not None and self._is_long(request):
            budget = min(budget, self._long)
        if self._late is not None and self._is_late(request):
            budget = min(budget, self._late)
        return max(budget, 0)

    def take(self, request: Request, budget: int) -> int:
        """How many tokens of a request the step computes: all that are ready, or what `budget` and
        the limits leave, then in whole pages if it can; 0 where other prompts have taken it all."""
        num_tokens = min(request.num_ready, self.max_chunk(request, budget))
        if num_tokens < request.num_ready:
            start = request.num_scheduled_tokens
            aligned = start + num_tokens - (start + num_tokens) % self._page_size
            if aligned > start:
                num_tokens = aligned - start
        if request.compaction is not None and num_tokens < request.min_chunk:
            # Its last chunk is small, and computed whole, whatever else is decoded.
            num_tokens = request.min_chunk if request.min_chunk <= budget else 0
        if self._long is not None and self._is_long(request):
            self._long -= num_tokens
        if self._late is not None and self._is_late(request):
            self._late -= num_tokens
        if request.encoding is not None:
            self._texts -= num_tokens
        return num_tokens

    def _is_late(self, request: Request) -> bool:
        if request.num_scheduled_tokens >= request.num_prompt_tokens:
            return False
        return level_of(request) >= self._level + LATE_LEVELS

    def _is_long(self, request: Request) -> bool:
        """Whether a request's prompt, but for what was cached, fills more than half a step; a
        forced run behind it counts as decoding."""
        if request.num_scheduled_tokens >= request.num_prompt_tokens:
            return False
        if request.is_admitted:
            num_uncached = request.num_tokens - request.num_cached_tokens
        else:
            num_uncached = request.num_missing
        return num_uncached > self._token_budget // 2


def share_of_stage(token_budget: int, num_stages: int, max_running_requests: int) -> int:
    """Tokens a step, so that a prompt of one step's budget keeps all stages busy for most of the
    time that it takes: of m chunks through p stages (p - 1) / (m + p - 1) is lost. But as many as
    requests may decode in one: those that no plan has room for would wait for others to end."""
    if num_stages == 1:
        return token_budget
    num_decoding = -(-max_running_requests // num_stages)
    least = max(_LEAST_STAGE_TOKENS, num_decoding)
    return min(token_budget, max(least, token_budget // (2 * num_stages)))
