"""Grammars that the engine follows while that takes little, and a process from then on.

What a state of an automaton takes to be made is for its grammar to decide, but of most it is next
to nothing: less than to ask another process. So an output begins here, within limits that nobody
who waits for it notices: the steps and bytes of a call (`lazy.py`), and a time for each token. One
that comes to a limit goes on in its grammar's process (`parsers.py`), which follows its tokens
again; so does every output of that grammar that comes to one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from ...errors import EngineError, InvalidGrammar
from ..compiled_grammar import CompiledGrammar
from ..lazy import LIMIT_REACHED
from ..matcher import BoundGrammar, Mask, Path
from .follower import Follower
from .grammar_state import GrammarState
from .parsed_output import ParsedOutput
from .parsers import ParsedGrammar

FIRST_S, TOKEN_S = 0.005, 0.0002  # of CPU time for an output: at once, and with each token

Opened = ParsedGrammar | InvalidGrammar | EngineError
OpenProcess = Callable[[CompiledGrammar, Callable[[Opened], None]], None]


class LightGrammar:
    """A grammar shared by all its outputs, which are followed here or by its process."""

    def __init__(
        self, compiled: CompiledGrammar, bound: BoundGrammar, num_words: int, open_: OpenProcess
    ) -> None:
        """`bound` has the limits; `num_words`: of a mask; `open_` is `Parsers.open`."""
        self.num_words = num_words
        self._compiled = compiled
        self._bound = bound
        self._open = open_
        self._opened: ParsedGrammar | None = None  # once it was needed
        self._waiting: list[LightOutput] = []  # for it

    @property
    def path(self) -> Path:
        return self._bound.path

    @property
    def reason(self) -> str:
        return self._bound.reason

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._bound.warnings

    @property
    def num_bytes(self) -> int:
        """In this process."""
        return self._bound.num_bytes + (0 if self._opened is None else self._opened.num_bytes)

    def follower(self, jump_forward: bool, stop_ids: frozenset[int]) -> LightOutput:
        """The state of one more output, at its start."""
        state = GrammarState(self._bound.matcher(), jump_forward, stop_ids)
        return LightOutput(self, state, jump_forward, stop_ids)

    def hand_over(self, output: LightOutput) -> None:
        """Call the output's `go_on` once the grammar has a process, or `fail`."""
        if self._opened is not None:
            output.go_on(self._opened)
            return
        self._waiting.append(output)
        if len(self._waiting) == 1:
            self._open(self._compiled, self._take_opened)

    def _take_opened(self, opened: Opened) -> None:
        waiting, self._waiting = self._waiting, []
        if isinstance(opened, ParsedGrammar):
            self._opened = opened
        for output in waiting:
            if isinstance(opened, ParsedGrammar):
                output.go_on(opened)
            else:
                output.fail(str(opened))


class LightOutput:
    """The tokens that an output has taken, and its state here, until it is handed over."""

    def __init__(
        self,
        grammar: LightGrammar,
        state: GrammarState,
        jump_forward: bool,
        stop_ids: frozenset[int],
        tokens: Sequence[int] = (),
    ) -> None:
        self._grammar = grammar
        self._here: GrammarState | None = state
        self._there: ParsedOutput | None = None
        self._jump_forward = jump_forward
        self._stop_ids = stop_ids
        self._tokens = list(tokens)
        self._failure: str | None = None
        self._mask: Mask | None = None  # at this place, once it is known or something is forced
        self._left_s = FIRST_S
        self._is_closed = False

    @property
    def is_local(self) -> bool:
        return self._here is not None

    @property
    def is_ready(self) -> bool:
        if self._here is not None:
            self._look()
        if self._here is not None or self._failure is not None:
            return True
        return self._there is not None and self._there.is_ready

    @property
    def is_finished(self) -> bool:
        return self._state is not None and self._state.is_finished

    @property
    def error(self) -> str | None:
        if self._state is None:
            return self._failure
        error = self._state.error
        return None if self._here is not None and error == LIMIT_REACHED else error

    def consume(self, token_id: int) -> bool:
        if self._here is None:
            assert self._there is not None, f"token {token_id} before the position is known"
            return self._there.consume(token_id)
        if not self._here.consume(token_id):
            if self._here.error != LIMIT_REACHED:
                return False
            self._tokens.append(token_id)  # its process tells whether it is allowed
            self._hand_over()
            return True
        self._tokens.append(token_id)
        self._mask = None
        self._left_s += TOKEN_S
        return True

    def forced_run(self) -> Sequence[int]:
        return () if self._state is None else self._state.forced_run()

    def mask(self, out: Mask) -> None:
        if self._here is not None:
            self._look()
        if self._there is not None:
            self._there.mask(out)
        elif self._mask is not None:
            np.copyto(out, self._mask)
        else:
            out.fill(0)

    def expect(self, tokens: Sequence[int]) -> None:
        if self._there is not None:
            self._there.expect(tokens)

    def look_ahead(self) -> Follower | None:
        return None if self._state is None else self._state.look_ahead()

    def fork(self) -> Follower:
        if self._here is None:
            assert self._there is not None, "a fork before the position is known"
            return self._there.fork()
        state, tokens = self._here.fork(), self._tokens
        return LightOutput(self._grammar, state, self._jump_forward, self._stop_ids, tokens)

    def close(self) -> None:
        self._is_closed = True
        if self._state is not None:
            self._state.close()

    # --- for the grammar ------------------------------------------------------------------------

    def go_on(self, opened: ParsedGrammar) -> None:
        """Go on in the grammar's process."""
        if not self._is_closed:
            self._there = opened.follower(self._jump_forward, self._stop_ids)
            self._there.resume(self._tokens)

    def fail(self, message: str) -> None:
        """There is no process for it."""
        self._failure = message

    @property
    def _state(self) -> GrammarState | ParsedOutput | None:
        """Here or there; None while it is handed over, and where that has failed."""
        return self._here or self._there

    def _look(self) -> None:
        """Find out what comes next, unless that is known; hand over where it takes too much."""
        if self._mask is not None:
            return
        assert self._here is not None
        began_s = time.thread_time()
        mask = np.zeros(self._grammar.num_words, np.uint32)
        if not self._here.forced_run():
            self._here.mask(mask)
        self._left_s -= time.thread_time() - began_s
        self._mask = mask
        if self._left_s < 0 or self._here.error == LIMIT_REACHED:
            self._hand_over()

    def _hand_over(self) -> None:
        assert self._here is not None
        self._here.close()
        self._here = self._mask = None
        self._grammar.hand_over(self)
