"""The interface by which the runtime follows a grammar during generation: six verbs.

tokens consumed so far -> state -> mask of the next token, forced tokens, whether it may end
                            |
                          fork: the same state, for another output
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Mask: TypeAlias = npt.NDArray[np.uint32]
Path = Literal["fsm", "lazy", "pushdown", "llguidance", "outlines"]
"""What a grammar is matched by: an automaton, one that is made on the way, or a parser; or as
another backend does."""


class Matcher(Protocol):
    """One output's position in a grammar. Not thread-safe; made by `BoundGrammar.matcher`.

    The grammar does not include end-of-sequence, and no verb handles it. The caller lets the output
    end where `is_accepting`, and must end it where `is_finished`.
    """

    def mask(self, out: Mask) -> None:
        """Set `out` [ceil(vocab_size / 32)] to the tokens that may come next: bit i % 32 of word
        i // 32 is token i. Never empty unless `is_finished`, or unless an error has occurred."""

    def consume(self, token_id: int) -> bool:
        """Take a token; False, and nothing changes, where the grammar does not allow it."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last consumed tokens; the state is exactly what it was before them."""

    def fork(self) -> Matcher:
        """Another matcher at the same position, for an output that begins like this one."""

    def is_accepting(self) -> bool:
        """Whether what was consumed is a whole text of the language."""

    def forced_tokens(self) -> Sequence[int]:
        """Tokens that must follow whatever the model says, in their canonical tokenization: () or a
        run, to be consumed as a whole. A pure function of the tokens consumed."""

    def is_finished(self) -> bool:
        """Whether it is accepting and nothing may follow."""

    def error(self) -> str | None:
        """Why the matcher cannot continue (a limit was hit), or None."""


class DescribedGrammar(Protocol):
    """What is told of a grammar over a vocabulary."""

    @property
    def path(self) -> Path: ...

    @property
    def reason(self) -> str: ...

    @property
    def warnings(self) -> tuple[str, ...]: ...

    @property
    def num_bytes(self) -> int:
        """Memory that it holds now: grows while outputs follow it, up to a bound."""


class BoundGrammar(DescribedGrammar, Protocol):
    """A grammar over a vocabulary: shared by all its outputs."""

    def matcher(self) -> Matcher:
        """A matcher for one more output, at the grammar's beginning."""
