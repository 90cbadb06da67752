"""A request's grammar as the scheduler sees it: pending, then followed token by token.

Another process compiles a grammar (`compiler_service.py`), once for all requests with the same one.
Each output follows it with its own matcher. Tokens that must follow whatever the model says are
appended at once (jump-forward; SGLang's compressed finite state machine, arXiv:2312.07104, section
3.3), or, switched off, sampled one by one with nothing else allowed: the output is the same.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ..matcher import BoundGrammar, Mask, Matcher
from .follower import FollowedGrammar, Follower, allow

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GrammarFailure:
    """Why there is no grammar; `kind` names the class of the error."""

    message: str
    kind: str = "InvalidGrammar"


@dataclass(slots=True, eq=False)
class PendingGrammar:
    """A requested grammar: neither field is set while it is compiled, then one of them."""

    bound: BoundGrammar | FollowedGrammar | None = None
    failure: GrammarFailure | None = None
    schema: str | None = None  # of a lenient one: outputs must be validated against it

    @property
    def is_done(self) -> bool:
        """Whether compilation has succeeded or failed."""
        return self.bound is not None or self.failure is not None

    def follower(self, jump_forward: bool, stop_ids: frozenset[int]) -> Follower:
        """The state of one output, at its start."""
        assert self.bound is not None, "the grammar is not there"
        if isinstance(self.bound, FollowedGrammar):
            return self.bound.follower(jump_forward, stop_ids)
        return GrammarState(self.bound.matcher(), jump_forward, stop_ids)


class GrammarState:
    """One output's progress through a grammar that is followed here, by a matcher."""

    is_local = True
    is_ready = True

    def __init__(self, matcher: Matcher, jump_forward: bool, stop_ids: frozenset[int]) -> None:
        """`stop_ids` may come where the grammar lets the output end."""
        self._matcher = matcher
        self._jump_forward = jump_forward
        self._stop_ids = stop_ids
        self._forced: deque[int] = deque()
        self._fault: str | None = None

    @property
    def is_finished(self) -> bool:
        return self._guarded(self._matcher.is_finished, False)

    @property
    def error(self) -> str | None:
        return self._fault or self._guarded(self._matcher.error, None) or self._fault

    def consume(self, token_id: int) -> bool:
        if not self._guarded(partial(self._matcher.consume, token_id), False):
            return False
        if self._forced:
            forced = self._forced.popleft()
            assert forced == token_id, f"token {token_id} where {forced} is forced"
        return True

    def forced_run(self) -> Sequence[int]:
        return self._guarded(self._matcher.forced_tokens, ()) if self._jump_forward else ()

    def mask(self, out: Mask) -> None:
        self._guarded(partial(self._mask, out), None)
        if self._fault:
            out.fill(0)

    def expect(self, tokens: Sequence[int]) -> None:
        pass

    def look_ahead(self) -> GrammarState:
        return _StateAhead(self._matcher, self._jump_forward, self._stop_ids, self._forced)

    def fork(self) -> GrammarState:
        other = GrammarState(self._matcher.fork(), self._jump_forward, self._stop_ids)
        other._forced, other._fault = self._forced.copy(), self._fault
        return other

    def close(self) -> None:
        pass

    def _mask(self, out: Mask) -> None:
        if not self._jump_forward:
            if not self._forced:
                self._forced.extend(self._matcher.forced_tokens())
            if self._forced:
                out.fill(0)
                return allow(out, (self._forced[0],))
        self._matcher.mask(out)
        if self._matcher.is_accepting():
            allow(out, self._stop_ids)

    def _guarded(self, verb: Callable[[], T], otherwise: T) -> T:
        try:
            return verb()
        except Exception as error:
            log.exception("a matcher failed")
            self._fault = f"the matcher failed: {type(error).__name__}: {error}"
            return otherwise


class _StateAhead(GrammarState):
    """A state that goes on with another one's matcher, and takes it back when it is closed."""

    def __init__(
        self,
        matcher: Matcher,
        jump_forward: bool,
        stop_ids: frozenset[int],
        forced: deque[int],
    ) -> None:
        super().__init__(matcher, jump_forward, stop_ids)
        self._forced.extend(forced)
        self._num_ahead = 0

    def consume(self, token_id: int) -> bool:
        if self._forced and token_id != self._forced[0]:
            return False
        is_taken = super().consume(token_id)
        self._num_ahead += is_taken
        return is_taken

    def close(self) -> None:
        self._matcher.rollback(self._num_ahead)
        self._num_ahead = 0
