"""What an engine of masks has to offer to be measured and judged."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint32]  # bit i % 32 of word i // 32 is token i


@dataclass(frozen=True, slots=True)
class GrammarRequest:
    """A language: a regex for the whole text, or a JSON Schema (as JSON) without whitespace."""

    kind: Literal["json_schema", "regex"]
    source: str
    is_lenient: bool = False  # enforce what can be
    asserts_format: bool = True  # else formats are ignored


class Walk(Protocol):
    """One output's position in a grammar."""

    words: Words

    def mask(self) -> None:
        """Set `words` to the tokens that may come next; end-of-sequence may be among them."""

    def consume(self, token_id: int) -> bool: ...

    def is_accepting(self) -> bool: ...

    def forced_tokens(self) -> Sequence[int]:
        """Tokens that must follow; () where there are none or the engine cannot say."""


class BoundGrammar(Protocol):
    """A compiled grammar, ready for outputs."""

    path: str  # how it is matched: "fsm", "lazy", "pushdown", or "" where there is only one way

    def start(self) -> Walk: ...

    def places(self, token_ids: Sequence[int]) -> Sequence[Hashable] | None:
        """The automaton's state before each token, where masks are cached by state."""


class MaskEngine(Protocol):
    """An engine with its vocabulary."""

    version: str

    def compile(self, request: GrammarRequest) -> BoundGrammar:
        """Raises the engine's own error for a grammar that it does not support."""


def allows(words: Words, token_id: int) -> bool:
    """Whether a mask allows this token."""
    return bool((int(words[token_id >> 5]) >> (token_id & 31)) & 1)


def new_words(vocab_size: int) -> Words:
    """An empty mask."""
    return np.zeros((vocab_size + 31) // 32, np.uint32)
