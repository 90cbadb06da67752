"""Automata over a vocabulary: an output's state is one state of the automaton.

Masks and forced runs depend on the state only, so each is computed once and shared by every output
of every request under the grammar (Willard & Louf 2023).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

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
# Of each output, when an automaton is full: more than a draft has tokens, or a forced run mostly.
KEPT_STATES = 128
_Answer = TypeVar("_Answer")
_EXIT_BYTES = 130  # of a dict's entry with its key; the value is shared
_RUN_BYTES = 250  # of one with a tuple, besides the run's text


class Automaton(Protocol):
    """States and their transitions, made before (`_Tables`) or on the way (`LazyAutomaton`)."""

    start: int

    @property
    def num_bytes(self) -> int: ...

    @property
    def is_full(self) -> bool:
        """Whether states are to be forgotten: it takes much memory, or has failed."""

    @property
    def has_failed(self) -> bool:
        """Whether a limit was hit: what is asked from then on is wrong."""

    def keep(self, states: Sequence[int]) -> list[int]:
        """Forget all states but the start and these; returns their new numbers."""

    def step(self, state: int, data: bytes) -> int:
        """The state after `data`."""

    def is_accepting(self, state: int) -> bool: ...

    def exit(self, state: int) -> int:
        """The only byte that may follow, or a code for none or for many."""

    def next_bytes(self, state: int) -> int:
        """The bytes that may follow: bit i is byte i."""


class FsmGrammar:
    """An automaton bound to a vocabulary. What it knows of states outlives the outputs that follow
    it, until the automaton is full: then all forget what none of them needs.

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
        self.path: Path = "fsm" if isinstance(dfa, Dfa) else "lazy"
        self.automaton: Automaton = _Tables(dfa) if isinstance(dfa, Dfa) else dfa
        self.step, self.is_accepting = self.automaton.step, self.automaton.is_accepting
        self._walk = _walk_of(dfa, vocabulary)
        self._followers: weakref.WeakSet[FsmMatcher] = weakref.WeakSet()  # of states that may go
        self._know_nothing()
        begins = self.is_accepting(dfa.start) or self._has_token(dfa.start)
        if self.automaton.has_failed:
            raise InvalidGrammar(LIMIT_REACHED)
        if not begins:
            raise InvalidGrammar("no token of the vocabulary begins a text of the grammar")

    @property
    def num_bytes(self) -> int:
        """Of its tables, and of what its states were found to force; masks are the vocabulary's."""
        found = len(self._exits) * _EXIT_BYTES + self._run_bytes
        return self.automaton.num_bytes + found + len(self._visited) + self.forced.num_bytes

    def matcher(self) -> FsmMatcher:
        """A matcher at the grammar's beginning."""
        return FsmMatcher(self)

    def follow(self, matcher: FsmMatcher) -> None:
        """Renumber a matcher's states whenever some are forgotten."""
        if self.path == "lazy":
            self._followers.add(matcher)

    def make_room(self) -> None:
        """Forget all states but the start and the last ones of each output. Raises MemoryError."""
        followers = list(self._followers)
        last = [matcher.last_states() for matcher in followers]
        renumbered = iter(self.automaton.keep(list(itertools.chain.from_iterable(last))))
        for matcher, states in zip(followers, last, strict=True):
            matcher.take_states(list(itertools.islice(renumbered, len(states))))
        self._know_nothing()

    def _know_nothing(self) -> None:
        """Begin without what was found out of states, whose numbers mean others now."""
        self.forced = ForcedTokens(self.vocabulary)
        self._first_key = self.vocabulary.masks.new_grammar()
        self._exits: dict[int, int] = {}
        self._forced_runs: dict[int, tuple[bytes, int]] = {}
        self._run_bytes = 0
        self._visited = bytearray()  # by state: whether its mask was asked for

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
        visited = self._visited
        if state >= len(visited):
            visited.extend(bytes(state + 256))
        if visited[state]:
            masks.put(self._first_key + state, out.copy())
        visited[state] = 1

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

    is_full = has_failed = False

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

    def keep(self, states: Sequence[int]) -> list[int]:
        return list(states)  # none is ever forgotten

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
    """One output's position in an automaton: the states after its last tokens.

    When a lazy automaton is full, all but the last ones are forgotten, and found again where an
    output is rolled back beyond them. One that hits a limit twice ends with an error.
    """

    def __init__(self, grammar: FsmGrammar) -> None:
        self._grammar = grammar
        self._states = [grammar.dfa.start]
        self._tokens: list[int] = []
        self._failure: str | None = None
        grammar.follow(self)

    def mask(self, out: Mask) -> None:
        if self._grammar.automaton.is_full:
            self._make_room()
        self._grammar.mask(self._states[-1], out)
        if self._grammar.automaton.has_failed and self._make_room():
            self._grammar.mask(self._states[-1], out)
            self._check()
        if self._failure is not None:
            out.fill(0)

    def consume(self, token_id: int) -> bool:
        data = self._grammar.vocabulary.token_bytes[token_id]
        state = self._after(data)
        if state == DEAD or not data:
            return False
        self._states.append(state)
        self._tokens.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens <= len(self._tokens), (num_tokens, len(self._tokens))
        if not num_tokens:
            return
        del self._tokens[-num_tokens:]
        if num_tokens < len(self._states):
            del self._states[-num_tokens:]
        else:
            self._find_states()

    def fork(self) -> FsmMatcher:
        other = FsmMatcher(self._grammar)
        other._states, other._tokens = self._states[:], self._tokens[:]
        other._failure = self._failure
        return other

    def is_accepting(self) -> bool:
        return self._asked(self._grammar.is_accepting, False)

    def forced_tokens(self) -> Sequence[int]:
        return self._asked(lambda state: self._grammar.forced_tokens(state, self._tokens), ())

    def next_bytes(self) -> int:
        """The bytes that may follow: bit i is byte i."""
        return self._asked(self._grammar.automaton.next_bytes, 0)

    def is_finished(self) -> bool:
        return self._asked(self._grammar.is_final, False)

    def error(self) -> str | None:
        is_stuck = self._asked(self._grammar.is_stuck, False)
        if self._failure is None and is_stuck:
            return "no token of the vocabulary continues the text"
        return self._failure

    def last_states(self) -> list[int]:
        """Those that are to be kept."""
        return self._states[-KEPT_STATES:]

    def take_states(self, states: list[int]) -> None:
        """The new numbers of `last_states`; others have none."""
        self._states = states

    def _asked(self, ask: Callable[[int], _Answer], otherwise: _Answer) -> _Answer:
        """What is true of the present state; `otherwise` where it cannot be found out."""
        if self._grammar.automaton.is_full:
            self._make_room()
        answer = ask(self._states[-1])
        if self._grammar.automaton.has_failed and self._make_room():
            answer = ask(self._states[-1])
            self._check()
        return answer if self._failure is None else otherwise

    def _after(self, data: bytes) -> int:
        """The state after more bytes."""
        if self._grammar.automaton.is_full:
            self._make_room()
        state = self._grammar.step(self._states[-1], data)
        if self._grammar.automaton.has_failed and self._make_room():
            state = self._grammar.step(self._states[-1], data)
            self._check()
        return state if self._failure is None else DEAD

    def _make_room(self) -> bool:
        """Whether the output goes on."""
        self._grammar.make_room()
        return self._failure is None

    def _check(self) -> None:
        if self._grammar.automaton.has_failed:
            self._failure = LIMIT_REACHED
            self._grammar.make_room()

    def _find_states(self) -> None:
        """Follow the tokens again."""
        self._states = [self._grammar.dfa.start]
        for token in self._tokens:
            state = self._after(self._grammar.vocabulary.token_bytes[token])
            if self._failure is not None:
                break
            self._states.append(state)
