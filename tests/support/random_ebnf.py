"""Small random grammars: few letters, so that terminals overlap, and rules that recur."""

from __future__ import annotations

import random

ATOMS = ("a", "b", "ab", "[ab]", "[a-c]", ".", "a{2,3}", "(ab)", "(a|b)", "[^a]", "c")


def random_ebnf(seed: int) -> str:
    """A grammar of up to four rules and three terminals in Lark's notation."""
    rng = random.Random(seed)
    terminals = [f"T{i}" for i in range(rng.randint(1, 3))]
    rules = ["start", *(f"r{i}" for i in range(rng.randint(0, 3)))]
    names = [*terminals, *rules]
    lines = [f"{rule}: {_alternatives(rng, names)}" for rule in rules]
    lines += [f"{name}: /{_regex(rng)}/" for name in terminals]
    return "\n".join(lines)


def _alternatives(rng: random.Random, names: list[str]) -> str:
    return " | ".join(_sequence(rng, names) for _ in range(rng.randint(1, 3)))


def _sequence(rng: random.Random, names: list[str]) -> str:
    return " ".join(_item(rng, names) for _ in range(rng.randint(1, 3)))


def _item(rng: random.Random, names: list[str]) -> str:
    kinds = [rng.choice(names), rng.choice(names), f'"{rng.choice("abc~")}"', f"/{_regex(rng)}/"]
    return rng.choice(kinds) + rng.choice(["", "", "", "?", "*", "+"])


def _regex(rng: random.Random) -> str:
    parts = (rng.choice(ATOMS) + rng.choice(["", "", "*", "+", "?"]) for _ in range(3))
    return "".join(list(parts)[: rng.randint(1, 3)])
