"""A grammar as one array of integers, the form that the C++ code reads.

    [num_nodes, num_rules, start, num_payload]  4 words a node  the node of each rule  payload

A node is [kind, a, b, c]: `a` and `b` are an offset and a count in the payload (bytes of a literal,
pairs of a class, nodes of parts), or of a repetition [part, least, most or -1], of a negation
[part], of a reference [rule]. Every distinct object is one node, so shared parts stay shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from ..grammar import Alt, And, Chars, Concat, Expression, Grammar, Literal, Not, Ref, Repeat

_LITERAL, _CHARS, _CONCAT, _ALT, _REPEAT, _AND, _NOT, _REF = range(8)
_UNBOUNDED = _UNKNOWN = -1
_MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class FlatGrammar:
    """The array, and the name of each rule by its number."""

    words: npt.NDArray[np.int32]
    rule_names: list[str]


def flat_grammar(grammar: Grammar) -> FlatGrammar:
    """The flat form of what the start reaches; an undefined rule has no node."""
    writer = _Writer(grammar.rules)
    start = writer.number(Ref(grammar.start))
    for node in writer.nodes:  # grows during the loop
        writer.write(node)
    header = [len(writer.nodes), len(writer.roots), start, len(writer.payload)]
    words = chain(header, writer.words, writer.roots, writer.payload)
    return FlatGrammar(np.fromiter(words, np.int32), list(writer.rules))


@dataclass(slots=True)
class _Writer:
    """Numbers nodes in the order in which they are met and writes them so; no recursion."""

    expressions: Mapping[str, Expression]  # of the rules
    nodes: list[Expression] = field(default_factory=list)  # kept alive: their ids are in use
    numbers: dict[int, int] = field(default_factory=dict)
    rules: dict[str, int] = field(default_factory=dict)
    roots: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    payload: list[int] = field(default_factory=list)

    def number(self, node: Expression) -> int:
        number = self.numbers.setdefault(id(node), len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append(node)
        return number

    def rule(self, name: str) -> int:
        rule = self.rules.setdefault(name, len(self.roots))
        if rule == len(self.roots):
            root = self.expressions.get(name)
            self.roots.append(_UNKNOWN if root is None else self.number(root))
        return rule

    def write(self, node: Expression) -> None:
        match node:
            case Literal(text):
                self._write_items(_LITERAL, list(text.encode()))
            case Chars(ranges):
                self._write_items(_CHARS, list(chain.from_iterable(ranges)), len(ranges))
            case Concat(parts):
                self._write_items(_CONCAT, [self.number(part) for part in parts])
            case Alt(parts):
                self._write_items(_ALT, [self.number(part) for part in parts])
            case And(parts):
                self._write_items(_AND, [self.number(part) for part in parts])
            case Repeat(part, least, most):
                most = _UNBOUNDED if most is None else min(most, _MAX_COUNT)
                self.words += (_REPEAT, self.number(part), min(least, _MAX_COUNT), most)
            case Not(part):
                self.words += (_NOT, self.number(part), 0, 0)
            case Ref(name):
                self.words += (_REF, self.rule(name), 0, 0)

    def _write_items(self, kind: int, items: list[int], count: int | None = None) -> None:
        self.words += (kind, len(self.payload), len(items) if count is None else count, 0)
        self.payload += items
