"""How the runtime follows a grammar while it generates: five verbs, whatever lies behind them.

tokens consumed so far -> state -> mask of the next token, forced tokens, whether it may end
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Mask: TypeAlias = npt.NDArray[np.uint32]
Path = Literal["fsm", "pushdown"]
"""What a grammar is matched by: an automaton, or a parser."""


class Matcher(Protocol):
    """One output's place in a grammar. Not thread-safe; made by `BoundGrammar.matcher`.

    End-of-sequence is not a matter of the grammar: no verb knows it. The caller lets the output
    end where `is_accepting`, and must end it where `is_finished`.
    """

    def mask(self, out: Mask) -> None:
        """Set `out` [ceil(vocab_size / 32)] to the tokens that may come next: bit i % 32 of word
        i // 32 is token i. Never empty unless `is_finished`, or unless an error has occurred."""

    def consume(self, token_id: int) -> bool:
        """Take a token; False, and nothing changes, where the grammar does not allow it."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last tokens consumed; the state is exactly what it was before them."""

    def is_accepting(self) -> bool:
        """Whether what was consumed is a whole text of the language."""

    def forced_tokens(self) -> Sequence[int]:
        """Tokens that follow whatever the model says, in their canonical tokenization: () or a
        run, to be consumed as a whole. A pure function of the tokens consumed."""

    def is_finished(self) -> bool:
        """Whether it is accepting and nothing may follow."""

    def error(self) -> str | None:
        """Why the matcher cannot go on (a limit was hit), if so."""


class BoundGrammar(Protocol):
    """A grammar over a vocabulary: shared by all outputs under it."""

    @property
    def path(self) -> Path: ...

    @property
    def reason(self) -> str: ...

    @property
    def warnings(self) -> tuple[str, ...]: ...

    def matcher(self) -> Matcher:
        """For one more output, at the grammar's beginning."""
