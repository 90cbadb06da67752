"""Grammar to DFA by the compiled code of `native/`: the same automaton as `reference.py`."""

from __future__ import annotations

import ctypes
import time

import numpy as np

from ...errors import InvalidGrammar
from .dfa import Dfa
from .flat_grammar import FlatGrammar
from .limits import MAX_OPERAND_DEPTH, Budget, NotRegular, TooManyStates

# enum class Code in native/src/automata.h
_NOT_REGULAR, _NFA_STATES, _STATES, _TIME, _MEMORY, _NESTING, _MALFORMED, _UNKNOWN_RULE = range(
    1, 9
)


def compiled_dfa(flat: FlatGrammar, budget: Budget, library: ctypes.CDLL) -> Dfa:
    """The minimal automaton. Raises NotRegular, TooManyStates, InvalidGrammar (unknown rule)."""
    outcome = (ctypes.c_int32 * 2)()
    handle = library.stemma_build_automaton(
        flat.words.ctypes.data,
        len(flat.words),
        budget.max_nfa_states,
        budget.max_states,
        budget.ends_at - time.thread_time(),
        outcome,
    )
    if handle is None:
        raise construction_error(outcome[0], outcome[1], flat.rule_names, budget)
    try:
        return _copied(handle, library)
    finally:
        library.stemma_free_automaton(handle)


def _copied(handle: int, library: ctypes.CDLL) -> Dfa:
    sizes = (ctypes.c_int32 * 3)()
    library.stemma_automaton_sizes(handle, sizes)
    num_states, num_classes, start = sizes
    class_of = np.empty(256, np.uint8)
    transitions = np.empty((num_states, num_classes), np.int32)
    accepting = np.empty(num_states, np.bool_)
    library.stemma_copy_automaton(
        handle, class_of.ctypes.data, transitions.ctypes.data, accepting.ctypes.data
    )
    return Dfa(class_of, transitions, accepting, start)


def construction_error(code: int, rule: int, rule_names: list[str], budget: Budget) -> Exception:
    """The error that the compiled code reports."""
    if code == _NOT_REGULAR:
        return NotRegular(f"rule {rule_names[rule]!r} refers to itself other than at its end")
    if code == _UNKNOWN_RULE:
        return InvalidGrammar(f"there is no rule {rule_names[rule]!r}", "grammar")
    assert code != _MALFORMED, "flat_grammar and the compiled code disagree on the format"
    reasons = {
        _NFA_STATES: f"more than {budget.max_nfa_states} nondeterministic states",
        _STATES: f"more than {budget.max_states} states",
        _TIME: "out of time",
        _MEMORY: "out of memory for the sets of states",
        _NESTING: f"And and Not are nested deeper than {MAX_OPERAND_DEPTH}",
    }
    return TooManyStates(reasons[code])
