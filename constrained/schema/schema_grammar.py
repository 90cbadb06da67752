"""JSON Schema to grammar: a rule for each conjunction of places that applies to some value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal as OneOf

from ...errors import InvalidGrammar, UnsupportedSchema
from ..grammar import NOTHING, Expression, Grammar, Literal, Ref, alt
from ..item_places import ItemPlaces
from . import numbers, strings
from .array_rules import array_expression
from .cases import Cases, Kind
from .document import FALSE, TRUE, Document, Place, Signed, State
from .expansion import Expansion
from .json_text import ANY_JSON_STRING, spacing
from .keywords import Dialect
from .object_rules import object_expression
from .paths import ArrayPaths, ObjectPaths, TooManyPlaces, item_places
from .pruning import pruned

__all__ = ["SchemaGrammar", "schema_grammar"]

MAX_RULES = 12_000
MAX_KNOWN_VALUES = 4096  # texts of places that need no rule, kept for the schemas that come after

_known_values: dict[tuple[bool, tuple[object, ...]], Expression] = {}


@dataclass(frozen=True, slots=True)
class SchemaGrammar:
    """The grammar of a schema's valid documents.

    `needs_unique_keys`: some object has keys that the schema does not list, so that the grammar
    alone does not exclude a repeated key. `has_patterned_keys`: such keys must match patterns or
    `propertyNames`, so that after some text only a repeated key may remain possible. `item_places`:
    where arrays must not repeat an item, though the grammar does not exclude it.
    """

    grammar: Grammar
    warnings: tuple[str, ...]
    needs_unique_keys: bool
    has_patterned_keys: bool = False
    item_places: ItemPlaces | None = None
    dropped: tuple[UnsupportedSchema, ...] = ()  # lenient: what is not enforced


def schema_grammar(
    schema: object,
    *,
    whitespace: OneOf["compact", "flexible"] = "compact",
    property_order: OneOf["schema", "any"] = "schema",
    is_lenient: bool = False,
    dialect: str | None = None,
    asserts_format: bool = True,
    watches_items: bool = True,
) -> SchemaGrammar:
    """Exactly the valid documents, in canonical spelling; lenient: at least those.

    `dialect` (a URI or a name such as "draft7") applies to schemas without `$schema`; without
    either it is 2020-12, plus its predecessors' keywords. Raises UnsupportedSchema for what
    cannot be enforced, InvalidGrammar for a malformed schema and for one that no document
    satisfies. `watches_items`: the caller enforces `item_places`; else `uniqueItems` over items of
    many values is refused.
    """
    try:
        builder = GrammarBuilder(
            Document(schema, dialect),
            whitespace,
            property_order,
            is_lenient,
            asserts_format,
            watches_items=watches_items,
        )
        return builder.grammar()
    except RecursionError as error:
        raise InvalidGrammar("/: the schema is nested too deeply", "json_schema") from error


class GrammarBuilder:
    """Owns the rules while they are written. A state's rule is written once, from a queue, so that
    the depth of a schema is not the depth of a call stack."""

    def __init__(
        self,
        document: Document,
        whitespace: str,
        property_order: str,
        is_lenient: bool,
        asserts_format: bool,
        *,
        watches_items: bool = False,
    ) -> None:
        self.document = document
        self.expansion = Expansion(document, asserts_format=asserts_format, is_lenient=is_lenient)
        self.spacing = spacing(whitespace)
        self.property_order = property_order
        self.rules: dict[str, Expression] = {}
        self.needs_unique_keys = False
        self.has_patterned_keys = False
        self.watches_items = watches_items
        self._paths: dict[State, list[ArrayPaths | ObjectPaths]] = {}
        self._values: dict[State, Expression] = {}
        self._aliases: dict[State, State] = {}
        self._queue: list[tuple[str, State]] = []
        self.num_rules = 0
        self._state: State = frozenset()  # whose rule is being written

    def grammar(self) -> SchemaGrammar:
        """All rules, without those that match nothing."""
        root = frozenset({self.document.root}) - {TRUE}
        grammar = self.grammar_of(self.value(root))
        if grammar is None:
            raise InvalidGrammar(
                "/: the schema matches no document: what it requires excludes itself; remedy: look "
                "for a required property without a value, bounds that exclude each other, an "
                "`enum` without a member of the `type`",
                "json_schema",
            )
        places = self._item_places(root)
        return SchemaGrammar(
            grammar,
            tuple(self.expansion.warnings),
            self.needs_unique_keys,
            self.has_patterned_keys,
            places,
            tuple(self.expansion.dropped.values()),
        )

    def _item_places(self, root: State) -> ItemPlaces | None:
        is_lenient = self.expansion.is_lenient
        aliases = {s: self._paths[as_] for s, as_ in self._aliases.items() if as_ in self._paths}
        try:
            return item_places(
                {**self._paths, **aliases},
                root,
                keeps_both=is_lenient,
                on_conflict=self._warn_of_branches,
            )
        except TooManyPlaces as error:
            self.refuse("uniqueItems", str(error), "fewer kinds of arrays with unique items")
            return None

    def _warn_of_branches(self, state: State) -> None:
        """Another branch lets items repeat where the one that asks for unique ones does not."""
        self._state = state
        place = self._place("uniqueItems")
        what = "is not enforced" if self.expansion.is_lenient else "holds in every branch"
        self.expansion.warnings[
            f"{place.pointer or '/'}: uniqueItems {what}: another branch lets the items of this "
            "array repeat, and its path does not tell which one an output follows"
        ] = None

    def grammar_of(self, root: Expression) -> Grammar | None:
        """All rules that `root` needs, without those that match nothing; None where it does."""
        while self._queue:
            name, self._state = self._queue.pop()
            self.rules[name] = alt(*self._texts(self._state))
        return pruned(root, self.rules)

    def texts_by_kind(self, state: State) -> Mapping[Kind, Expression]:
        """The texts of a state's values, for each kind of which there are some."""
        if FALSE in state:
            return {}
        outer, self._state = self._state, state
        found = {
            kind: alt(*self._kind_texts(kind, self.expansion.state_cases(state, kind)))
            for kind in self.expansion.kinds(state)
        }
        self._state = outer
        return {kind: texts for kind, texts in found.items() if texts != NOTHING}

    def value(self, state: State) -> Expression:
        """The texts of a state's values; a rule where arrays or objects are among them."""
        found = self._values.get(state)
        if found is None:
            meant = self._meant(state)
            if meant != state:
                self._aliases[state] = meant
            found = self._new_value(state) if meant == state else self.value(meant)
            self._values[state] = found
        return found

    def _meant(self, state: State) -> State:
        """The state by which one is written that is the same as others."""
        if len(state) != 1:
            return state
        return frozenset({self.document.meant(next(iter(state)))}) - {TRUE}

    def new_name(self) -> str:
        """A name for a rule that is written at once."""
        self.num_rules += 1
        if self.num_rules > MAX_RULES:
            place = self._place()
            raise InvalidGrammar(
                f"{place.pointer or '/'}: the schema needs more than {MAX_RULES} rules; remedy: "
                "smaller counts (`minContains`, `minProperties`), fewer branches beside each other",
                "json_schema",
            )
        return f"r{self.num_rules}"

    def new_rule(self, expression: Expression) -> Ref:
        """A new rule for the expression."""
        name = self.new_name()
        self.rules[name] = expression
        return Ref(name)

    def note(self, paths: ArrayPaths | ObjectPaths) -> None:
        """What one case of the array or object that is being written leads to."""
        if self.watches_items:
            self._paths.setdefault(self._state, []).append(paths)

    def refuse(self, keyword: str, reason: str, remedy: str = "") -> None:
        """Strict: raises UnsupportedSchema. Lenient: a warning, and the keyword is dropped."""
        self.expansion.unsupported(self._place(keyword), keyword, reason, remedy)

    def refuse_one_of(self, keywords: Iterable[str], reason: str, remedy: str = "") -> None:
        """The same for the first of these keywords that the current state has."""
        found = next((k for k in keywords if k in self._place(k).schema), "properties")
        self.refuse(found, reason, remedy)

    def _place(self, keyword: str | None = None) -> Place:
        """The place at fault in the current state, as far as known."""
        places = [self.document[signed] for signed in sorted(self._state)]
        for place in places:
            if keyword in place.schema:
                return place
        return places[0] if places else self.document[self.document.root]

    def _new_value(self, state: State) -> Expression:
        """The same; of an equal place of another schema where there was one."""
        place = self.document[next(iter(state))] if len(state) == 1 and min(state) > 0 else None
        if place is None or place.contents is None:
            return self._made_value(state)
        key = (self.expansion.asserts_format, place.contents)
        found = _known_values.get(key)
        if found is None:
            num_warnings, num_rules = len(self.expansion.warnings), self.num_rules
            num_written = len(self.rules)
            found = self._made_value(state)
            is_whole = (num_rules, num_written) == (self.num_rules, len(self.rules))
            if is_whole and num_warnings == len(self.expansion.warnings):
                if len(_known_values) >= MAX_KNOWN_VALUES:
                    _known_values.clear()
                _known_values[key] = found
        return found

    def _made_value(self, state: State) -> Expression:
        if FALSE in state:
            return NOTHING
        kinds = self.expansion.kinds(state)
        cases = {kind: self.expansion.state_cases(state, kind) for kind in kinds}
        if cases.get(Kind.ARRAY) or cases.get(Kind.OBJECT):
            name = self.new_name()
            self._queue.append((name, state))
            return Ref(name)
        outer, self._state = self._state, state
        texts = alt(*(text for kind in cases for text in self._kind_texts(kind, cases[kind])))
        self._state = outer
        return texts

    def _texts(self, state: State) -> Iterator[Expression]:
        for kind in self.expansion.kinds(state):
            yield from self._kind_texts(kind, self.expansion.state_cases(state, kind))

    def _kind_texts(self, kind: Kind, cases: Cases) -> Iterator[Expression]:
        if not cases:
            return
        if kind < Kind.NUMBER:
            yield Literal(("null", "false", "true")[kind])
        elif kind == Kind.NUMBER:
            yield numbers.ANY_NUMBER if numbers.ANY in cases else alt(*map(self._number, cases))
        elif kind == Kind.STRING:
            if strings.ANY in cases:
                yield ANY_JSON_STRING
            else:
                yield from map(strings.json_texts, cases)
        elif kind == Kind.ARRAY:
            for case in cases:
                yield array_expression(self, case)
        else:
            order = self._order()
            for case in cases:
                yield object_expression(self, case, order, len(cases))

    def _number(self, case: numbers.NumberCase) -> Expression:
        try:
            return numbers.expression(case, self.rules.__setitem__)
        except numbers.TooManyRemainders as error:
            remedy = "a `minimum` and a `maximum` that leave at most 1,000 values, an `enum`"
            self.refuse("multipleOf", str(error), remedy)
            return numbers.expression(numbers.NumberCase(case.interval), self.rules.__setitem__)

    def _order(self) -> dict[str, None]:
        """The keys of the current state in the order in which its places first name them."""
        names: dict[str, None] = {}
        late: dict[str, None] = {}
        seen: set[Signed] = set()
        for signed in sorted(self._state, key=abs):
            _mention(self.document, abs(signed), names, late, seen)
        return names | {name: None for name in late if name not in names}


def _mention(
    document: Document,
    number: Signed,
    names: dict[str, None],
    late: dict[str, None],
    seen: set[Signed],
) -> None:
    """Keys by first mention, through in-place applicators; `late`: those only required."""
    number = abs(number)
    if number in seen:
        return
    seen.add(number)
    place = document[number]
    for signed in place.alternatives or ():
        _mention(document, signed, names, late, seen)
    schema = place.schema
    if "$ref" in schema and place.dialect <= Dialect.DRAFT7:
        _mention_target(document, place, "$ref", names, late, seen)
        return
    for keyword, value in schema.items():
        if keyword == "properties":
            names.update(dict.fromkeys(value))
        elif keyword in ("allOf", "anyOf", "oneOf"):
            for index in range(len(value)):
                _mention(document, document.child(place, keyword, index), names, late, seen)
        elif keyword in ("not", "if", "then", "else"):
            _mention(document, document.child(place, keyword), names, late, seen)
        elif keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            _mention_target(document, place, keyword, names, late, seen)
        elif keyword == "required":
            late.update(dict.fromkeys(value))
        elif keyword in ("dependencies", "dependentSchemas", "dependentRequired"):
            late.update(dict.fromkeys(value))
            for name, entry in value.items():
                if isinstance(entry, list):
                    late.update(dict.fromkeys(entry))
                else:
                    _mention(document, document.child(place, keyword, name), names, late, seen)
        elif keyword == "propertyNames" and isinstance(value, dict):
            late.update(dict.fromkeys(n for n in value.get("enum", ()) if isinstance(n, str)))
        elif keyword in ("enum", "const"):
            for literal in value if keyword == "enum" else (value,):
                if isinstance(literal, dict):
                    names.update(dict.fromkeys(literal))


def _mention_target(
    document: Document,
    place: Place,
    keyword: str,
    names: dict[str, None],
    late: dict[str, None],
    seen: set[Signed],
) -> None:
    try:
        target = document.target(place, keyword)
    except UnsupportedSchema:  # lenient, and already warned about
        return
    _mention(document, target, names, late, seen)
