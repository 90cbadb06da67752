"""How an engine drafts."""

from __future__ import annotations

from dataclasses import dataclass

from .drafter import Drafter
from .guesses import ModelDrafter


@dataclass(frozen=True, slots=True)
class Drafting:
    """By whom, at most how many tokens of a row (>= 1), and whether also under grammars."""

    drafters: tuple[Drafter, ...]
    max_tokens: int
    under_grammars: bool = True
    model: ModelDrafter | None = None  # the one of `drafters` whom the executor's guesses are for
