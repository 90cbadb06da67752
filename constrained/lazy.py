"""Automata made while outputs follow them: of grammars that are recursive, or large, or new.

`native/src/lazy.cpp` makes a state, and the transitions from it, when they are first asked for, so
that a grammar costs what is reached of it, from the first mask on. What lies on the stack of a
recursive rule is part of a state. Equal to a parser in what it matches, and to an automaton in how:
masks, forced bytes and their caches are those of `fsm.py`.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .native.bindings import library
from .regular.compiled import construction_error
from .regular.flat_grammar import FlatGrammar
from .regular.limits import Budget

LIMIT_REACHED = (
    "the grammar takes more than 8 million steps, or 320 MB, for one token; remedy: patterns that "
    "repeat less before their end, fewer alternatives that begin alike, no `not` of a pattern"
)
LIGHT_STEPS = 20_000  # of one call, 1 to 2 ms
LIGHT_BYTES = 4 * 2**20
_LIMIT_AT = 40  # bytes into struct Table of native/src/table.h
_FAILED = 2


class LazyAutomaton:
    """Owns the native automaton of one grammar. Not thread-safe.

    Raises TooManyStates where it takes more than `budget` to see whether an intersection in it is
    empty, InvalidGrammar for an unknown rule.
    """

    def __init__(self, grammar: FlatGrammar, budget: Budget) -> None:
        native = library()
        assert native is not None, "without compiled code there are no lazy automata"
        outcome = (ctypes.c_int32 * 2)()
        self._native = native
        self._handle: int | None = native.stemma_lazy_automaton(
            grammar.words.ctypes.data,
            len(grammar.words),
            budget.max_nfa_states,
            budget.max_states,
            budget.ends_at - time.thread_time(),
            outcome,
        )
        if self._handle is None:
            raise construction_error(outcome[0], outcome[1], grammar.rule_names, budget)
        self.start: int = native.stemma_lazy_start(self._handle)
        self.table: int = native.stemma_lazy_table(self._handle)
        self._following = (ctypes.c_uint8 * 32)()
        self._limit = ctypes.c_int64.from_address(self.table + _LIMIT_AT)
        self._step = functools.partial(native.stemma_lazy_step, self._handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self._native.stemma_free_lazy_automaton(self._handle)

    def bound_light(self) -> None:
        """From now on: no more for one call than whoever waits for it does not notice."""
        self._native.stemma_lazy_limits(self._handle, LIGHT_STEPS, LIGHT_BYTES)

    def keep(self, states: Sequence[int]) -> list[int]:
        """Forget all states but the start and these; returns their new numbers. Raises MemoryError
        where there is none for that, and changes nothing then."""
        kept = np.array(states, np.int32)
        if not self._native.stemma_lazy_keep(self._handle, kept.ctypes.data, len(kept)):
            raise MemoryError("no memory to make room in an automaton")
        self.start = self._native.stemma_lazy_start(self._handle)
        renumbered: list[int] = kept.tolist()
        return renumbered

    @property
    def num_states(self) -> int:
        """So far."""
        return int(self._sizes()[0])

    @property
    def num_bytes(self) -> int:
        """So far; beyond 160 MB it `is_full`, at twice that it has failed."""
        return int(self._sizes()[1])

    @property
    def is_full(self) -> bool:
        """Whether states are to be forgotten: it takes much memory, or has failed."""
        return self._limit.value != 0

    @property
    def has_failed(self) -> bool:
        """Whether a limit was hit: what is asked from then on is wrong, until `keep`."""
        return self._limit.value == _FAILED

    @property
    def is_empty(self) -> bool:
        """Whether the language is empty."""
        return self.start == 0

    def step(self, state: int, data: bytes) -> int:
        """The state after more bytes."""
        found: int = self._step(state, data, len(data))
        return found

    def is_accepting(self, state: int) -> bool:
        """Whether a text may end here."""
        return bool(self._native.stemma_lazy_accepts(self._handle, state))

    def exit(self, state: int) -> int:
        """The only byte that may follow; -1: none may, -2: several."""
        found: int = self._native.stemma_lazy_exit(self._handle, state)
        return found

    def next_bytes(self, state: int) -> int:
        """The bytes that may follow: bit i is byte i."""
        self._native.stemma_next_bytes(self.table, state, self._following)
        return int.from_bytes(self._following, "little")

    def _sizes(self) -> npt.NDArray[np.int64]:
        sizes = np.empty(2, np.int64)
        self._native.stemma_lazy_sizes(self._handle, sizes.ctypes.data)
        return sizes
