"""What compiling a grammar gives, and how it becomes a grammar of one vocabulary.

Apart from the compiler: an engine receives these from other processes and compiles nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from .fsm import FsmGrammar
from .item_places import ItemPlaces
from .lazy import LazyAutomaton
from .matcher import BoundGrammar, Path
from .outlines_index import OutlinesGrammar
from .pushdown import PushdownGrammar
from .regular.dfa import Dfa
from .regular.flat_grammar import FlatGrammar
from .regular.limits import MAX_STATES, Budget
from .unique_items import UniqueItems
from .unique_keys import UniqueKeys
from .vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar not yet bound to a vocabulary: one of `dfa`, `rules`, `lark` and `regex`, of which
    the engine itself follows the first alone. May cross processes."""

    path: Path
    reason: str  # why this path
    dfa: Dfa | None = None
    rules: FlatGrammar | None = None  # of a lazy automaton
    is_soon_begun: bool = False  # the lazy automaton, within some milliseconds
    lark: str | None = None
    regex: str | None = None  # for outlines-core
    warnings: tuple[str, ...] = ()
    schema: str | None = None  # lenient: outputs must be validated against it
    needs_unique_keys: bool = False
    has_patterned_keys: bool = False  # see SchemaGrammar
    item_places: ItemPlaces | None = None  # see SchemaGrammar

    @property
    def may_be_light(self) -> bool:
        """Whether it may take little to follow: only an output tells. To look ahead along keys and
        items is to ask about many places."""
        return self.is_soon_begun and not self.has_patterned_keys and self.item_places is None

    def bind_light(self, vocabulary: Vocabulary) -> BoundGrammar:
        """As `bind`, of one that may be light: a call that takes much is an error of its output.
        Raises InvalidGrammar where the first one does, too."""
        assert self.may_be_light and self.rules is not None
        automaton = LazyAutomaton(self.rules, Budget.of(MAX_STATES, None))
        automaton.bound_light()
        bound: BoundGrammar = FsmGrammar(automaton, vocabulary, self.reason, self.warnings)
        if self.needs_unique_keys:
            bound = UniqueKeys(bound, vocabulary, looks_ahead=False)
        return bound

    def bind(self, vocabulary: Vocabulary) -> BoundGrammar:
        """Raises InvalidGrammar where no token begins a text of the language."""
        bound = self.bind_unwatched(vocabulary)
        if self.needs_unique_keys:
            bound = UniqueKeys(bound, vocabulary, looks_ahead=self.has_patterned_keys)
        if self.item_places is not None:
            bound = UniqueItems(bound, vocabulary, self.item_places)
        return bound

    def bind_unwatched(self, vocabulary: Vocabulary) -> BoundGrammar:
        """As `bind`, and keys and items may repeat."""
        if self.dfa is not None:
            return FsmGrammar(self.dfa, vocabulary, self.reason, self.warnings)
        if self.rules is not None:
            automaton = LazyAutomaton(self.rules, Budget.of(MAX_STATES, None))
            return FsmGrammar(automaton, vocabulary, self.reason, self.warnings)
        if self.regex is not None:
            return OutlinesGrammar(self.regex, vocabulary, self.reason)
        assert self.lark is not None
        return PushdownGrammar(self.lark, vocabulary, self.reason, self.warnings)
