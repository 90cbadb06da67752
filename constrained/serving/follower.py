"""The interface by which the scheduler follows a grammar: one output's progress through it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from ..matcher import DescribedGrammar, Mask


class Follower(Protocol):
    """A forced run, once begun, is followed to its end. Nothing here raises: a failure of the
    matcher is an error of this output alone."""

    @property
    def is_local(self) -> bool:
        """Whether nothing has to be waited for: the grammar is followed in this process."""

    @property
    def is_ready(self) -> bool:
        """Whether the rest is known now; another process may still be computing it."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow."""

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further, or None."""

    def consume(self, token_id: int) -> bool:
        """Take the output's next token, where it is ready; False where the grammar does not allow
        it."""

    def forced_run(self) -> Sequence[int]:
        """Tokens to append before the next one is sampled; none without jump-forward."""

    def mask(self, out: Mask) -> None:
        """Set `out` [ceil(vocab_size / 32)] uint32 to the tokens that may be sampled next, where it
        is ready; none where there is an error."""

    def expect(self, tokens: Sequence[int]) -> None:
        """While it is not ready: these may follow what was consumed, what will be forced among
        them. Another process then tells what the grammar says of them ahead."""

    def look_ahead(self) -> Follower | None:
        """Another state at the same place, for tokens that may never come. It is closed before this
        one is used again. None: nothing can be said ahead. One that is not local knows the way of
        what was expected alone, and refuses other tokens."""

    def fork(self) -> Follower:
        """The state of another output that begins like this one; where it is ready."""

    def close(self) -> None:
        """The output has ended."""


@runtime_checkable
class FollowedGrammar(DescribedGrammar, Protocol):
    """A grammar that makes the states of its outputs itself."""

    def follower(self, jump_forward: bool, stop_ids: frozenset[int]) -> Follower:
        """The state of one more output, at its start."""


def allow(mask: Mask, token_ids: Iterable[int]) -> None:
    """Set the bits of these ids; those beyond the vocabulary are ignored: they cannot be
    sampled."""
    for token_id in token_ids:
        if token_id < 32 * len(mask):
            mask[token_id >> 5] |= np.uint32(1 << (token_id & 31))
