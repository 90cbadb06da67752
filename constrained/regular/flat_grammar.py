"""A grammar as one array of integers, the form that the C++ code reads.

    [num_nodes, num_rules, start, num_payload]  4 words a node  the node of each rule  payload

A node is [kind, a, b, c]: `a` and `b` are an offset and a count in the payload (bytes of a literal,
pairs of a class, nodes of parts), or of a repetition [part, least, most or -1], of a negation
[part], of a reference [rule]. Every distinct object is one node, so shared parts stay shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from ..grammar import Alt, And, Chars, Concat, Expression, Grammar, Literal, Not, Ref, Repeat

_LITERAL, _CHARS, _CONCAT, _ALT, _REPEAT, _AND, _NOT, _REF = range(8)
_UNBOUNDED = _UNKNOWN = -1
_MAX_COUNT = 2**31 - 1
_OF_PARTS = {Concat: _CONCAT, Alt: _ALT, And: _AND}


@dataclass(frozen=True, slots=True)
class FlatGrammar:
    """The array, and the name of each rule by its number."""

    words: npt.NDArray[np.int32]
    rule_names: list[str]

    @property
    def largest_count(self) -> int:
        """How often anything may come at most, as far as that is bounded at all."""
        nodes = self.words[4 : 4 + 4 * self.words[0]].reshape(-1, 4)
        repeats = nodes[nodes[:, 0] == _REPEAT]
        return int(repeats[:, 2:].max(initial=0))


def flat_grammar(grammar: Grammar) -> FlatGrammar:
    """The flat form of what the start reaches; an undefined rule has no node.

    Nodes are numbered in the order in which they are met, and written in it; no recursion.
    """
    nodes: list[Expression] = [Ref(grammar.start)]  # kept alive: their ids are in use
    numbers: dict[int, int] = {id(nodes[0]): 0}
    rules: dict[str, int] = {}
    roots: list[int] = []
    words: list[int] = []
    payload: list[int] = []

    def number(node: Expression) -> int:
        found = numbers.setdefault(id(node), len(nodes))
        if found == len(nodes):
            nodes.append(node)
        return found

    def rule(name: str) -> int:
        found = rules.setdefault(name, len(roots))
        if found == len(roots):
            root = grammar.rules.get(name)
            roots.append(_UNKNOWN if root is None else number(root))
        return found

    for node in nodes:  # grows during the loop
        # In the order of frequency: this is a fourth of the time of a schema.
        if isinstance(node, Literal):
            data = node.text.encode()
            words += (_LITERAL, len(payload), len(data), 0)
            payload += data
        elif isinstance(node, Concat | Alt | And):
            parts = node.parts
            words += (_OF_PARTS[type(node)], len(payload), len(parts), 0)
            for part in parts:
                key = id(part)
                found = numbers.get(key)
                if found is None:
                    found = numbers[key] = len(nodes)
                    nodes.append(part)
                payload.append(found)
        elif isinstance(node, Ref):
            words += (_REF, rule(node.name), 0, 0)
        elif isinstance(node, Repeat):
            most = _UNBOUNDED if node.most is None else min(node.most, _MAX_COUNT)
            words += (_REPEAT, number(node.part), min(node.least, _MAX_COUNT), most)
        elif isinstance(node, Chars):
            words += (_CHARS, len(payload), len(node.ranges), 0)
            payload += chain.from_iterable(node.ranges)
        else:
            assert isinstance(node, Not), node
            words += (_NOT, number(node.part), 0, 0)
    header = [len(nodes), len(roots), 0, len(payload)]
    return FlatGrammar(np.array(header + words + roots + payload, np.int32), list(rules))
