"""Automaton to expression by state elimination.

Source: Hopcroft, Motwani, Ullman, "Introduction to Automata Theory, Languages, and Computation",
section 3.2.2. The state with the shortest paths goes first (Delgado and Morais, "Approximation to
the Smallest Regular Expression for a Given Regular Language", 2004). Written out, the expression
may be exponential in the number of states; as rules that share their parts it is cubic.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from ..grammar import EMPTY_WORD, NOTHING, Alt, Chars, Expression, Ref, concat, repeat
from .charsets import normalized
from .dfa import DEAD, Dfa

MAX_STATES = 300  # about a second of work
MAX_RULE_SIZE = 8  # a longer path is a rule of its own


class TooLarge(Exception):
    """More rules than allowed would be needed."""


class _Edge(NamedTuple):
    """The paths from one state to another, and their number of leaves when written out."""

    expression: Expression
    size: int


_Edges: TypeAlias = dict[int, dict[int, _Edge]]
_EMPTY = _Edge(EMPTY_WORD, 0)


def rules_of(dfa: Dfa, name: str, max_rules: int) -> dict[str, Expression]:
    """Rules without recursion for the language of an automaton over ASCII: `name`, and the rules it
    refers to under longer names. Raises TooLarge."""
    if dfa.is_empty:
        return {name: NOTHING}
    if dfa.num_states > MAX_STATES:
        raise TooLarge(f"it takes more than {MAX_STATES} states")
    elimination = _Elimination(dfa, name, max_rules)
    while elimination.left:
        elimination.eliminate(min(elimination.left, key=elimination.weight))
    elimination.rules[name] = elimination.whole()
    return elimination.rules


class _Elimination:
    """Paths between the remaining states, from one first to one last state."""

    def __init__(self, dfa: Dfa, name: str, max_rules: int) -> None:
        self.rules: dict[str, Expression] = {}
        self._name = name
        self._max_rules = max_rules
        self._first, self._last = dfa.num_states, DEAD
        self._out = _edges(dfa)
        self.left = set(self._out)
        self._out[self._first] = {dfa.start: _EMPTY}
        for state in self.left:
            if dfa.accepting[state]:
                self._out[state][self._last] = _EMPTY
        self._into: dict[int, set[int]] = {}
        for state, edges in self._out.items():
            for target in edges:
                self._into.setdefault(target, set()).add(state)

    def whole(self) -> Expression:
        """From first to last, once no other state remains."""
        return self._out[self._first][self._last].expression

    def weight(self, state: int) -> tuple[int, int]:
        """The size that eliminating a state adds; ties are broken by its number."""
        sources = [self._out[source][state].size for source in self._into[state] - {state}]
        targets = [edge.size for to, edge in self._out[state].items() if to != state]
        loop = self._out[state].get(state, _EMPTY).size
        paths = (len(targets) - 1) * sum(sources) + (len(sources) - 1) * sum(targets)
        return paths + loop * (len(sources) * len(targets) - 1), state

    def eliminate(self, state: int) -> None:
        """Remove a state: replace each path through it by a direct one."""
        self.left.discard(state)
        edges = self._out.pop(state)
        loop = edges.pop(state, None)
        sources = sorted(self._into.pop(state) - {state})
        for target in edges:
            self._into[target].discard(state)
        for source in sources:
            entry = self._out[source].pop(state)
            for target, exit_ in edges.items():
                path = _path(entry, loop, exit_)
                known = self._out[source].get(target)
                joined = path if known is None else _either(known, path)
                self._out[source][target] = self._shared(joined)
                self._into[target].add(source)

    def _shared(self, edge: _Edge) -> _Edge:
        if edge.size <= MAX_RULE_SIZE:
            return edge
        if len(self.rules) == self._max_rules:
            raise TooLarge(f"it takes more than {self._max_rules} rules without recursion")
        name = f"{self._name}_{len(self.rules)}"
        self.rules[name] = edge.expression
        return _Edge(Ref(name), edge.size)


def _edges(dfa: Dfa) -> _Edges:
    out: _Edges = {}
    for state in range(1, dfa.num_states):
        targets: dict[int, list[tuple[int, int]]] = {}
        for byte in range(256):
            target = dfa.step(state, byte)
            if target != DEAD:
                assert byte < 128, "only of ASCII is a byte a character"
                targets.setdefault(target, []).append((byte, byte))
        out[state] = {to: _Edge(Chars(normalized(codes)), 1) for to, codes in targets.items()}
    return out


def _path(entry: _Edge, loop: _Edge | None, exit_: _Edge) -> _Edge:
    size = entry.size + exit_.size
    between = EMPTY_WORD if loop is None else repeat(loop.expression, 0)
    path = concat(entry.expression, between, exit_.expression)
    return _Edge(path, size if loop is None else size + loop.size)


def _either(one: _Edge, other: _Edge) -> _Edge:
    parts: list[Expression] = []
    for part in (one.expression, other.expression):
        parts += part.parts if isinstance(part, Alt) else [part]
    if all(isinstance(part, Chars) for part in parts):
        ranges = (pair for part in parts if isinstance(part, Chars) for pair in part.ranges)
        return _Edge(Chars(normalized(ranges)), 1)
    return _Edge(Alt(tuple(parts)), one.size + other.size)
