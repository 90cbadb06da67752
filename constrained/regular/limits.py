"""Limits on building an automaton, and the errors where it cannot be built."""

from __future__ import annotations

import time
from dataclasses import dataclass

MAX_STATES = 50_000
NFA_STATES_PER_STATE = 20  # a multi-byte class needs many NFA states for few DFA states
MAX_OPERAND_DEPTH = 100  # And and Not within each other; also in native/src/thompson.cpp


class NotRegular(Exception):
    """A rule refers to itself other than at its very end: no automaton matches it."""


class TooManyStates(Exception):
    """The automaton, or the work of building it, exceeds a limit; the message says which."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one build."""

    max_states: int
    ends_at: float  # of time.thread_time: what the machine does besides changes no automaton

    @classmethod
    def of(cls, max_states: int, max_cpu_s: float | None) -> Budget:
        seconds = float("inf") if max_cpu_s is None else max_cpu_s
        return cls(max_states, time.thread_time() + seconds)

    @property
    def max_nfa_states(self) -> int:
        return self.max_states * NFA_STATES_PER_STATE

    def check_nfa(self, num_states: int) -> None:
        """Raises TooManyStates."""
        if num_states > self.max_nfa_states:
            raise TooManyStates(f"more than {self.max_nfa_states} nondeterministic states")
        if num_states % 256 == 0:
            self.check_time()

    def check_dfa(self, num_states: int) -> None:
        """Raises TooManyStates."""
        if num_states > self.max_states:
            raise TooManyStates(f"more than {self.max_states} states")
        if num_states % 64 == 0:
            self.check_time()

    def check_time(self) -> None:
        """Raises TooManyStates."""
        if time.thread_time() > self.ends_at:
            raise TooManyStates("out of time")
