"""Deterministic automata over bytes: the form in which regular grammars are matched."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DEAD = 0


@dataclass(frozen=True, slots=True, eq=False)
class Dfa:
    """A trimmed, minimal automaton over UTF-8 bytes. State 0 is dead; from every other state an
    accepting one is reachable. Plain data: it may cross processes."""

    class_of: npt.NDArray[np.uint8]  # [256]: bytes of one class behave alike in every state
    transitions: npt.NDArray[np.int32]  # [num_states, num_classes], C-contiguous
    accepting: npt.NDArray[np.bool_]  # [num_states]
    start: int  # 0 where the language is empty

    @property
    def num_states(self) -> int:
        """Including the dead one."""
        return len(self.accepting)

    @property
    def num_bytes(self) -> int:
        """Of its tables."""
        return self.class_of.nbytes + self.transitions.nbytes + self.accepting.nbytes

    @property
    def is_empty(self) -> bool:
        """Whether the language is empty."""
        return self.start == DEAD

    def step(self, state: int, byte: int) -> int:
        """The state after one more byte."""
        return int(self.transitions[state, self.class_of[byte]])

    def walk(self, state: int, data: bytes) -> int:
        """The state after more bytes."""
        for byte in data:
            state = self.step(state, byte)
            if state == DEAD:
                break
        return state

    def matches(self, data: bytes) -> bool:
        """Whether the whole of `data` is in the language."""
        return bool(self.accepting[self.walk(self.start, data)])
