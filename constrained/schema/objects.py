"""Constraints on an object: which keys, how many, and their values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from .document import FALSE, TRUE, Signed, State
from .strings import Language


@dataclass(frozen=True, slots=True)
class KeySet:
    """Keys by pattern: in all of `inside`, in none of `outside`, and none of `names`."""

    inside: frozenset[Language] = frozenset()
    outside: frozenset[Language] = frozenset()
    names: frozenset[str] = frozenset()

    def has(self, name: str) -> bool:
        """Membership by every reading of the patterns."""
        return (
            name not in self.names
            and all(part.has(name) for part in self.inside)
            and not any(part.may_have(name) for part in self.outside)
        )

    def may_have(self, name: str) -> bool:
        """Membership by some reading: the set's constraints then also apply to this key."""
        return (
            name not in self.names
            and all(part.may_have(name) for part in self.inside)
            and not any(part.has(name) for part in self.outside)
        )


Keys: TypeAlias = str | KeySet
"""One key by its name, or a set of them."""


def is_key_in(name: str, keys: Keys) -> bool:
    """Whether a key is the named one, or in the set."""
    return keys == name if isinstance(keys, str) else keys.has(name)


Debt: TypeAlias = frozenset[tuple[Keys, Signed]]
"""A disjunction: some key of a set has a value that is valid so; a named one with FALSE is
missing."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The keys that in-place keywords have evaluated, for `unevaluatedProperties`."""

    is_all: bool = False
    names: frozenset[str] = frozenset()
    patterns: frozenset[Language] = frozenset()

    def __or__(self, other: Evaluated) -> Evaluated:
        return Evaluated(
            self.is_all or other.is_all, self.names | other.names, self.patterns | other.patterns
        )


NOTHING_EVALUATED = Evaluated()


@dataclass(frozen=True, slots=True)
class ObjectCase:
    """A conjunction of constraints on an object.

    `values`: every key of the set has a value that is valid under the place; a forbidden key is one
    whose value is FALSE. `owed`: at least one alternative of each of these sets must hold.
    """

    values: tuple[tuple[Keys, Signed], ...] = ()
    required: frozenset[str] = frozenset()
    owed: frozenset[Debt] = frozenset()
    least: int = 0
    most: int | None = None
    evaluated: Evaluated = field(default=NOTHING_EVALUATED)

    def value_state(self, name: str) -> State:
        """The constraints on a key's value."""
        return self.value_states([name])[name]

    def value_states(self, names: Iterable[str]) -> dict[str, State]:
        """The same for several keys."""
        asked: dict[str, set[Signed]] = {name: set() for name in names}
        for keys, signed in self.values:
            if isinstance(keys, str):
                if keys in asked:
                    asked[keys].add(signed)
            elif signed != TRUE:
                for name, state in asked.items():
                    if keys.may_have(name):
                        state.add(signed)
        return {name: frozenset(state) for name, state in asked.items()}

    def merged(self, other: ObjectCase) -> ObjectCase | None:
        """Both conjunctions; None where the counts leave no object."""
        if not self.values and self == ANY:
            return other
        if not other.values and other == ANY:
            return self
        most = self.most if other.most is None else other.most
        if self.most is not None and other.most is not None:
            most = min(self.most, other.most)
        values = self.values
        if other.values:
            known = set(values)
            values += tuple(entry for entry in other.values if entry not in known)
        required = self.required | other.required
        least = max(self.least, other.least)
        if most is not None and (least > most or len(required) > most):
            return None
        return ObjectCase(
            values,
            required,
            self.owed | other.owed,
            least,
            most,
            self.evaluated | other.evaluated,
        )

    def named(self) -> list[str]:
        """The keys that the case names, without duplicates."""
        names = dict.fromkeys(keys for keys, _ in self.values if isinstance(keys, str))
        names.update(dict.fromkeys(sorted(self.required)))
        return list(names)

    def forgetting(self) -> ObjectCase:
        """The case without its record of evaluated keys."""
        return (
            self
            if self.evaluated == NOTHING_EVALUATED
            else replace(self, evaluated=NOTHING_EVALUATED)
        )


ANY = ObjectCase()


def united(cases: list[ObjectCase]) -> list[ObjectCase]:
    """The same with one debt in place of all cases that constrain only one key: a conjunction of
    many such disjunctions then need not be multiplied out."""
    said = [_said(case) for case in cases]
    debt = frozenset(entry for entry in said if entry is not None)
    if len(debt) < 2:
        return cases
    others = [case for case, entry in zip(cases, said) if entry is None]
    return [*others, ObjectCase(owed=frozenset({debt}))]


def _said(case: ObjectCase) -> tuple[Keys, Signed] | None:
    """The case's only constraint, as an entry of a debt."""
    if case.least or case.most is not None or case.evaluated != NOTHING_EVALUATED:
        return None
    if len(case.owed) == 1 and not case.values and not case.required:
        (debt,) = case.owed
        return next(iter(debt)) if len(debt) == 1 else None
    if case.owed or len(case.values) > 1:
        return None
    if not case.values:
        return (next(iter(case.required)), TRUE) if len(case.required) == 1 else None
    ((keys, signed),) = case.values
    if not isinstance(keys, str):
        return None
    if signed == FALSE and not case.required:
        return keys, FALSE
    return (keys, signed) if signed != FALSE and case.required == {keys} else None


def absorbed(cases: list[ObjectCase]) -> list[ObjectCase]:
    """The cases without those that require all that another one does, and more."""
    kept: list[tuple[ObjectCase, frozenset[tuple[Keys, Signed]]]] = []
    for case in sorted(cases, key=lambda case: len(case.values)):
        values = frozenset(case.values)
        if not any(_is_weaker(one, its, case, values) for one, its in kept):
            kept.append((case, values))
    return [case for case, _ in kept]


def _is_weaker(
    one: ObjectCase,
    its_values: frozenset[tuple[Keys, Signed]],
    other: ObjectCase,
    values: frozenset[tuple[Keys, Signed]],
) -> bool:
    return (
        its_values <= values
        and one.required <= other.required
        and one.owed <= other.owed
        and one.least <= other.least
        and (one.most is None or (other.most is not None and other.most <= one.most))
        and one.evaluated == other.evaluated
    )
