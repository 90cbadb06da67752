"""One output under a grammar that another process follows, as the scheduler sees it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..matcher import Mask
from .follower import allow
from .positions import Position

_numbers = itertools.count(1)


class PositionSource(Protocol):
    """Who tells an output where it stands: its grammar's process."""

    @property
    def takes_guesses(self) -> bool:
        """Whether it is to be told what an output expects."""

    def ask(self, output: ParsedOutput) -> None:
        """Have `take` called with where the output stands."""

    def forget(self, output: ParsedOutput) -> None:
        """The output has ended."""


class ParsedOutput:
    """The tokens that an output has taken, and where it stands in its grammar.

    A token is allowed by the mask of the position, or is the next of what is forced there; once all
    that is taken, the position is unknown until the process tells the next one, unless it told it
    ahead, as tokens were expected.
    """

    is_local = False

    def __init__(
        self, parser: PositionSource, first: Position, jump_forward: bool, stop_ids: frozenset[int]
    ) -> None:
        """`first`: where outputs begin. `stop_ids` may come where the grammar lets the output
        end."""
        self.number = next(_numbers)
        self.tokens: list[int] = []
        self.is_closed = False
        # The number of the output that it was forked from, and the tokens behind which: what was
        # taken then, and what was forced.
        self.origin: tuple[int, int] | None = None
        self._parser = parser
        self._jump_forward = jump_forward
        self._stop_ids = stop_ids
        self._position: Position | None = first
        self._forced = deque(first.forced)
        self.expected: tuple[int, ...] = ()
        self._ahead: deque[tuple[int, Position]] = deque()
        self._num_losses = 0

    @property
    def is_ready(self) -> bool:
        return self._position is not None

    @property
    def is_finished(self) -> bool:
        return self._position is not None and not self._forced and self._position.is_finished

    @property
    def error(self) -> str | None:
        return None if self._position is None or self._forced else self._position.error

    def consume(self, token_id: int) -> bool:
        assert self._position is not None, f"token {token_id} before the position is known"
        if self._forced:
            if token_id != self._forced[0]:
                return False
            self.tokens.append(self._forced.popleft())
            if self._forced or self._position.mask is not None or self._position.error:
                return True
        elif self._position.allows(token_id):
            self.tokens.append(token_id)
            if self._ahead and self._ahead[0][0] == token_id:
                self._stand_at(self._ahead.popleft()[1])
                return True
        else:
            return False
        self._ahead.clear()
        self._position = None
        self._parser.ask(self)
        return True

    def forced_run(self) -> Sequence[int]:
        return tuple(self._forced) if self._jump_forward else ()

    def mask(self, out: Mask) -> None:
        position = self._position
        assert position is not None, "a mask before the position is known"
        out.fill(0)
        if self._forced:
            allow(out, (self._forced[0],))
        elif position.mask is not None and position.error is None:
            out[:] = np.frombuffer(position.mask, np.uint32)
            if position.is_accepting:
                allow(out, self._stop_ids)

    def resume(self, tokens: Sequence[int]) -> None:
        """Stand behind these tokens, in place of the beginning, as soon as it is told where."""
        self.tokens = list(tokens)
        self._forced.clear()
        self._position = None
        self._parser.ask(self)

    def expect(self, tokens: Sequence[int]) -> None:
        if self._position is None and self._parser.takes_guesses:
            self.expected = tuple(tokens)

    def look_ahead(self) -> ParsedOutput | None:
        if not self._ahead or self._position is None:
            return None
        state = _StateAhead(self._parser, self._position, self._jump_forward, self._stop_ids)
        state._forced, state._ahead = self._forced.copy(), self._ahead.copy()
        return state

    def fork(self) -> ParsedOutput:
        assert self._position is not None, "a fork before the position is known"
        other = ParsedOutput(self._parser, self._position, self._jump_forward, self._stop_ids)
        other.tokens, other._forced = self.tokens[:], self._forced.copy()
        other.origin = self.number, len(self.tokens) + len(self._forced)
        return other

    def close(self) -> None:
        self.is_closed = True
        self._parser.forget(self)

    # --- for the parser -------------------------------------------------------------------------

    def take(self, position: Position) -> None:
        """Where the output stands."""
        self.expected = ()
        self._ahead.extend(position.ahead)
        self._stand_at(position)

    def note_loss(self) -> int:
        """Note that the process ended while it was busy with this output; how often it has."""
        self._num_losses += 1
        return self._num_losses

    def _stand_at(self, position: Position) -> None:
        self._position = position
        self._forced.extend(position.forced)


class _StateAhead(ParsedOutput):
    """The same place, of which only the way that was expected is known."""

    def consume(self, token_id: int) -> bool:
        is_known = self._forced or (self._ahead and self._ahead[0][0] == token_id)
        return bool(is_known) and super().consume(token_id)

    def close(self) -> None:
        pass
