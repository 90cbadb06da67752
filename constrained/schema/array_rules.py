"""Arrays as rules: the first items one by one, then a repetition; counters form an automaton."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TypeAlias

from ..grammar import (
    NOTHING,
    Alt,
    And,
    Concat,
    Expression,
    Literal,
    Not,
    Ref,
    Repeat,
    alt,
    concat,
    repeat,
)
from ..regular.languages import finite_words
from ..seen_items import canonical_item
from .arrays import ArrayCase, Count
from .document import TRUE, Signed
from .paths import ArrayPaths
from .rule_writer import RuleWriter

MAX_UNIQUE = 8  # values per item that rules keep unique; there are 2^n sets of them
MAX_WORDS = 1000  # values per item that are listed where the output is read for repeated ones

_Counters: TypeAlias = tuple[int, ...]


def array_expression(writer: RuleWriter, case: ArrayCase) -> Expression:
    """The texts of a case's arrays."""
    paths = ArrayPaths()
    writer.note(paths)
    if case.is_unique is False:
        writer.refuse("uniqueItems", "its negation asks for two equal items", "no `not` around it")
    if case.most is not None and case.most <= 1:
        paths.is_unique = None
    elif case.is_unique:
        texts = None if case.counts else _UniqueItems(writer, case).texts()
        if texts is not None:
            paths.is_unique = None
            return texts
        paths.is_unique = _is_watched(writer, case, paths)
        if paths.is_unique is None:
            return NOTHING
    if case.counts:
        return _CountedItems(writer, case, paths).texts()
    return _plain(writer, case, paths)


def _is_watched(writer: RuleWriter, case: ArrayCase, paths: ArrayPaths) -> bool | None:
    """Whether the output is read for repeated items. None: there are too few values for any array;
    False: lenient, and it cannot be enforced."""
    if not writer.watches_items:
        reason = f"an item has more than {MAX_UNIQUE} values, and this output is not JSON alone"
        remedy = f"an `enum` of at most {MAX_UNIQUE}, `maxItems: 1`"
        writer.refuse("uniqueItems", reason, remedy)
        return False
    if any(count.least > 1 or count.most is not None for count in case.counts):
        reason = "beside `contains` with a minimum above 1 or a maximum"
        writer.refuse("uniqueItems", reason, "`contains` without `minContains` and `maxContains`")
        return False
    words = tuple(_words(writer, case, MAX_WORDS))
    for index in range(min(case.least, len(words) + MAX_WORDS)):
        texts = words[min(index, len(words) - 1)]
        if texts is None or len(set(map(canonical_item, texts))) > index:
            continue
        if len(words) == 1 and not case.counts:
            return None
        reason = f"of item {index} there may be no value left when its turn comes"
        writer.refuse("uniqueItems", reason, "a smaller `minItems`")
        return False
    paths.words = words
    return True


def _words(writer: RuleWriter, case: ArrayCase, limit: int) -> Iterator[tuple[str, ...] | None]:
    """The texts at each index, the last one for all further ones; None: more than the limit."""
    for index in range(case.boundary + 1):
        if index and case.most is not None and index >= case.most:
            return
        value = writer.value(case.item_state(index) - {TRUE})
        yield None if _has_rule(value) else finite_words(value, limit)


def _plain(writer: RuleWriter, case: ArrayCase, paths: ArrayPaths) -> Expression:
    spacing, most, boundary = writer.spacing, case.most, case.boundary
    if most is not None:
        boundary = min(boundary, most)
    paths.items = [(i, i + 1, case.item_state(i) - {TRUE}) for i in range(boundary)]
    paths.items.append((boundary, None, case.item_state(boundary) - {TRUE}))
    item = writer.value(case.item_state(boundary) - {TRUE})
    further = None if most is None else most - boundary
    tail: Expression
    if boundary == 0:
        if item == NOTHING or further == 0:
            return spacing.empty_array if case.least == 0 else NOTHING
        rest = repeat(
            concat(spacing.comma, item),
            max(case.least - 1, 0),
            None if further is None else further - 1,
        )
        some = concat(item, rest, spacing.close_array)
        if case.least == 0:
            some = alt(some, Literal("]"))
        return concat(spacing.open_array, some)
    tail = concat(
        repeat(concat(spacing.comma, item), max(case.least - boundary, 0), further),
        spacing.close_array,
    )
    for index in range(boundary - 1, -1, -1):
        own = writer.value(case.item_state(index) - {TRUE})
        tail = concat(*([spacing.comma] if index else []), own, tail)
        if index >= case.least:
            end = spacing.close_array if index else Literal("]")
            tail = alt(end, tail)
            if index:
                tail = writer.new_rule(tail)
    return concat(spacing.open_array, tail)


class _CountedItems:
    """A rule for each (index, counters); both saturate where counting further is irrelevant."""

    def __init__(self, writer: RuleWriter, case: ArrayCase, paths: ArrayPaths) -> None:
        self.writer = writer
        self.case = case
        self.paths = paths
        self.counts = sorted(case.counts, key=repr)
        self.last = max(case.boundary, case.least, 1) if case.most is None else case.most
        self._rules: dict[tuple[int, _Counters], str] = {}
        self._queue: list[tuple[int, _Counters]] = []

    def texts(self) -> Expression:
        start = self._rule(0, (0,) * len(self.counts))
        while self._queue:
            key = self._queue.pop()
            self.writer.rules[self._rules[key]] = alt(*self._parts(*key))
        return concat(self.writer.spacing.open_array, start)

    def _rule(self, index: int, counters: _Counters) -> Ref:
        key = (min(index, self.last), counters)
        if key not in self._rules:
            self._rules[key] = self.writer.new_name()
            self._queue.append(key)
        return Ref(self._rules[key])

    def _parts(self, index: int, counters: _Counters) -> Iterator[Expression]:
        case, spacing = self.case, self.writer.spacing
        is_met = all(n >= c.least for n, c in zip(counters, self.counts))
        if index >= case.least and is_met:
            yield spacing.close_array if index else Literal("]")
        if case.most is not None and index >= case.most:
            return
        comma = [spacing.comma] if index else []
        base = case.item_state(index)
        choices = [self._choices(c, index, n) for c, n in zip(self.counts, counters)]
        for chosen in product(*choices):
            state = base.union(signed for signed, _ in chosen) - {TRUE}
            value = self.writer.value(state)
            if value != NOTHING:
                stop = None if index >= self.last else index + 1
                self.paths.items.append((index, stop, state))
                after = self._rule(index + 1, tuple(n for _, n in chosen))
                yield concat(*comma, value, after)

    def _choices(self, count: Count, index: int, counted: int) -> list[tuple[Signed, int]]:
        """The item's constraint, and the counter after it. Under a maximum it must be known whether
        an item counts; for a minimum it is enough that some do."""
        if index < count.start or (count.stop is not None and index >= count.stop):
            return [(TRUE, counted)]
        if count.most is None:
            if counted >= count.least:
                return [(TRUE, counted)]
            return [(count.item, counted + 1), (TRUE, counted)]
        choices = [(-count.item, counted)]
        if counted < count.most:
            choices.append((count.item, counted + 1))
        return choices


class _UniqueItems:
    """Unique items from few values: a rule for each set of values already written."""

    def __init__(self, writer: RuleWriter, case: ArrayCase) -> None:
        self.writer = writer
        self.case = case
        self._rules: dict[frozenset[str], str] = {}
        self._queue: list[frozenset[str]] = []

    def texts(self) -> Expression | None:
        """None where there are too many values."""
        words = []
        for texts in _words(self.writer, self.case, MAX_UNIQUE):
            if texts is None:
                return None
            words.append(texts)
        start = self._rule(frozenset())
        while self._queue:
            used = self._queue.pop()
            self.writer.rules[self._rules[used]] = alt(*self._parts(used, words))
        return concat(self.writer.spacing.open_array, start)

    def _rule(self, used: frozenset[str]) -> Ref:
        if used not in self._rules:
            self._rules[used] = self.writer.new_name()
            self._queue.append(used)
        return Ref(self._rules[used])

    def _parts(self, used: frozenset[str], words: list[tuple[str, ...]]) -> Iterator[Expression]:
        spacing, index = self.writer.spacing, len(used)
        if index >= self.case.least:
            yield spacing.close_array if index else Literal("]")
        if self.case.most is not None and index >= self.case.most:
            return
        for word in words[min(index, len(words) - 1)]:
            if word not in used:
                comma = [spacing.comma] if index else []
                yield concat(*comma, Literal(word), self._rule(used | {word}))


def _has_rule(expression: Expression) -> bool:
    match expression:
        case Ref():
            return True
        case Concat(parts) | Alt(parts) | And(parts):
            return any(map(_has_rule, parts))
        case Repeat(part) | Not(part):
            return _has_rule(part)
    return False
