"""Removes parts of rules that match nothing, and unreachable rules."""

from __future__ import annotations

from collections.abc import Mapping

from ..grammar import (
    NOTHING,
    Alt,
    Chars,
    Concat,
    Expression,
    Grammar,
    Literal,
    Ref,
    Repeat,
    alt,
    concat,
    repeat,
)


def pruned(root: Expression, rules: Mapping[str, Expression]) -> Grammar | None:
    """The grammar of `root`; None where it matches nothing.

    A rule is productive if it derives a text: the least fixpoint over all rules. `And` and `Not`
    are assumed productive: their creators ensure it.
    """
    productive = _productive(rules)
    if not _is_productive(root, productive):
        return None
    if len(productive) < len(rules):
        rules = {name: _without(rules[name], productive) for name in rules if name in productive}
        root = _without(root, productive)
        reached = _reached(root, rules)
        rules = {name: rules[name] for name in rules if name in reached}
    return Grammar({"root": root, **rules})


def _productive(rules: Mapping[str, Expression]) -> set[str]:
    """Rounds in alternating directions: rules are mostly written after, or before, their parts."""
    found: set[str] = set()
    left, num_left = list(rules), len(rules) + 1
    while len(left) < num_left:
        num_left = len(left)
        missing = []
        for name in reversed(left):
            if _is_productive(rules[name], found):
                found.add(name)
            else:
                missing.append(name)
        left = missing
    return found


def _is_productive(part: Expression, productive: set[str]) -> bool:
    # Faster than patterns, and asked of every part of a grammar.
    if isinstance(part, Literal):
        return True
    if isinstance(part, Concat):
        for inner in part.parts:
            if type(inner) is not Literal and not _is_productive(inner, productive):
                return False
        return True
    if isinstance(part, Ref):
        return part.name in productive
    if isinstance(part, Repeat):
        return part.least == 0 or _is_productive(part.part, productive)
    if isinstance(part, Alt):
        return any(_is_productive(inner, productive) for inner in part.parts)
    return not isinstance(part, Chars) or bool(part.ranges)


def _without(part: Expression, productive: set[str]) -> Expression:
    """The part with NOTHING in place of every rule that is not productive."""
    match part:
        case Ref(name):
            return part if name in productive else NOTHING
        case Concat(parts):
            return concat(*(_without(inner, productive) for inner in parts))
        case Alt(parts):
            inner_parts = (_without(inner, productive) for inner in parts)
            return alt(*(inner for inner in inner_parts if inner != NOTHING))
        case Repeat(inner, least, most):
            return repeat(_without(inner, productive), least, most)
    return part


def _reached(root: Expression, rules: Mapping[str, Expression]) -> set[str]:
    reached: set[str] = set()
    pending = [root]
    while pending:
        match pending.pop():
            case Ref(name) if name not in reached:
                reached.add(name)
                pending.append(rules[name])
            case Concat(parts) | Alt(parts):
                pending.extend(parts)
            case Repeat(inner):
                pending.append(inner)
    return reached
