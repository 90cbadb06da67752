"""The keywords of one JSON type as cases: what each requires, and what violates it.

Each function yields one disjunction per keyword: at a positive place all have to hold, at a
negative one any of them, each being what violates the keyword.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ...errors import InvalidGrammar
from ..grammar import alt
from . import arrays, numbers, objects, strings
from .arrays import ArrayCase, Count
from .cases import Cases, Expander, Kind
from .document import FALSE, TRUE, Document, Place, Resource, Signed
from .formats import BASE64
from .keywords import Dialect
from .objects import Keys, KeySet, ObjectCase
from .strings import Language, StringCase, ecma_language, format_language, pattern_language

_LITERALS = Resource({}, Dialect.D2020)
_BASE64 = Language(BASE64)


def literal_place(document: Document, place: Place, value: Any) -> Signed:
    """A place for one array or object value, by the places of its parts."""
    if isinstance(value, list):
        schema: dict[str, Any] = {
            "type": "array",
            "prefixItems": [{"const": item} for item in value],
            "minItems": len(value),
            "maxItems": len(value),
        }
    else:
        schema = {
            "type": "object",
            "properties": {name: {"const": item} for name, item in value.items()},
            "required": list(value),
            "additionalProperties": False,
        }
    return document.made(place, ("literal", id(value)), schema, _LITERALS)


def required(names: list[str], is_positive: bool) -> Cases:
    """All of these keys; negated: one of them is missing."""
    if is_positive:
        return [ObjectCase(required=frozenset(names))]
    return [ObjectCase(values=((name, FALSE),)) for name in names]


def _numbers(
    expansion: Expander, place: Place, is_positive: bool, is_tracked: bool
) -> Iterator[Cases]:
    for case in numbers.asked(place.schema, place.dialect):
        yield [case if is_positive else numbers.negation(case)]


def _strings(
    expansion: Expander, place: Place, is_positive: bool, is_tracked: bool
) -> Iterator[Cases]:
    schema = place.schema
    if "minLength" in schema or "maxLength" in schema:
        least = int(schema.get("minLength", 0))
        most = int(schema["maxLength"]) if "maxLength" in schema else None
        of = strings.of_lengths if is_positive else strings.negation_of_lengths
        yield list(of(least, most))
    if "pattern" in schema:
        pattern = _pattern(expansion, place, "pattern", schema["pattern"])
        yield [_matching(pattern, is_positive)]
    if place.dialect == Dialect.DRAFT7:
        yield from _contents(expansion, place, is_positive)
    if "format" in schema and expansion.asserts_format:
        # Strict: what is of the format by all readers, or of none; lenient: all that may be.
        language = format_language(schema["format"], is_positive == expansion.is_lenient)
        if language is not None:
            yield [_matching(language, is_positive)]


def _contents(expansion: Expander, place: Place, is_positive: bool) -> Iterator[Cases]:
    """Draft 7 lets `contentEncoding` and `contentMediaType` assert; later they are annotations."""
    if place.schema.get("contentEncoding") == "base64":
        yield [_matching(_BASE64, is_positive)]
    if place.schema.get("contentMediaType") == "application/json":
        expansion.unsupported(
            place, "contentMediaType", "JSON within a string", "an object instead of the string"
        )
        yield [strings.ANY]


def _matching(language: Language | None, is_positive: bool) -> StringCase:
    if language is None:
        return strings.ANY
    if is_positive:
        return StringCase(includes=frozenset({language}))
    return StringCase(excludes=frozenset({language}))


def _pattern(expansion: Expander, place: Place, keyword: str, pattern: str) -> Language | None:
    """The strings in which a regex is found; None: it cannot be enforced and is dropped."""
    try:
        # Lenient: by the standard's reading alone, so that nothing valid is left out.
        return ecma_language(pattern) if expansion.is_lenient else pattern_language(pattern)
    except InvalidGrammar as error:
        reason, _, remedy = str(error).partition("; remedy: ")
        expansion.unsupported(place, keyword, reason, remedy or "another pattern")
        return None


def _arrays(
    expansion: Expander, place: Place, is_positive: bool, is_tracked: bool
) -> Iterator[Cases]:
    schema, document = place.schema, expansion.document
    prefix, rest = _item_places(document, place)
    if prefix or rest is not None:
        rest_sign = TRUE if rest is None else rest
        if is_positive:
            yield [_item_case(prefix, rest_sign, len(prefix) if rest is None else None, is_tracked)]
        else:
            broken = [Count(i, i + 1, -sub, 1, None) for i, sub in enumerate(prefix)]
            yield _counting([*broken, Count(len(prefix), None, -rest_sign, 1, None)])
    if "contains" in schema and place.dialect >= Dialect.DRAFT6:
        yield list(_contains(document, place, is_positive, is_tracked))
    if "minItems" in schema:
        least = int(schema["minItems"])
        if is_positive:
            yield [ArrayCase(least=least)]
        elif least > 0:
            yield [ArrayCase(most=least - 1)]
    if "maxItems" in schema:
        most = int(schema["maxItems"])
        yield [ArrayCase(most=most) if is_positive else ArrayCase(least=most + 1)]
    if schema.get("uniqueItems"):
        yield [ArrayCase(is_unique=is_positive)]


def _item_places(document: Document, place: Place) -> tuple[list[Signed], Signed | None]:
    """The places of the first items, and that of all further ones."""
    schema = place.schema
    keyword, further = "prefixItems", "items"
    if isinstance(schema.get("items"), list):
        keyword, further = "items", "additionalItems"
    elif place.dialect < Dialect.D2020:
        keyword = "items" if isinstance(schema.get("items"), list) else ""
    prefix = [document.child(place, keyword, i) for i in range(len(schema.get(keyword, ())))]
    return prefix, document.child(place, further) if further in schema else None


def _item_case(prefix: list[Signed], rest: Signed, upto: int | None, is_tracked: bool) -> ArrayCase:
    items: set[tuple[int, int | None, Signed]] = {
        (i, i + 1, sub) for i, sub in enumerate(prefix) if sub != TRUE
    }
    if rest != TRUE:
        items.add((len(prefix), None, rest))
    evaluated = arrays.Evaluated(upto) if is_tracked else arrays.NOTHING_EVALUATED
    return ArrayCase(items=frozenset(items), evaluated=evaluated)


def _contains(
    document: Document, place: Place, is_positive: bool, is_tracked: bool
) -> Iterator[ArrayCase]:
    schema, item = place.schema, document.child(place, "contains")
    counts = place.dialect >= Dialect.D2019
    least = int(schema.get("minContains", 1)) if counts else 1
    most = int(schema["maxContains"]) if counts and "maxContains" in schema else None
    if is_positive:
        evaluated = arrays.NOTHING_EVALUATED
        if is_tracked and place.dialect >= Dialect.D2020:
            evaluated = arrays.Evaluated(matching=frozenset({item}))
        for case in _counting([Count(0, None, item, least, most)]):
            yield replace(case, evaluated=evaluated)
        return
    if least > 0:
        yield from _counting([Count(0, None, item, 0, least - 1)])
    if most is not None:
        yield from _counting([Count(0, None, item, most + 1, None)])


def _counting(counts: list[Count]) -> Cases:
    """A case per count, as the simplest equivalent constraint; none if void."""
    cases: Cases = []
    for count in counts:
        if count.most is not None and count.least > count.most:
            continue
        if count.item == FALSE:
            cases += [arrays.ANY] if count.least == 0 else []
        elif count.item == TRUE:
            if count.most is None:
                needed = count.start + count.least if count.least else 0
                cases.append(ArrayCase(least=needed))
            else:
                cases.append(ArrayCase(least=count.least, most=count.most))
        elif count.most == 0:
            cases.append(ArrayCase(items=frozenset({(count.start, count.stop, -count.item)})))
        elif count.least == 0 and count.most is None:
            cases.append(arrays.ANY)
        else:
            cases.append(ArrayCase(counts=frozenset({count})))
    return cases


def unevaluated_items(
    expansion: Expander, place: Place, case: ArrayCase, rest: Signed, is_positive: bool
) -> ArrayCase | None:
    """A case in which all (negated: not all) items not yet evaluated are `rest`."""
    upto, matching = case.evaluated.upto, case.evaluated.matching
    done = replace(case, evaluated=arrays.Evaluated(upto=None))
    if upto is None or rest == TRUE:
        return done if is_positive else None
    item = rest
    if matching:
        item = expansion.document.any_of(place, (*sorted(matching), rest))
    if is_positive:
        return replace(done, items=case.items | {(upto, None, item)})
    further = _counting([Count(upto, None, -item, 1, None)])
    return done.merged(further[0]) if further else None


def _objects(
    expansion: Expander, place: Place, is_positive: bool, is_tracked: bool
) -> Iterator[Cases]:
    schema = place.schema
    entries = _key_places(expansion, place)
    if entries:
        if is_positive:
            yield [_key_case(schema, entries, is_tracked)]
        else:
            yield [_broken(keys, sub) for keys, sub in entries if sub != TRUE]
    if "required" in schema:
        yield required(schema["required"], is_positive)
    if "propertyNames" in schema and place.dialect >= Dialect.DRAFT6:
        yield from _property_names(expansion, place, is_positive)
    if "minProperties" in schema:
        least = int(schema["minProperties"])
        if is_positive:
            yield [ObjectCase(least=least)]
        elif least > 0:
            yield [ObjectCase(most=least - 1)]
    if "maxProperties" in schema:
        most = int(schema["maxProperties"])
        yield [ObjectCase(most=most) if is_positive else ObjectCase(least=most + 1)]


def _key_places(expansion: Expander, place: Place) -> list[tuple[Keys, Signed]]:
    """Which place applies to the values of which keys."""
    schema, document = place.schema, expansion.document
    entries: list[tuple[Keys, Signed]] = [
        (name, document.child(place, "properties", name)) for name in schema.get("properties", ())
    ]
    patterns = []
    for regex in schema.get("patternProperties", ()):
        pattern = _pattern(expansion, place, "patternProperties", regex)
        if pattern is None:
            return entries
        patterns.append(pattern)
        sub = document.child(place, "patternProperties", regex)
        entries.append((KeySet(inside=frozenset({pattern})), sub))
    if "additionalProperties" in schema:
        names = frozenset(schema.get("properties", ()))
        others = KeySet(outside=frozenset(patterns), names=names)
        entries.append((others, document.child(place, "additionalProperties")))
    return entries


def _key_case(
    schema: dict[str, Any], entries: list[tuple[Keys, Signed]], is_tracked: bool
) -> ObjectCase:
    evaluated = objects.NOTHING_EVALUATED
    if is_tracked:
        names = frozenset(keys for keys, _ in entries if isinstance(keys, str))
        sets = [keys for keys, _ in entries if isinstance(keys, KeySet)]
        evaluated = objects.Evaluated(
            "additionalProperties" in schema,
            names,
            frozenset(pattern for keys in sets for pattern in keys.inside),
        )
    return ObjectCase(values=tuple(entries), evaluated=evaluated)


def _broken(keys: Keys, sub: Signed) -> ObjectCase:
    """One of these keys is present, with a value that is not valid under `sub`."""
    if isinstance(keys, str):
        return ObjectCase(values=((keys, -sub),), required=frozenset({keys}))
    return ObjectCase(owed=frozenset({frozenset({(keys, -sub)})}))


def _property_names(expansion: Expander, place: Place, is_positive: bool) -> Iterator[Cases]:
    """Keys outside the language of the names are forbidden; negated: there is one."""

    cases = expansion.cases(expansion.document.child(place, "propertyNames"), Kind.STRING)
    if strings.ANY in cases:
        return
    values: list[tuple[Keys, Signed]] = []
    if all(case.values is not None for case in cases):
        named = [name for case in cases for name in sorted(case.values)]
        others = KeySet(names=frozenset(named))
        values += [(name, TRUE) for name in named]  # so that these are listed, not free
    else:
        widest = alt(*(strings.characters(case, by_any_reading=True) for case in cases))
        names = Language(alt(*map(strings.characters, cases)), widest)
        others = KeySet(outside=frozenset({names}))
    if is_positive:
        yield [ObjectCase(values=(*values, (others, FALSE)))]
    else:
        yield [_broken(others, FALSE)]


def unevaluated_properties(
    expansion: Expander, place: Place, case: ObjectCase, rest: Signed, is_positive: bool
) -> ObjectCase | None:
    """A case in which all (negated: not all) keys not yet evaluated are `rest`."""
    seen = case.evaluated
    done = replace(case, evaluated=objects.Evaluated(is_all=True))
    if seen.is_all or rest == TRUE:
        return done if is_positive else None
    others = KeySet(outside=seen.patterns, names=seen.names)
    if is_positive:
        return replace(done, values=(*case.values, (others, rest)))
    return replace(done, owed=case.owed | {frozenset({(others, -rest)})})


BY_KIND: tuple[Callable[[Expander, Place, bool, bool], Iterator[Cases]] | None, ...] = (
    None,
    None,
    None,
    _numbers,
    _strings,
    _arrays,
    _objects,
)
