"""What compiling a grammar gives, and how it becomes a grammar of one vocabulary.

Apart from the compiler: an engine receives these from other processes and compiles nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from .fsm import FsmGrammar
from .item_places import ItemPlaces
from .matcher import BoundGrammar, Path
from .pushdown import PushdownGrammar
from .regular.dfa import Dfa
from .unique_items import UniqueItems
from .unique_keys import UniqueKeys
from .vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar not yet bound to a vocabulary: one of `dfa` and `lark`. May cross processes."""

    path: Path
    reason: str  # why this path
    dfa: Dfa | None = None
    lark: str | None = None
    warnings: tuple[str, ...] = ()
    schema: str | None = None  # lenient: outputs must be validated against it
    needs_unique_keys: bool = False
    has_patterned_keys: bool = False  # see SchemaGrammar
    item_places: ItemPlaces | None = None  # see SchemaGrammar

    def bind(self, vocabulary: Vocabulary) -> BoundGrammar:
        """Raises InvalidGrammar where no token begins a text of the language."""
        bound = self._bound(vocabulary)
        if self.needs_unique_keys:
            bound = UniqueKeys(bound, vocabulary, looks_ahead=self.has_patterned_keys)
        if self.item_places is not None:
            bound = UniqueItems(bound, vocabulary, self.item_places)
        return bound

    def _bound(self, vocabulary: Vocabulary) -> BoundGrammar:
        if self.dfa is not None:
            return FsmGrammar(self.dfa, vocabulary, self.reason, self.warnings)
        assert self.lark is not None
        return PushdownGrammar(self.lark, vocabulary, self.reason, self.warnings)
