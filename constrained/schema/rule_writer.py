"""The interface with which the rules of arrays and objects are written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ..grammar import Expression, Ref
from .document import State
from .json_text import Spacing
from .paths import ArrayPaths, ObjectPaths


class RuleWriter(Protocol):
    """Names rules, and gives the texts of nested values."""

    spacing: Spacing
    property_order: str
    rules: dict[str, Expression]
    num_rules: int
    needs_unique_keys: bool
    has_patterned_keys: bool
    watches_items: bool  # whether the output is read for repeated items

    def value(self, state: State) -> Expression:
        """The texts of a state's values."""

    def new_name(self) -> str:
        """A name for a rule that is written at once."""

    def new_rule(self, expression: Expression) -> Ref:
        """A new rule for the expression."""

    def note(self, paths: ArrayPaths | ObjectPaths) -> None:
        """What one case of the array or object that is being written leads to."""

    def refuse(self, keyword: str, reason: str, remedy: str = "") -> None:
        """Strict: raises UnsupportedSchema. Lenient: a warning, and the keyword is dropped."""

    def refuse_one_of(self, keywords: Iterable[str], reason: str, remedy: str = "") -> None:
        """The same for the first of these keywords that the current state has."""
