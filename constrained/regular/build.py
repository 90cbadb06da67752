"""Grammar to minimal byte automaton, within limits."""

from __future__ import annotations

from ..grammar import Grammar
from ..native.bindings import library
from .compiled import compiled_dfa
from .dfa import Dfa
from .flat_grammar import flat_grammar
from .limits import MAX_STATES, Budget, NotRegular, TooManyStates
from .reference import reference_dfa

__all__ = ["NotRegular", "TooManyStates", "build_dfa"]


def build_dfa(
    grammar: Grammar, *, max_states: int = MAX_STATES, max_cpu_s: float | None = None
) -> Dfa:
    """The grammar's automaton; compiled code and Python give the same one.

    `max_states` bounds every intermediate automaton, also before it is minimal; `max_cpu_s` is time
    of this thread. Raises NotRegular; TooManyStates where a limit is hit; InvalidGrammar for an
    unknown rule.
    """
    native = library()  # may compile for seconds, once: not charged to the grammar
    budget = Budget.of(max_states, max_cpu_s)
    if native is None:
        return reference_dfa(grammar, budget)
    return compiled_dfa(flat_grammar(grammar), budget, native)
