"""Objects as right-linear rules: the listed keys in order, then the free ones.

Without counts the rules are a chain, linear in the number of keys:

    first_i = key_i more_i+1 | first_i+1        nothing is written yet
    more_i  = ("," key_i)? more_i+1             something is

With counts and debts (see `ObjectCase`) a rule is a position in the chain, the number of keys
written and the open debts; in any order it is the set of remaining keys.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, combinations, product
from typing import TypeAlias, TypeVar

from ..grammar import (
    NOTHING,
    Alt,
    And,
    Expression,
    Literal,
    Not,
    Ref,
    alt,
    concat,
    optional,
    repeat,
)
from ..regular.languages import finite_words
from .document import FALSE, TRUE, Signed, State
from .json_text import ANY_TEXT, encoded, json_string
from .objects import Debt, Keys, KeySet, ObjectCase, is_key_in
from .paths import ObjectPaths
from .rule_writer import RuleWriter
from .strings import Language

MAX_PATTERNS = 6
MAX_LISTED_WORDS = 20  # a class with at most this many keys is listed, so that none can repeat
MAX_ANY_ORDER = 6
MAX_PLACED_DEBTS = 4  # with more, keys that only other cases name are free: rules are places * 2^n
MAX_PLACED_KEYS = 300  # also with more keys in all cases of a state together: 0.2 s
MAX_COUNTING_RULES = 8000  # of all objects together; a second or so
# keywords whose branches become debts, and those that count
_MULTIPLYING = ("oneOf", "not", "if", "anyOf", "allOf", "minProperties", "maxProperties", "$ref")

_T = TypeVar("_T")
_Place: TypeAlias = int | frozenset[int]
_Key: TypeAlias = tuple[_Place, int, frozenset[Debt]]
"""The next listed key or those that are left; keys written; debts that are still open."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A listed key, or the free keys of one class; `key` is their JSON text."""

    key: Expression
    state: State
    name: str | None
    inside: frozenset[Language] = frozenset()
    outside: frozenset[Language] = frozenset()

    def payments(self, debt: Debt) -> list[Signed]:
        """The constraints on its value that would pay the debt."""
        return [signed for keys, signed in debt if signed != FALSE and self._is_in(keys)]

    def _is_in(self, keys: Keys) -> bool:
        if self.name is not None:
            return is_key_in(self.name, keys)
        return (
            isinstance(keys, KeySet) and keys.inside <= self.inside and keys.outside <= self.outside
        )


def object_expression(
    writer: RuleWriter, case: ObjectCase, order: dict[str, None], num_cases: int
) -> Expression:
    """The texts of the objects of one of a state's cases; `order` ranks the keys of all cases."""
    is_placed = (
        writer.property_order != "any"
        and len(case.owed) <= MAX_PLACED_DEBTS
        and len(order) * num_cases <= MAX_PLACED_KEYS
    )
    rules = _ObjectRules(writer, case, order, is_placed)
    if not rules.is_possible:
        return NOTHING
    if writer.property_order == "any":
        return rules.any_order()
    return rules.counted() if rules.has_counts else rules.chain()


class _ObjectRules:
    """The rules of one case. `is_placed`: keys that only other cases name are also placed in the
    order, so that no key's position depends on the case."""

    def __init__(
        self, writer: RuleWriter, case: ObjectCase, order: dict[str, None], is_placed: bool
    ) -> None:
        self.writer = writer
        self.case = case
        self.listed: list[Entry] = []
        self.free: list[Entry] = []
        self.is_possible = True
        self._list(order, is_placed)
        self._find_free()
        listed = {entry.name for entry in self.listed}
        self._paths = ObjectPaths(
            frozenset(name for name in listed if name is not None),
            [(entry.name, entry.state - {TRUE}) for entry in (*self.listed, *self.free)],
        )
        writer.note(self._paths)
        self.owed = frozenset(
            debt
            for debt in case.owed
            if not any(isinstance(k, str) and s == FALSE and k not in listed for k, s in debt)
        )
        self.least = case.least if case.least > len(case.required) else 0
        self.most = case.most
        if not self.free and self.most is not None and self.most >= len(self.listed):
            self.most = None
        self.has_counts = bool(self.least or self.most is not None or self.owed)
        self._rules: dict[_Key, str] = {}
        self._queue: list[tuple[str, _Key]] = []

    def _list(self, order: dict[str, None], is_placed: bool) -> None:
        case = self.case
        named = dict.fromkeys(case.named())
        for keys, _ in (*case.values, *chain.from_iterable(case.owed)):
            named.update(dict.fromkeys([keys] if isinstance(keys, str) else sorted(keys.names)))
        self._named = {name: None for name in order if is_placed or name in named} | named
        self._states = case.value_states(self._named)
        for name in self._named:
            self._add_name(name)

    def _add_name(self, name: str) -> None:
        state = self._states[name] - {TRUE}
        if self.writer.value(state) != NOTHING:
            self.listed.append(Entry(Literal(encoded(name)), state, name))
        elif name in self.case.required:
            self.is_possible = False

    def _find_free(self) -> None:
        """Classes of keys by the patterns that they match; classes of few keys are listed."""
        sets = [(k, s) for k, s in self.case.values if isinstance(k, KeySet)]
        owed = [k for k, _ in chain.from_iterable(self.case.owed) if isinstance(k, KeySet)]
        keys = [*(k for k, _ in sets), *owed]
        patterns = list(dict.fromkeys(p for k in keys for p in (*k.inside, *k.outside)))
        if len(patterns) > MAX_PATTERNS:
            self.writer.refuse(
                "patternProperties",
                f"{len(patterns)} patterns over the same keys, at most {MAX_PATTERNS} can be",
                "fewer patterns, united by `|`",
            )
        has_forbidden_keys = False
        for inside in _subsets(patterns):
            outside = frozenset(patterns) - inside
            state = frozenset(
                s for k, s in sets if s != TRUE and k.inside <= inside and k.outside <= outside
            )
            if self.writer.value(state) == NOTHING:
                has_forbidden_keys = True
                continue
            names = [n for n in self._named if KeySet(inside, outside).has(n)]
            language = _key_language(inside, outside, names)
            words = finite_words(language, MAX_LISTED_WORDS) if patterns else None
            if words is None:
                key = json_string(language)
                self.free.append(Entry(key, state, None, inside, outside))
                self.writer.needs_unique_keys = True
            for word in words or ():
                self.listed.append(Entry(Literal(encoded(word)), state, word))
        # Where all classes are free, each text begins keys without end.
        self.writer.has_patterned_keys |= bool(self.free) and has_forbidden_keys

    def chain(self) -> Expression:
        """The rules without counts."""
        spacing = self.writer.spacing
        members = [self._member(entry) for entry in self.listed]
        free = alt(*(self._member(entry) for entry in self.free)) if self.free else NOTHING
        more: list[Expression] = [spacing.close_object, repeat(concat(spacing.comma, free), 0)]
        firsts: list[Expression] = [Literal("}")]
        if free != NOTHING:
            firsts.append(concat(free, *reversed(more)))
        required = self.case.required
        needed = next((i for i, e in enumerate(self.listed) if e.name in required), len(members))
        for index in range(len(members) - 1, -1, -1):
            member, is_needed = members[index], self.listed[index].name in required
            if index <= needed:
                more = [self._shared(more)]
                firsts = [*([] if is_needed else firsts), concat(member, *more)]
            follow = concat(spacing.comma, member)
            more.append(follow if is_needed else optional(follow))
        return concat(spacing.open_object, firsts[0] if len(firsts) == 1 else Alt(tuple(firsts)))

    def _shared(self, reversed_parts: list[Expression]) -> Expression:
        """The end of a chain as its own rule, since it is used more than once."""
        expression = concat(*reversed(reversed_parts))
        if isinstance(expression, (Literal, Ref)):
            return expression
        return self.writer.new_rule(expression)

    def _member(self, entry: Entry, further: Iterable[Signed] = ()) -> Expression:
        value = self.writer.value(entry.state.union(further) - {TRUE})
        return concat(entry.key, self.writer.spacing.colon, value)

    def counted(self) -> Expression:
        """With counts and debts: a rule for each (place, keys written, open debts)."""
        return self._written_from(0)

    def any_order(self) -> Expression:
        """A rule for each set of remaining listed keys."""
        if len(self.listed) > MAX_ANY_ORDER:
            reason = f"{len(self.listed)} properties in any order; at most {MAX_ANY_ORDER} can be"
            self.writer.refuse("properties", reason, '`property_order: "schema"`')
            return self.chain()
        return self._written_from(frozenset(range(len(self.listed))))

    def _written_from(self, place: _Place) -> Expression:
        start = self._rule((place, 0, self.owed))
        while self._queue:
            self._write(*self._queue.pop())
            if self.writer.num_rules > MAX_COUNTING_RULES:
                self.writer.refuse_one_of(
                    _MULTIPLYING,
                    f"its objects take more than {MAX_COUNTING_RULES} rules",
                    "smaller counts, or branches with a required property whose `const` tells them "
                    "apart",
                )
                return self.chain()
        return concat(self.writer.spacing.open_object, start)

    def _rule(self, key: _Key) -> Ref:
        place, count, missing = key
        cap = max(self.least, 1) if self.most is None else self.most
        key = (place, min(count, cap), missing)
        if key not in self._rules:
            self._rules[key] = self.writer.new_name()
            self._queue.append((self._rules[key], key))
        return Ref(self._rules[key])

    def _write(self, name: str, key: _Key) -> None:
        place, count, missing = key
        parts: list[Expression] = []
        may_add = self.most is None or count < self.most
        if isinstance(place, int):
            if place < len(self.listed):
                entry = self.listed[place]
                if may_add:
                    parts += self._written(entry, place + 1, count, missing)
                if entry.name not in self.case.required:
                    parts.append(self._rule((place + 1, count, _unpaid(missing, {entry.name}))))
                self.writer.rules[name] = alt(*parts)
                return
            is_over = True
        else:
            is_over = not any(self.listed[i].name in self.case.required for i in place)
            for index in sorted(place) if may_add else ():
                parts += self._written(self.listed[index], place - {index}, count, missing)
        if isinstance(place, int) and not missing:
            parts.append(self._free_tail(count))
        else:
            for entry in self.free if may_add else ():
                parts += self._written(entry, place, count, missing)
            left = {self.listed[i].name for i in place} if isinstance(place, frozenset) else set()
            if is_over and not _unpaid(missing, left) and count >= self.least:
                parts.append(self._close(count))
        self.writer.rules[name] = alt(*parts)

    def _written(
        self,
        entry: Entry,
        place: _Place,
        count: int,
        missing: frozenset[Debt],
    ) -> Iterator[Expression]:
        """One more member, which may or may not pay debts."""
        comma = [self.writer.spacing.comma] if count else []
        payable = {debt: entry.payments(debt) for debt in missing}
        for paid in _subsets([debt for debt, payments in payable.items() if payments]):
            for asked in product(*(payable[debt] for debt in paid)):
                state = entry.state.union(asked) - {TRUE}
                if self.writer.value(state) != NOTHING:
                    self._paths.members.append((entry.name, state))
                    member = self._member(entry, asked)
                    yield concat(*comma, member, self._rule((place, count + 1, missing - paid)))

    def _free_tail(self, count: int) -> Expression:
        """Free keys up to the end, as many as the counts allow."""
        spacing = self.writer.spacing
        least = max(self.least - count, 0)
        most = None if self.most is None else self.most - count
        free = alt(*(self._member(entry) for entry in self.free)) if self.free else NOTHING
        if count or most == 0:
            if most is not None and least > most:
                return NOTHING
            return concat(repeat(concat(spacing.comma, free), least, most), self._close(count))
        rest = repeat(
            concat(spacing.comma, free), max(least - 1, 0), None if most is None else most - 1
        )
        some = concat(free, rest, spacing.close_object)
        return alt(some, Literal("}")) if least == 0 else some

    def _close(self, count: int) -> Expression:
        return self.writer.spacing.close_object if count else Literal("}")


def _unpaid(owed: frozenset[Debt], missing: Container[str | None]) -> frozenset[Debt]:
    """The debts that the remaining keys cannot pay."""
    return frozenset(debt for debt in owed if not any(k in missing and s == FALSE for k, s in debt))


def _key_language(
    inside: frozenset[Language], outside: frozenset[Language], names: list[str]
) -> Expression:
    parts = [*(part.expression for part in inside), *(Not(part.widest) for part in outside)]
    if names:
        parts.append(Not(alt(*map(Literal, names))))
    if not parts:
        return ANY_TEXT
    return parts[0] if len(parts) == 1 else And(tuple(parts))


def _subsets(items: list[_T]) -> Iterator[frozenset[_T]]:
    for size in range(len(items) + 1):
        yield from map(frozenset, combinations(items, size))
