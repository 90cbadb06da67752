"""Automata over a vocabulary: an output's state is one state of the automaton.

Masks and forced runs depend on the state only, so each is computed once and shared by every output
of every request under the grammar (Willard & Louf 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..errors import InvalidGrammar
from .jump_forward import MAX_CACHED_BYTES, MAX_FORCED_BYTES, ForcedTokens
from .lazy import LIMIT_REACHED, LazyAutomaton
from .matcher import Mask, Path
from .native.bindings import library
from .regular.dfa import DEAD, Dfa
from .token_masks import Walk, table_walk, walk_of
from .vocabulary import Vocabulary

_NO_EXIT, _MANY_EXITS = -1, -2
_EXIT_BYTES = 130  # of a dict's entry with its key; the value is shared
_RUN_BYTES = 250  # of one with a tuple, besides the run's text


class Automaton(Protocol):
    """States and their transitions, made before (`_Tables`) or on the way (`LazyAutomaton`)."""

    start: int

    @property
    def num_bytes(self) -> int: ...

    @property
    def has_failed(self) -> bool:
        """Whether a limit was hit: what is asked from then on is wrong."""

    def step(self, state: int, data: bytes) -> int:
        """The state after `data`."""

    def is_accepting(self, state: int) -> bool: ...

    def exit(self, state: int) -> int:
        """The only byte that may follow, or a code for none or for many."""

    def next_bytes(self, state: int) -> int:
        """The bytes that may follow: bit i is byte i."""


class FsmGrammar:
    """An automaton bound to a vocabulary.

    Raises InvalidGrammar where no token begins a text of the language.
    """

    def __init__(
        self,
        dfa: Dfa | LazyAutomaton,
        vocabulary: Vocabulary,
        reason: str = "",
        warnings: tuple[str, ...] = (),
    ) -> None:
        self.dfa = dfa
        self.vocabulary = vocabulary
        self.reason = reason
        self.warnings = warnings
        self.forced = ForcedTokens(vocabulary)
        self.path: Path = "fsm" if isinstance(dfa, Dfa) else "lazy"
        self.automaton: Automaton = _Tables(dfa) if isinstance(dfa, Dfa) else dfa
        self.step, self.is_accepting = self.automaton.step, self.automaton.is_accepting
        self._walk = _walk_of(dfa, vocabulary)
        self._first_key = vocabulary.masks.new_grammar()
        self._asked = bytearray()  # by state: whether its mask was
        self._exits: dict[int, int] = {}
        self._forced_runs: dict[int, tuple[bytes, int]] = {}
        self._run_bytes = 0
        self._successor: FsmGrammar | None = None  # once a limit of the automaton was hit
        if not self.is_accepting(dfa.start) and not self._has_token(dfa.start):
            raise InvalidGrammar("no token of the vocabulary begins a text of the grammar")

    @property
    def num_bytes(self) -> int:
        """Of its tables, and of what its states were found to force; masks are the vocabulary's."""
        if self._successor is not None:
            return self._successor.num_bytes
        found = len(self._exits) * _EXIT_BYTES + self._run_bytes
        return self.automaton.num_bytes + found + len(self._asked) + self.forced.num_bytes

    def matcher(self) -> FsmMatcher:
        """A matcher at the grammar's beginning."""
        return FsmMatcher(self.usable())

    def usable(self) -> FsmGrammar:
        """This one; after a limit was hit, one with an automaton made anew, as often as needed."""
        grammar = self
        while grammar._successor is not None:
            grammar = grammar._successor
        if grammar.automaton.has_failed:
            assert isinstance(grammar.dfa, LazyAutomaton)
            own = (self.vocabulary, self.reason, self.warnings)
            grammar._successor = self._successor = FsmGrammar(grammar.dfa.anew(), *own)
            grammar = self._successor
        return grammar

    def mask(self, state: int, out: Mask) -> None:
        """Set `out` [num_words] to the tokens that may follow in a state. A mask is kept once its
        state has come again: of many grammars, few states ever do."""
        masks = self.vocabulary.masks
        row = masks.get(self._first_key + state)
        if row is not None:
            np.copyto(out, row)
            return
        self._walk(state, out)
        if self.automaton.has_failed:
            out.fill(0)
            return
        asked = self._asked
        if state >= len(asked):
            asked.extend(bytes(state + 256))
        if asked[state]:
            masks.put(self._first_key + state, out.copy())
        asked[state] = 1

    def is_final(self, state: int) -> bool:
        """Whether no byte may follow."""
        return self._exit(state) == _NO_EXIT

    def is_stuck(self, state: int) -> bool:
        """Whether only bytes may follow that the vocabulary cannot write."""
        if self.vocabulary.writes_all_bytes or self.is_accepting(state):
            return False
        return not self._has_token(state)

    def _has_token(self, state: int) -> bool:
        mask = np.empty(self.vocabulary.num_words, np.uint32)
        self.mask(state, mask)
        return bool(mask.any())

    def forced_tokens(self, state: int, consumed: Sequence[int]) -> tuple[int, ...]:
        """Tokens that must follow in `state`, which was reached by `consumed`."""
        if self._exit(state) < 0 or self.is_accepting(state):
            return ()
        run = self._forced_runs.get(state)
        if run is None:
            run = self.forced_bytes(state)
            self._keep_run(state, run)
        forced, after = run
        return self.forced.after(consumed, forced, state, lambda rest: self.can_extend(after, rest))

    def forced_bytes(self, state: int) -> tuple[bytes, int]:
        """The only bytes that can follow before the language branches or may end, and the state
        after them."""
        forced = b""
        while len(forced) < MAX_FORCED_BYTES and not self.is_accepting(state):
            byte = self._exit(state)
            if byte < 0:
                break
            forced += bytes([byte])
            state = self.step(state, forced[-1:])
        return forced, state

    def _keep_run(self, state: int, run: tuple[bytes, int]) -> None:
        num_bytes = _RUN_BYTES + len(run[0])
        if self._run_bytes + num_bytes > MAX_CACHED_BYTES:
            self._forced_runs.clear()
            self._run_bytes = 0
        self._forced_runs[state] = run
        self._run_bytes += num_bytes

    def _exit(self, state: int) -> int:
        """The only byte that may follow, or a code for none or for many."""
        found = self._exits.get(state)
        if found is None:
            found = self._exits[state] = self.automaton.exit(state)
        return found

    def can_extend(self, state: int, rest: bytes) -> bool:
        """Whether a token longer than `rest` that begins with it may be written; `state` is the one
        after `rest`."""
        trie = self.vocabulary.trie
        root = trie.find(rest)
        if root is None:
            return False
        states = [state]
        at, end = root + 1, int(trie.end[root])
        while at < end:
            depth = int(trie.depth[at]) - len(rest)
            after = self.step(states[depth - 1], bytes([trie.byte[at]]))
            if after == DEAD:
                at = int(trie.end[at])
                continue
            if trie.first[at] < trie.first[at + 1]:
                return True
            states[depth:] = [after]
            at += 1
        return False


class _Tables:
    """A whole automaton's tables, in forms that are read fast."""

    has_failed = False

    def __init__(self, dfa: Dfa) -> None:
        self.start = dfa.start
        self._dfa = dfa
        self._num_classes = dfa.transitions.shape[1]
        self._classes = dfa.class_of.tobytes()
        self._table = dfa.transitions.ravel().data
        self._accepting = dfa.accepting.tobytes()
        self._class_sizes = np.bincount(dfa.class_of, minlength=self._num_classes).tolist()

    @property
    def num_bytes(self) -> int:
        return self._dfa.num_bytes + len(self._accepting) + 2 * self._dfa.num_states

    def step(self, state: int, data: bytes) -> int:
        table, num_classes = self._table, self._num_classes
        for byte_class in data.translate(self._classes):
            state = table[state * num_classes + byte_class]
            if state == DEAD:
                break
        return state

    def is_accepting(self, state: int) -> bool:
        return self._accepting[state] != 0

    def exit(self, state: int) -> int:
        alive = np.flatnonzero(self._dfa.transitions[state]).tolist()
        if not alive:
            return _NO_EXIT
        if len(alive) > 1 or self._class_sizes[alive[0]] > 1:
            return _MANY_EXITS
        return self._classes.index(alive[0])

    def next_bytes(self, state: int) -> int:
        return bits((self._dfa.transitions[state] != DEAD)[self._dfa.class_of])


def bits(flags: npt.NDArray[np.bool_]) -> int:
    """[256] as an integer: bit i is flag i."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def _walk_of(dfa: Dfa | LazyAutomaton, vocabulary: Vocabulary) -> Walk:
    if isinstance(dfa, Dfa):
        return walk_of(dfa, vocabulary)
    native = library()
    assert native is not None, "a lazy automaton is compiled code"
    return table_walk(native, dfa.table, vocabulary, dfa)


class FsmMatcher:
    """One output's position in an automaton: the states after each token.

    Where a limit of a lazy automaton is hit, its outputs go on in one made anew, which holds what
    they need; an output that hits it there at once ends with an error.
    """

    def __init__(self, grammar: FsmGrammar) -> None:
        self._grammar = grammar
        self._states = [grammar.dfa.start]
        self._tokens: list[int] = []
        self._failure: str | None = None

    def mask(self, out: Mask) -> None:
        self._grammar.mask(self._states[-1], out)
        if self._grammar.automaton.has_failed and self._moved():
            self._grammar.mask(self._states[-1], out)
            self._check()

    def consume(self, token_id: int) -> bool:
        grammar = self._grammar
        data = grammar.vocabulary.token_bytes[token_id]
        state = grammar.step(self._states[-1], data)
        if state == DEAD or not data:
            if not grammar.automaton.has_failed or not data or not self._moved():
                return False
            state = self._grammar.step(self._states[-1], data)
            self._check()
            if state == DEAD:
                return False
        self._states.append(state)
        self._tokens.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens <= len(self._tokens), (num_tokens, len(self._tokens))
        if num_tokens:
            del self._states[-num_tokens:]
            del self._tokens[-num_tokens:]

    def fork(self) -> FsmMatcher:
        other = FsmMatcher(self._grammar)
        other._states, other._tokens = self._states[:], self._tokens[:]
        other._failure = self._failure
        return other

    def is_accepting(self) -> bool:
        self._move_on()
        return self._failure is None and self._grammar.is_accepting(self._states[-1])

    def forced_tokens(self) -> Sequence[int]:
        self._move_on()
        forced = self._grammar.forced_tokens(self._states[-1], self._tokens)
        return () if self._grammar.automaton.has_failed else forced

    def next_bytes(self) -> int:
        """The bytes that may follow: bit i is byte i."""
        self._move_on()
        return self._grammar.automaton.next_bytes(self._states[-1])

    def is_finished(self) -> bool:
        self._move_on()
        return self._failure is None and self._grammar.is_final(self._states[-1])

    def error(self) -> str | None:
        self._move_on()
        if self._failure is not None:
            return self._failure
        if self._grammar.is_stuck(self._states[-1]):
            return "no token of the vocabulary continues the text"
        return None

    def _move_on(self) -> None:
        if self._grammar.automaton.has_failed:
            self._moved()

    def _moved(self) -> bool:
        """Go on in an automaton made anew; False where this was tried before."""
        if self._failure is not None:
            return False
        self._grammar = self._grammar.usable()
        self._states = [self._grammar.dfa.start]
        texts = self._grammar.vocabulary.token_bytes
        for token in self._tokens:
            self._states.append(self._grammar.step(self._states[-1], texts[token]))
        self._check()
        return self._failure is None

    def _check(self) -> None:
        if self._grammar.automaton.has_failed:
            self._failure = LIMIT_REACHED
