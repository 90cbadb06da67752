"""Expands signed places to disjunctions of constraints on each JSON type.

A schema is an alternating tree automaton: a conjunction and negation of places at each value. This
step makes it nondeterministic: for one type of value the boolean applicators of a place (`$ref`,
`allOf`, `anyOf`, `oneOf`, `not`, `if`, `enum`, dependencies) are multiplied out to cases, each a
conjunction of typed constraints; a keyword for another type has no effect, so its negation holds
for no value of this type. Constraints on items and properties stay signed places.

Exponential in the worst case; contradictory cases are dropped as they arise, branches of `oneOf`
that exclude each other are not negated, and beyond MAX_CASES the keyword is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from typing import TypeAlias

from ...errors import LENIENT, InvalidGrammar, UnsupportedSchema
from ..seen_items import canonical_item
from . import assertions, numbers, objects, strings
from .cases import ANY_OF, CONSTANT, Case, Cases, Kind, kind_of
from .document import FALSE, TRUE, Document, Place, Signed, State
from .keywords import Dialect

_OF_CASES = ("enum", "oneOf", "anyOf", "if", "dependentSchemas", "not")  # the likeliest first
MAX_CASES = 2000
MAX_MERGES = 300_000  # of all products together: about a second
NUM_WORTH_UNITING = 16


_KINDS_OF_TYPE = {
    "null": (Kind.NULL,),
    "boolean": (Kind.FALSE, Kind.TRUE),
    "integer": (Kind.NUMBER,),
    "number": (Kind.NUMBER,),
    "string": (Kind.STRING,),
    "array": (Kind.ARRAY,),
    "object": (Kind.OBJECT,),
}
_KINDS = tuple(Kind)
Tags: TypeAlias = dict[str, frozenset[str]]
"""By the name of a required property its values, as `canonical_item` writes them."""
_ALL_KINDS = frozenset(Kind)
_TYPES_OF_KIND = ("null", "boolean", "boolean", "number", "string", "array", "object")


class SelfReference(InvalidGrammar):
    """A place defined by itself, at the same value."""


class Expansion:
    """The cases of places and of states, each computed once."""

    def __init__(
        self, document: Document, *, asserts_format: bool = True, is_lenient: bool = False
    ) -> None:
        self.document = document
        self.asserts_format = asserts_format
        self.is_lenient = is_lenient
        self.warnings: dict[str, None] = {}
        self.dropped: dict[tuple[str, str, str], UnsupportedSchema] = {}
        self._cases: dict[tuple[Signed, Kind, bool], Cases] = {}
        self._pending: set[tuple[Signed, Kind, bool]] = set()
        self._kinds: dict[Signed, frozenset[Kind]] = {}
        self._void: dict[State, bool] = {}
        self._num_merges = 0

    def unsupported(self, place: Place, keyword: str, reason: str, remedy: str = "") -> None:
        """Strict: raises UnsupportedSchema. Lenient: notes it; the caller drops the keyword."""
        error = UnsupportedSchema(place.pointer, keyword, reason, _or_lenient(remedy))
        if not self.is_lenient:
            raise error
        self._note(error)

    def state_cases(self, state: State, kind: Kind) -> Cases:
        """The cases of a value of this kind in the state: any of these; [] is nothing."""
        if len(state) == 1:
            return self.cases(next(iter(state)), kind)
        if any(-signed in state for signed in state):
            return []
        if state:
            last = self.document[max(state)]
            factors = (self.cases(signed, kind) for signed in sorted(state))
            try:
                return self.product(last, "allOf", kind, factors)
            except UnsupportedSchema as error:
                return self._dropped(error, kind)
        return [ANY_OF[kind]]

    def kinds(self, state: State) -> Iterable[Kind]:
        """The kinds that a state may allow: those of the types and constants that it names."""
        found: frozenset[Kind] = _ALL_KINDS
        for signed in state:
            if signed > TRUE:
                found &= self._kinds_at(signed)
        return _KINDS if found is _ALL_KINDS else sorted(found)

    def _kinds_at(self, number: Signed) -> frozenset[Kind]:
        """The kinds that a place may allow; all of them while they are being found."""
        found = self._kinds.get(number)
        if found is None:
            self._kinds[number] = _ALL_KINDS
            try:
                found = self._kinds_of(self.document[number])
            except InvalidGrammar:  # found again, and reported, with the cases
                found = _ALL_KINDS
            self._kinds[number] = found
        return found

    def _kinds_of(self, place: Place) -> frozenset[Kind]:
        schema, document, found = place.schema, self.document, _ALL_KINDS
        if "$ref" in schema:
            target = document.target(place, "$ref")
            found = self._kinds_at(target) if target > TRUE else _ALL_KINDS
            if place.dialect <= Dialect.DRAFT7:
                return found
        if "type" in schema:
            named = schema["type"]
            found &= _kinds_of([named] if isinstance(named, str) else named)
        if "const" in schema and place.dialect >= Dialect.DRAFT6:
            found &= {kind_of(schema["const"])}
        if "enum" in schema:
            found &= set(map(kind_of, schema["enum"]))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                branches = self._branches(place, keyword)
                either = (self._kinds_at(one) for one in branches if one > TRUE)
                if TRUE not in branches:
                    found &= frozenset().union(*either)
        for one in self._branches(place, "allOf") if "allOf" in schema else ():
            if one > TRUE:
                found &= self._kinds_at(one)
        return found

    def is_void(self, state: State) -> bool:
        """Whether the state plainly allows no value."""
        known = self._void.get(state)
        if known is None:
            self._void[state] = False  # reached again within itself: not plain
            try:
                known = not any(self.state_cases(state, kind) for kind in self.kinds(state))
            except SelfReference:  # of a value within: no error, but not plain either
                del self._void[state]
                return False
            self._void[state] = known
        return known

    def cases(self, signed: Signed, kind: Kind, is_tracked: bool = False) -> Cases:
        """The cases of one signed place. Tracked: they record what was evaluated in place."""
        if abs(signed) == TRUE:
            return [ANY_OF[kind]] if signed == TRUE else []
        key = (signed, kind, is_tracked)
        found = self._cases.get(key)
        if found is None:
            if key in self._pending:
                place = self.document[signed]
                raise SelfReference(
                    f"{place.pointer or '/'}: the schema refers to itself without progress",
                    "json_schema",
                )
            self._pending.add(key)
            try:
                found = self._cases[key] = self._expanded(signed, kind, is_tracked)
            except UnsupportedSchema as error:
                found = self._cases[key] = self._dropped(error, kind)
            finally:
                self._pending.discard(key)
        return found

    def product(
        self, place: Place, keyword: str, kind: Kind, factors: Iterable[Cases | None]
    ) -> Cases:
        """The conjunction of all factors; None has no effect."""
        result: Cases | None = None
        for factor in factors:
            if factor is None:
                continue
            if result is None and len(factor) <= NUM_WORTH_UNITING:
                product: Cases | None = _distinct(factor)
            else:
                product = self._times([ANY_OF[kind]] if result is None else result, factor)
            if product is None:
                raise _too_many_cases(place, keyword)
            result = product
            if not result:
                return result
        return [ANY_OF[kind]] if result is None else result

    def _dropped(self, error: UnsupportedSchema, kind: Kind) -> Cases:
        """Strict: raises the error. Lenient: a warning instead, and any value."""
        if not self.is_lenient:
            raise error
        self._note(error)
        return [ANY_OF[kind]]

    def _note(self, error: UnsupportedSchema) -> None:
        place = f"{error.pointer or '/'}: {error.keyword}"
        self.warnings[f"{place} is not enforced: {error.reason}"] = None
        self.dropped.setdefault((error.pointer, error.keyword, error.reason), error)

    def _times(self, one: Cases, other: Cases) -> Cases | None:
        """Every case of one with every case of the other; None where there are too many."""
        product = self._multiplied(one, other)
        if len(product) > NUM_WORTH_UNITING and isinstance(product[0], objects.ObjectCase):
            united = self._multiplied(objects.united(one), objects.united(other))
            if 4 * len(united) <= len(product):  # else dropping contradictions gains more
                product = united
            product = objects.absorbed(product[: MAX_CASES + 1])
        is_over = self._num_merges > MAX_MERGES or len(product) > MAX_CASES
        return None if is_over else product

    def _multiplied(self, one: Cases, other: Cases) -> Cases:
        self._num_merges += len(one) * len(other)
        if self._num_merges > MAX_MERGES:
            return []
        merged = (self._merged(a, b) for a in one for b in other)
        return _distinct([case for case in merged if case is not None])

    def _merged(self, one: Case, other: Case) -> Case | None:
        merged = one.merged(other)
        if merged is None or merged is one or merged is other:
            return merged
        if isinstance(merged, objects.ObjectCase) and self._is_contradiction(one, other, merged):
            return None
        return merged

    def _is_contradiction(
        self, one: objects.ObjectCase, other: objects.ObjectCase, merged: objects.ObjectCase
    ) -> bool:
        """Whether no value is left for a required key."""
        for name in merged.required:
            state = merged.value_state(name)
            if len(state) < 2 and FALSE not in state:
                continue
            is_new = name not in one.required or name not in other.required
            if (is_new or len(state) > len(one.value_state(name))) and self.is_void(state - {TRUE}):
                return True
        return False

    def _expanded(self, signed: Signed, kind: Kind, is_tracked: bool) -> Cases:
        place = self.document[signed]
        if place.alternatives is not None:
            parts = [self.cases(s if signed > 0 else -s, kind) for s in place.alternatives]
            return _union(parts) if signed > 0 else self.product(place, "anyOf", kind, parts)
        unevaluated = _UNEVALUATED.get(kind)
        if unevaluated in place.schema and place.dialect >= Dialect.D2019:
            found = self._with_unevaluated(place, kind, signed > 0, str(unevaluated))
        elif signed > 0:
            found = self.product(place, "allOf", kind, self._factors(place, kind, True, is_tracked))
        else:
            return _union(self._factors(place, kind, False, False))
        if not is_tracked and kind >= Kind.ARRAY:
            return _distinct([case.forgetting() for case in found])
        return found

    def _with_unevaluated(self, place: Place, kind: Kind, is_positive: bool, keyword: str) -> Cases:
        rest = self.document.child(place, keyword)
        evaluated = self.product(place, keyword, kind, self._factors(place, kind, True, True))
        extend = (
            assertions.unevaluated_items
            if kind == Kind.ARRAY
            else (assertions.unevaluated_properties)
        )
        found = [extend(self, place, case, rest, is_positive) for case in evaluated]
        if is_positive:
            return [case for case in found if case is not None]
        unmet = _union(self._factors(place, kind, False, False))
        return unmet + [case.forgetting() for case in found if case is not None]

    def _factors(
        self, place: Place, kind: Kind, is_positive: bool, is_tracked: bool
    ) -> Iterator[Cases | None]:
        """Each keyword's constraint, or its violation; None: no effect either way."""
        schema = place.schema
        if "$ref" in schema and place.dialect <= Dialect.DRAFT7:
            try:
                yield self._reference(place, "$ref", kind, is_positive, is_tracked)
            except UnsupportedSchema as error:
                yield self._dropped(error, kind)
            return
        typed = assertions.BY_KIND[kind]
        if typed is not None:  # first: required keys turn branches into contradictions
            yield from typed(self, place, is_positive, is_tracked)
        for keyword in schema:
            handler = _APPLICATORS.get(keyword)
            if handler is not None:
                try:
                    yield handler(self, place, keyword, kind, is_positive, is_tracked)
                except UnsupportedSchema as error:
                    yield self._dropped(error, kind)

    def _reference(
        self, place: Place, keyword: str, kind: Kind, is_positive: bool, is_tracked: bool
    ) -> Cases | None:
        target = self.document.target(place, keyword)
        return self.cases(target if is_positive else -target, kind, is_tracked and is_positive)

    def _type(
        self, place: Place, keyword: str, kind: Kind, is_positive: bool, is_tracked: bool
    ) -> Cases | None:
        named = place.schema["type"]
        types = (named,) if isinstance(named, str) else named
        if _TYPES_OF_KIND[kind] in types:
            return None if is_positive else []
        if kind == Kind.NUMBER and "integer" in types:
            return [numbers.INTEGER if is_positive else numbers.NOT_INTEGER]
        return [] if is_positive else [ANY_OF[kind]]

    def _values(
        self, place: Place, keyword: str, kind: Kind, is_positive: bool, is_tracked: bool
    ) -> Cases | None:
        if keyword == "const" and place.dialect < Dialect.DRAFT6:
            return None
        values = place.schema[keyword] if keyword == "enum" else [place.schema[keyword]]
        same = [value for value in values if kind_of(value) == kind]
        if kind >= Kind.ARRAY:
            signs = [assertions.literal_place(self.document, place, value) for value in same]
            parts = [self.cases(s if is_positive else -s, kind) for s in signs]
            return _union(parts) if is_positive else self.product(place, keyword, kind, parts)
        if not same:
            return [] if is_positive else [ANY_OF[kind]]
        if kind == Kind.STRING:
            if is_positive:
                return [strings.StringCase(values=frozenset(same))]
            return [strings.not_of_values(same)]
        if kind == Kind.NUMBER:
            return [numbers.of_values(same) if is_positive else numbers.not_of_values(same)]
        return [CONSTANT] if is_positive else []

    def _branches(self, place: Place, keyword: str) -> list[Signed]:
        return [
            self.document.child(place, keyword, index)
            for index in range(len(place.schema[keyword]))
        ]

    def _all_of(
        self, place: Place, keyword: str, kind: Kind, is_positive: bool, is_tracked: bool
    ) -> Cases | None:
        branches = self._branches(place, keyword)
        if is_positive:
            parts = (self.cases(branch, kind, is_tracked) for branch in branches)
            return self.product(place, keyword, kind, parts)
        return _union(self.cases(-branch, kind) for branch in branches)

    def _any_of(
        self, place: Place, keyword: str, kind: Kind, is_positive: bool, is_tracked: bool
    ) -> Cases | None:
        branches = self._branches(place, keyword)
        if not is_positive:
            parts = (self.cases(-branch, kind) for branch in branches)
            return self.product(place, keyword, kind, parts)
        if not is_tracked:
            return _union(self.cases(branch, kind) for branch in branches)
        either = [self.cases(b, kind, True) + self.cases(-b, kind) for b in branches]
        some = _union(self.cases(branch, kind) for branch in branches)
        return self.product(place, keyword, kind, [*either, some])

    def _one_of(
        self, place: Place, keyword: str, kind: Kind, is_positive: bool, is_tracked: bool
    ) -> Cases | None:
        branches = self._branches(place, keyword)
        tags = [self._tags(branch, kind) for branch in branches]
        overlaps = {
            (i, j)
            for i, j in combinations(range(len(branches)), 2)
            if not _are_apart(tags[i], tags[j]) and self._overlap(branches[i], branches[j], kind)
        }
        parts: list[Cases] = []
        if is_positive:
            for i, branch in enumerate(branches):
                others = [
                    self.cases(-other, kind)
                    for j, other in enumerate(branches)
                    if (min(i, j), max(i, j)) in overlaps
                ]
                own = self.cases(branch, kind, is_tracked)
                parts.append(self.product(place, keyword, kind, [*others, own]))
            return _union(parts)
        parts.append(
            self.product(place, keyword, kind, (self.cases(-branch, kind) for branch in branches))
        )
        for i, j in sorted(overlaps):
            both = (self.cases(branches[i], kind), self.cases(branches[j], kind))
            parts.append(self.product(place, keyword, kind, both))
        return _union(parts)

    def _tags(self, branch: Signed, kind: Kind) -> Tags:
        """Of required properties that have few values, these: they tell most branches apart."""
        found: Tags | None = None
        for case in self.cases(branch, kind):
            if not isinstance(case, objects.ObjectCase):
                return {}
            names = case.required if found is None else found.keys() & case.required
            states = case.value_states(names)
            own = {name: self._constants(states[name]) for name in names}
            found = {
                name: values | (found or {}).get(name, frozenset())
                for name, values in own.items()
                if values is not None
            }
        return found or {}

    def _constants(self, state: State) -> frozenset[str] | None:
        """What a value of the state is among at least; None where no constants say."""
        for signed in state:
            place = self.document[signed]
            if signed <= TRUE or ("$ref" in place.schema and place.dialect <= Dialect.DRAFT7):
                continue
            if "const" in place.schema and place.dialect >= Dialect.DRAFT6:
                return frozenset({canonical_item(json.dumps(place.schema["const"]))})
            if "enum" in place.schema:
                return frozenset(canonical_item(json.dumps(v)) for v in place.schema["enum"])
        return None

    def _overlap(self, one: Signed, other: Signed, kind: Kind) -> bool:
        """Whether some value may be valid under both; always for the same branch twice."""
        ours, theirs = self.cases(one, kind), self.cases(other, kind)
        return any(self._merged(a, b) is not None for a in ours for b in theirs)

    def _not(
        self, place: Place, keyword: str, kind: Kind, is_positive: bool, is_tracked: bool
    ) -> Cases | None:
        inner = self.document.child(place, "not")
        return self.cases(-inner if is_positive else inner, kind)

    def _if(
        self, place: Place, keyword: str, kind: Kind, is_positive: bool, is_tracked: bool
    ) -> Cases | None:
        schema = place.schema
        has_branch = "then" in schema or "else" in schema
        if place.dialect < Dialect.DRAFT7 or not (has_branch or is_tracked):
            return None
        condition = self.document.child(place, "if")
        parts = []
        for branch, sign in (("then", 1), ("else", -1)):
            result = self.document.child(place, branch) if branch in schema else TRUE
            result = result if is_positive else -result
            factors = (
                self.cases(sign * condition, kind, is_tracked and sign > 0),
                self.cases(result, kind, is_tracked and is_positive),
            )
            parts.append(self.product(place, "if", kind, factors))
        return _union(parts)

    def _dependent(
        self, place: Place, keyword: str, kind: Kind, is_positive: bool, is_tracked: bool
    ) -> Cases | None:
        """`dependentRequired`, `dependentSchemas` and their predecessor, `dependencies`."""
        if kind != Kind.OBJECT or (keyword != "dependencies" and place.dialect < Dialect.D2019):
            return None
        parts = []
        for name, entry in place.schema[keyword].items():
            if isinstance(entry, list):
                follow = assertions.required(entry, is_positive)
            else:
                inner = self.document.child(place, keyword, name)
                follow = self.cases(
                    inner if is_positive else -inner, kind, is_tracked and is_positive
                )
            present = self.product(
                place, keyword, kind, [[objects.ObjectCase(required=frozenset({name}))], follow]
            )
            absent = [objects.ObjectCase(values=((name, FALSE),))] if is_positive else []
            parts.append(absent + present)
        return self.product(place, keyword, kind, parts) if is_positive else _union(parts)


def _are_apart(one: Tags, other: Tags) -> bool:
    """Whether the values of some property exclude each other."""
    return any(name in other and values.isdisjoint(other[name]) for name, values in one.items())


def _kinds_of(types: list[str]) -> frozenset[Kind]:
    return frozenset(kind for name in types for kind in _KINDS_OF_TYPE[name])


def _too_many_cases(place: Place, keyword: str) -> UnsupportedSchema:
    """`keyword` is that of all which a place says, or one of it."""
    if keyword == "allOf" and "allOf" not in place.schema:
        keyword = next((k for k in _OF_CASES if k in place.schema), keyword)
    remedy = "tell the branches apart by a required property with a `const` of its own"
    if keyword == "enum":
        remedy = "list fewer objects and arrays"
    reason = f"it multiplies out to more than {MAX_CASES} cases"
    return UnsupportedSchema(place.pointer, keyword, reason, _or_lenient(remedy))


def _or_lenient(remedy: str) -> str:
    lenient = f"{LENIENT} and validates the finished document"
    return f"{remedy}, or {lenient}" if remedy else lenient


def _union(parts: Iterable[Cases | None]) -> Cases:
    return _distinct([case for part in parts if part for case in part])


def _distinct(cases: Cases) -> Cases:
    return cases if len(cases) < 2 else list(dict.fromkeys(cases))


_UNEVALUATED = {Kind.ARRAY: "unevaluatedItems", Kind.OBJECT: "unevaluatedProperties"}
_Handler: TypeAlias = Callable[[Expansion, Place, str, Kind, bool, bool], "Cases | None"]
_APPLICATORS: dict[str, _Handler] = {
    "type": Expansion._type,
    "enum": Expansion._values,
    "const": Expansion._values,
    "$ref": Expansion._reference,
    "$dynamicRef": Expansion._reference,
    "$recursiveRef": Expansion._reference,
    "allOf": Expansion._all_of,
    "anyOf": Expansion._any_of,
    "oneOf": Expansion._one_of,
    "not": Expansion._not,
    "if": Expansion._if,
    "dependencies": Expansion._dependent,
    "dependentRequired": Expansion._dependent,
    "dependentSchemas": Expansion._dependent,
}
