"""What rows have given, taken into their requests: scores, pooled states, and tokens, with those
that a grammar forces behind them."""

from __future__ import annotations

from ...constrained.serving.follower import Follower
from .draft_tree import draws_of, right_drafts
from .plan import Row, RowResult
from .queue.admission import NewTokenEstimate
from .request import FinishReason, Request, RequestState
from .stats import SchedulerStats


class Outputs:
    """Appends to requests and tells their listeners; it ends none, but says why one has ended.

    Invariant: each token is consumed by the request's grammar before it is appended, and is
    appended before the listener hears of it.
    """

    def __init__(self, stats: SchedulerStats, new_tokens: NewTokenEstimate) -> None:
        self._stats = stats
        self._new_tokens = new_tokens

    def take(self, request: Request, row: Row, outcome: RowResult) -> FinishReason | None:
        """Take what the request's row has given; a reason if the request has ended with that."""
        if request.scoring is not None:
            request.scores.extend(outcome.target_logprobs)
            request.score_argmax.extend(outcome.target_argmax)
            request.score_tops.extend(outcome.target_tops)
        if outcome.pooled is not None and request.hidden is not None:
            request.hidden.add(outcome.pooled, request.num_computed_tokens)
        if request.encoding is not None:
            request.vector = outcome.pooled
        if not request.samples:
            is_computed = request.num_computed_tokens == request.num_tokens
            return FinishReason.STOP if is_computed else None
        if outcome.token_id is None:
            return None
        reason = self._append_drawn(request, outcome)
        if row.num_drafts or row.branches:
            reason = self._accept(request, row, outcome, reason)
        return reason

    def _accept(
        self, request: Request, row: Row, outcome: RowResult, reason: FinishReason | None
    ) -> FinishReason | None:
        """Take what was drawn behind drafts, as long as these are what the request has now;
        `reason` is that of the first token. All that turned out right counts as computed."""
        draws, known_end = draws_of(row, outcome), row.known_end
        while reason is None and not request.is_finished:
            right = right_drafts(row, request.token_ids[known_end:])
            drawn = draws.get(right[-1]) if right else None
            if (
                drawn is None
                or drawn.error is not None
                or request.num_tokens != known_end + len(right)
            ):
                break  # an error comes again, as that of a row's first token
            reason = self._append_drawn(request, drawn)
        if request.state is RequestState.RUNNING:
            num_computed = known_end + len(right_drafts(row, request.token_ids[known_end:]))
            if reason is None:  # what follows the last token was not drawn, or has an error
                num_computed = min(num_computed, request.num_tokens - 1)
            request.num_computed_tokens = num_computed
        return reason

    def _append_drawn(self, request: Request, drawn: RowResult) -> FinishReason | None:
        assert drawn.token_id is not None, "nothing was drawn"
        if request.num_output_tokens < len(request.begun):
            drawn = drawn._replace(token_id=request.begun[request.num_output_tokens])
        assert drawn.token_id is not None
        reason = self._append(request, drawn.token_id, drawn)
        if reason is None and request.follower is not None and not request.is_finished:
            reason = self.append_forced(request)
        return reason

    def resume(self, request: Request) -> FinishReason | None:
        """Go on once the follower, if there is one, is ready: begin the output, or take up what the
        last token left open; a reason if the request has ended with that."""
        reason = _reason_behind(request, request.follower) or self._append_begun(request)
        if reason is not None or request.follower is None:
            return reason
        return self.append_forced(request)

    def _append_begun(self, request: Request) -> FinishReason | None:
        """Append what the output is known to begin with, as far as the grammar can be followed at
        once; a reason if that ends the request. Log probabilities come with draws alone, so where
        they are wanted the tokens wait for theirs."""
        follower = request.follower
        if request.sampling.logprobs is not None:
            return None
        for token_id in request.begun[request.num_output_tokens :]:
            reason = self._append(request, token_id, RowResult(token_id=token_id))
            if reason is not None or not (follower is None or follower.is_ready):
                return reason
        return None

    def append_forced(self, request: Request) -> FinishReason | None:
        """Append what must follow, as if it had been sampled; a reason if that ends the request."""
        follower = request.follower
        assert follower is not None, f"request {request.id} follows no grammar"
        while run := follower.forced_run():
            for token_id in run:
                self._stats.num_jumped_tokens += 1
                request.num_forced_tokens += 1
                reason = self._append(request, token_id, RowResult(token_id=token_id))
                if reason is not None:
                    return reason
        return FinishReason.ERROR if note_lost(request) else None

    def _append(self, request: Request, token_id: int, outcome: RowResult) -> FinishReason | None:
        self._stats.num_generated_tokens += 1
        if token_id in request.stop_ids:
            request.note_first_token()
            return FinishReason.STOP
        follower = request.follower
        if follower is not None and not follower.consume(token_id):
            if not note_lost(request):
                request.error = f"token {token_id} does not follow from the grammar"
            return FinishReason.ERROR
        request.append_token(token_id)
        if request.state is RequestState.RUNNING:
            self._new_tokens.num_running -= 1
        reason = request.listener.on_token(request, outcome)
        if reason is None and (follower is None or follower.is_ready):
            return _reason_behind(request, follower)
        return reason


def _reason_behind(request: Request, follower: Follower | None) -> FinishReason | None:
    """Whether the output ends behind its last token, which its grammar may not say at once."""
    if follower is not None and follower.is_finished:
        return FinishReason.STOP
    if request.num_output_tokens >= request.max_output_tokens:
        return FinishReason.LENGTH
    return None


def note_lost(request: Request) -> bool:
    """Whether the request's grammar cannot be followed any further, which is then its error."""
    error = None if request.follower is None else request.follower.error
    if error is None:
        return False
    request.error, request.error_kind = f"the grammar cannot be followed: {error}", "InvalidGrammar"
    return True
