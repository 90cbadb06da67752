"""Small random grammars in GBNF, and which texts they have, found without any automaton."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping

from stemma.constrained.grammar import Alt, Chars, Concat, Expression, Literal, Ref, Repeat


def random_gbnf(seed: int) -> str:
    """A grammar of up to four rules over few letters, so that terminals overlap."""
    rng = random.Random(seed)
    names = ["root", *(f"r-{i}" for i in range(rng.randint(0, 3)))]
    return "\n".join(f"{name} ::= {_choices(rng, names, 2)}" for name in names)


def _choices(rng: random.Random, names: list[str], depth: int) -> str:
    return " | ".join(_sequence(rng, names, depth) for _ in range(rng.choice([1, 1, 2, 3])))


def _sequence(rng: random.Random, names: list[str], depth: int) -> str:
    return " ".join(_item(rng, names, depth) for _ in range(rng.choice([0, 1, 2, 2, 3])))


def _item(rng: random.Random, names: list[str], depth: int) -> str:
    kinds = ['"a"', '"ab"', '"bca"', "[ab]", "[a-c]", "[^a]", ".", '"é"', rng.choice(names)]
    if depth:
        kinds += [f"({_choices(rng, names, depth - 1)})"] * 2
    return rng.choice(kinds) + rng.choice(["", "", "", "?", "*", "+", "{2}", "{1,2}", "{2,}"])


def is_text_of(rules: Mapping[str, Expression], start: str, text: str) -> bool:
    """Whether the text is in the language: all ends of all parts at all places, by a fixpoint."""
    known: dict[tuple[str, int], set[int]] = {}

    def ends(expression: Expression, at: int) -> set[int]:
        match expression:
            case Literal(value):
                return {at + len(value)} if text.startswith(value, at) else set()
            case Chars(ranges):
                is_one = at < len(text) and any(a <= ord(text[at]) <= b for a, b in ranges)
                return {at + 1} if is_one else set()
            case Ref(name):
                return set(known.setdefault((name, at), set()))
            case Alt(parts):
                return set().union(*(ends(part, at) for part in parts))
            case Concat(parts):
                return functools.reduce(
                    lambda reached, part: set().union(*(ends(part, end) for end in reached)),
                    parts,
                    {at},
                )
            case Repeat(part, least, most):
                # As a relation from place to place: `least` times, then until nothing is new.
                reached = {at}
                for _ in range(least):
                    reached = set().union(*(ends(part, end) for end in reached))
                for _ in range(len(text) + 1 if most is None else most - least):
                    reached = reached.union(*(ends(part, end) for end in reached))
                return reached
            case _:
                raise AssertionError(expression)

    known[start, 0] = set()
    is_new, num_known = True, 0
    while is_new:
        is_new = False
        for name, at in list(known):
            found = ends(rules[name], at)
            if not found <= known[name, at]:
                known[name, at] |= found
                is_new = True
        is_new, num_known = is_new or len(known) != num_known, len(known)
    return len(text) in known[start, 0]
