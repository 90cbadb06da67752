"""Takes out of a grammar what no text ends: rules that only ever lead to themselves.

A parser follows such a rule as long as it can, and an output would never end. The rules from which
a text follows are a least fixpoint (Hopcroft, Motwani and Ullman, "Introduction to Automata
Theory", 3rd ed., section 7.1.2).
"""

from __future__ import annotations

from .grammar import (
    NOTHING,
    Alt,
    Concat,
    Expression,
    Grammar,
    Ref,
    Repeat,
    alt,
    concat,
    repeat,
)


def productive(grammar: Grammar) -> Grammar:
    """The same language without alternatives that cannot end; its first rule is NOTHING where the
    language is found to be empty. And and Not are taken to match something."""
    ending: set[str] = set()
    while True:
        more = {
            name
            for name, expression in grammar.rules.items()
            if name not in ending and _can_end(expression, ending)
        }
        if not more:
            break
        ending |= more
    rules = {
        name: _without_dead_ends(expression, ending)
        for name, expression in grammar.rules.items()
        if name in ending
    }
    return Grammar({grammar.start: NOTHING, **rules}, grammar.start)


def _can_end(expression: Expression, ending: set[str]) -> bool:
    if isinstance(expression, Ref):
        return expression.name in ending
    if isinstance(expression, Concat):
        return all(_can_end(part, ending) for part in expression.parts)
    if isinstance(expression, Alt):
        return any(_can_end(part, ending) for part in expression.parts)
    if isinstance(expression, Repeat):
        return expression.least == 0 or _can_end(expression.part, ending)
    return True


def _without_dead_ends(expression: Expression, ending: set[str]) -> Expression:
    if not _can_end(expression, ending):
        return NOTHING
    if isinstance(expression, Concat):
        return concat(*(_without_dead_ends(part, ending) for part in expression.parts))
    if isinstance(expression, Alt):
        live = [part for part in expression.parts if _can_end(part, ending)]
        return alt(*(_without_dead_ends(part, ending) for part in live))
    if isinstance(expression, Repeat):
        part = _without_dead_ends(expression.part, ending)
        return repeat(part, expression.least, expression.most)
    return expression
