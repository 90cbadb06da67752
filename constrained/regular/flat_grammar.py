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
        kind = type(node)  # compared in the order of their frequency
        if kind is Literal:
            data = node.text.encode()
            self.words += (_LITERAL, len(self.payload), len(data), 0)
            self.payload += data
        elif kind is Concat:
            self._write_parts(_CONCAT, node.parts)
        elif kind is Ref:
            self.words += (_REF, self.rule(node.name), 0, 0)
        elif kind is Repeat:
            most = _UNBOUNDED if node.most is None else min(node.most, _MAX_COUNT)
            self.words += (_REPEAT, self.number(node.part), min(node.least, _MAX_COUNT), most)
        elif kind is Alt:
            self._write_parts(_ALT, node.parts)
        elif kind is Chars:
            self.words += (_CHARS, len(self.payload), len(node.ranges), 0)
            self.payload += chain.from_iterable(node.ranges)
        elif kind is And:
            self._write_parts(_AND, node.parts)
        else:
            assert kind is Not, node
            self.words += (_NOT, self.number(node.part), 0, 0)

    def _write_parts(self, kind: int, parts: tuple[Expression, ...]) -> None:
        self.words += (kind, len(self.payload), len(parts), 0)
        self.payload += [self.number(part) for part in parts]
