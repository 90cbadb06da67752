"""Grammar to DFA in plain Python: the reference for the C++, and the path without a compiler.

Thompson's construction of a nondeterministic automaton over bytes (Hopcroft, Motwani and Ullman,
"Introduction to Automata Theory", 3rd ed., sections 3.2.3, 2.3.5 and 4.4), then subsets, trimming
and Hopcroft's minimisation. A rule is built once for each state that follows it, so that a
reference at a rule's end is a jump. Operands of And and Not are determinized separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ...errors import InvalidGrammar
from ..grammar import Alt, And, Chars, Concat, Expression, Grammar, Literal, Not, Ref, Repeat
from .charsets import ALL, utf8_sequences
from .dfa import Dfa
from .limits import MAX_OPERAND_DEPTH, Budget, NotRegular, TooManyStates

_ANY_TEXT = Repeat(Chars(ALL), 0, None)


def reference_dfa(grammar: Grammar, budget: Budget) -> Dfa:
    """The minimal automaton. Raises NotRegular, TooManyStates, InvalidGrammar (unknown rule)."""
    return _determinised(Ref(grammar.start), grammar.rules, budget, None, depth=0)


@dataclass(frozen=True, slots=True)
class _Rules:
    """The enclosing rules of what is being built, innermost first, and what follows each."""

    name: str
    exit: int | None  # None: within an operand, where no back reference is a jump
    outer: _Rules | None


@dataclass(slots=True)
class _Nfa:
    """Byte edges (low, high, to) and empty moves of each state."""

    edges: list[list[tuple[int, int, int]]] = field(default_factory=list)
    moves: list[list[int]] = field(default_factory=list)

    def new(self, budget: Budget) -> int:
        self.edges.append([])
        self.moves.append([])
        budget.check_nfa(len(self.edges))
        return len(self.edges) - 1


_Work: TypeAlias = tuple[Expression, int, int, _Rules | None]


def _determinised(
    expression: Expression,
    rules: Mapping[str, Expression],
    budget: Budget,
    outer: _Rules | None,
    depth: int,
) -> Dfa:
    if depth > MAX_OPERAND_DEPTH:
        raise TooManyStates(f"And and Not are nested deeper than {MAX_OPERAND_DEPTH}")
    budget.check_time()
    nfa = _Nfa()
    start, accept = nfa.new(budget), nfa.new(budget)
    _Construction(nfa, rules, budget, depth).run(expression, start, accept, outer)
    return _minimal(_subsets(nfa, start, accept, budget))


class _Construction:
    """Adds expressions between two states of an NFA; uses a work list instead of recursion."""

    def __init__(
        self, nfa: _Nfa, rules: Mapping[str, Expression], budget: Budget, depth: int
    ) -> None:
        self.nfa, self.rules, self.budget, self.depth = nfa, rules, budget, depth
        self.of_rule: dict[tuple[str, int], int] = {}
        self.pending: list[_Work] = []

    def run(self, expression: Expression, entry: int, exit: int, outer: _Rules | None) -> None:
        self.pending.append((expression, entry, exit, outer))
        num_done = 0
        while self.pending:
            num_done += 1
            self.budget.check_nfa(num_done)  # shared parts may multiply without new states
            self._add(*self.pending.pop())

    def _add(self, node: Expression, entry: int, exit: int, within: _Rules | None) -> None:
        match node:
            case Literal(text):
                self._add_sequences(entry, exit, [[(byte, byte) for byte in text.encode()]])
            case Chars(ranges):
                self._add_sequences(entry, exit, map(list, utf8_sequences(ranges)))
            case Concat(parts):
                inner = [self.nfa.new(self.budget) for _ in parts[1:]]
                for part, before, after in zip(parts, [entry, *inner], [*inner, exit]):
                    self.pending.append((part, before, after, within))
                if not parts:
                    self.nfa.moves[entry].append(exit)
            case Alt(parts):
                self.pending += [(part, entry, exit, within) for part in parts]
            case Repeat():
                self._add_repeat(node, entry, exit, within)
            case Ref(name):
                self._add_rule(name, entry, exit, within)
            case And() | Not():
                self._add_automaton(self._operation(node, within), entry, exit)

    def _add_sequences(
        self, entry: int, exit: int, sequences: Iterable[list[tuple[int, int]]]
    ) -> None:
        tails: dict[tuple[tuple[int, int], ...], int] = {(): exit}
        for sequence in sequences:
            after = exit
            for index in range(len(sequence) - 1, 0, -1):
                tail = tuple(sequence[index:])
                if tail not in tails:
                    tails[tail] = self.nfa.new(self.budget)
                    self.nfa.edges[tails[tail]].append((*sequence[index], after))
                after = tails[tail]
            if sequence:
                self.nfa.edges[entry].append((*sequence[0], after))
            else:
                self.nfa.moves[entry].append(exit)

    def _add_repeat(self, node: Repeat, entry: int, exit: int, within: _Rules | None) -> None:
        state = entry
        for _ in range(node.least):
            state = self._add_turn(node.part, state, within)
        if node.most is None:
            loop = self.nfa.new(self.budget)
            self.nfa.moves[state].append(loop)
            self.pending.append((node.part, loop, loop, within))
            state = loop
        else:
            for _ in range(node.most - node.least):
                self.nfa.moves[state].append(exit)
                state = self._add_turn(node.part, state, within)
        self.nfa.moves[state].append(exit)

    def _add_turn(self, part: Expression, entry: int, within: _Rules | None) -> int:
        after = self.nfa.new(self.budget)
        self.pending.append((part, entry, after, within))
        return after

    def _add_rule(self, name: str, entry: int, exit: int, within: _Rules | None) -> None:
        if name not in self.rules:
            raise InvalidGrammar(f"there is no rule {name!r}", "grammar")
        _check_recursion(name, exit, within)
        known = self.of_rule.get((name, exit))
        if known is None:
            known = self.of_rule[name, exit] = self.nfa.new(self.budget)
            self.pending.append((self.rules[name], known, exit, _Rules(name, exit, within)))
        self.nfa.moves[entry].append(known)

    def _operation(self, node: And | Not, within: _Rules | None) -> Dfa:
        operands = (node.part,) if isinstance(node, Not) else node.parts
        outer, depth = _as_operands(within), self.depth + 1
        found = [_determinised(one, self.rules, self.budget, outer, depth) for one in operands]
        anything = _determinised(_ANY_TEXT, {}, self.budget, None, 0)
        if isinstance(node, Not):
            return _product(anything, found[0], lambda a, b: a and not b, self.budget)
        result = found[0] if found else anything
        for other in found[1:]:
            result = _product(result, other, lambda a, b: a and b, self.budget)
        return result

    def _add_automaton(self, dfa: Dfa, entry: int, exit: int) -> None:
        if dfa.is_empty:
            return
        first = len(self.nfa.edges)
        for _ in range(dfa.num_states):
            self.nfa.new(self.budget)
        runs = _class_runs(dfa)
        for state in range(1, dfa.num_states):
            row = dfa.transitions[state]
            self.nfa.edges[first + state] = [
                (low, high, first + int(row[index])) for low, high, index in runs if row[index]
            ]
            if dfa.accepting[state]:
                self.nfa.moves[first + state].append(exit)
        self.nfa.moves[entry].append(first + dfa.start)


def _check_recursion(name: str, exit: int, within: _Rules | None) -> None:
    while within is not None:
        if within.name == name and within.exit != exit:
            raise NotRegular(f"rule {name!r} refers to itself other than at its end")
        within = within.outer


def _as_operands(within: _Rules | None) -> _Rules | None:
    """The same rules, marked so that an operand may refer to none of them."""
    names = []
    while within is not None:
        names.append(within.name)
        within = within.outer
    outer: _Rules | None = None
    for name in dict.fromkeys(names):
        outer = _Rules(name, None, outer)
    return outer


def _class_runs(dfa: Dfa) -> list[tuple[int, int, int]]:
    """The bytes as runs of one class: (first, last, class)."""
    runs: list[tuple[int, int, int]] = []
    for byte, index in enumerate(dfa.class_of.tolist()):
        if runs and runs[-1][2] == index:
            runs[-1] = (runs[-1][0], byte, index)
        else:
            runs.append((byte, byte, index))
    return runs


@dataclass(frozen=True, slots=True)
class _Table:
    """A complete automaton before minimisation: a row per state, an entry per byte class."""

    class_of: list[int]  # [256]
    rows: list[list[int]]  # the start is state 0
    accepting: list[bool]


def _subsets(nfa: _Nfa, start: int, accept: int, budget: Budget) -> _Table:
    class_of, cuts = _byte_classes(low_high for edges in nfa.edges for low_high in edges)
    first = _closure(nfa, {start})
    index = {first: 0}
    pending, rows = [first], []
    for states in pending:
        targets: list[set[int]] = [set() for _ in cuts]
        for state in states:
            for low, high, to in nfa.edges[state]:
                for byte_class in range(class_of[low], class_of[high] + 1):
                    targets[byte_class].add(to)
        row = []
        for target in targets:
            closed = _closure(nfa, target)
            if closed not in index:
                index[closed] = len(index)
                budget.check_dfa(len(index))
                pending.append(closed)
            row.append(index[closed])
        rows.append(row)
    return _Table(class_of, rows, [accept in states for states in index])


def _byte_classes(edges: Iterable[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
    """Bytes that all edges treat alike: the class of each, ascending, and each class's first."""
    cuts = {0}
    for low, high, _ in edges:
        cuts |= {low, high + 1}
    firsts = sorted(cuts - {256})
    class_of = []
    for index, (low, end) in enumerate(zip(firsts, [*firsts[1:], 256])):
        class_of += [index] * (end - low)
    return class_of, firsts


def _closure(nfa: _Nfa, states: set[int]) -> frozenset[int]:
    found, pending = set(states), list(states)
    while pending:
        for to in nfa.moves[pending.pop()]:
            if to not in found:
                found.add(to)
                pending.append(to)
    return frozenset(state for state in found if nfa.edges[state] or not nfa.moves[state])


def _product(a: Dfa, b: Dfa, accepts: Callable[[bool, bool], bool], budget: Budget) -> Dfa:
    """The automaton of the texts for which `accepts` holds."""
    pair_of = list(zip(a.class_of.tolist(), b.class_of.tolist()))
    pairs = list(dict.fromkeys(pair_of))
    class_of = [pairs.index(pair) for pair in pair_of]
    index = {(a.start, b.start): 0}
    pending, rows = [(a.start, b.start)], []
    for left, right in pending:
        row = []
        for of_a, of_b in pairs:
            target = int(a.transitions[left, of_a]), int(b.transitions[right, of_b])
            if target not in index:
                index[target] = len(index)
                budget.check_dfa(len(index))
                pending.append(target)
            row.append(index[target])
        rows.append(row)
    accepting = [accepts(bool(a.accepting[i]), bool(b.accepting[j])) for i, j in index]
    return _minimal(_Table(class_of, rows, accepting))


def _minimal(table: _Table) -> Dfa:
    """Hopcroft's algorithm; then blocks are numbered from the start, breadth first, classes by
    their first byte. So equal languages give equal automata."""
    block_of = _blocks(table)
    num_blocks = max(block_of) + 1
    rows = [[0]] * num_blocks
    for state, block in enumerate(block_of):
        rows[block] = [block_of[to] for to in table.rows[state]]
    accepting = [False] * num_blocks
    for state, block in enumerate(block_of):
        accepting[block] = table.accepting[state]
    dead = next((b for b in range(num_blocks) if not accepting[b] and set(rows[b]) == {b}), None)
    order = _breadth_first(rows, block_of[0], dead)
    number = {block: index for index, block in enumerate(order)}
    kept = order[1:]
    columns = [tuple(number[rows[block][c]] for block in kept) for c in range(len(rows[0]))]
    distinct = list(dict.fromkeys(columns))
    merged = {column: index for index, column in enumerate(distinct)}
    transitions = np.zeros((len(order), len(distinct)), np.int32)
    transitions[1:] = np.array(distinct, np.int32).reshape(len(distinct), len(kept)).T
    return Dfa(
        class_of=np.array([merged[columns[c]] for c in table.class_of], np.uint8),
        transitions=transitions,
        accepting=np.array([False, *(accepting[block] for block in kept)]),
        start=number[block_of[0]],
    )


def _breadth_first(rows: list[list[int]], start: int, dead: int | None) -> list[int]:
    """Blocks in the order of their discovery, the dead one (-1 where there is none) first."""
    order = dict.fromkeys([-1 if dead is None else dead, start])
    for block in (queue := [start]):
        for to in rows[block]:
            if to not in order:
                order[to] = None
                queue.append(to)
    return list(order)


def _blocks(table: _Table) -> list[int]:
    """The block of each state; all states of a block accept the same texts."""
    sources: list[list[list[int]]] = [[[] for _ in table.rows] for _ in table.rows[0]]
    for state, row in enumerate(table.rows):
        for byte_class, to in enumerate(row):
            sources[byte_class][to].append(state)
    halves = ({s for s, a in enumerate(table.accepting) if a is kind} for kind in (True, False))
    blocks = [half for half in halves if half]
    block_of = [0] * len(table.rows)
    for number, block in enumerate(blocks):
        for state in block:
            block_of[state] = number
    pending = {(number, c) for number in range(len(blocks)) for c in range(len(sources))}
    while pending:
        splitter, byte_class = pending.pop()
        touched: dict[int, set[int]] = {}
        for to in blocks[splitter]:
            for state in sources[byte_class][to]:
                touched.setdefault(block_of[state], set()).add(state)
        for number, inside in touched.items():
            if len(inside) == len(blocks[number]):
                continue
            outside = blocks[number] - inside
            small, large = sorted((inside, outside), key=len)
            blocks[number] = large
            blocks.append(small)
            for state in small:
                block_of[state] = len(blocks) - 1
            # The smaller half is enough: if the whole was pending, its number now means the rest.
            pending |= {(len(blocks) - 1, c) for c in range(len(sources))}
    return block_of
