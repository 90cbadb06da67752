"""A schema document as numbered places, with references resolved.

A place is a subschema; other modules work on its number with a sign: `+n` means that the instance
is valid under place n, `-n` that it is not. There are finitely many conjunctions of such numbers,
which is why recursion ends. The `referencing` library resolves references that are more than a
pointer into the same resource; nothing is ever fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import unquote

import jsonschema_specifications
import referencing
import referencing.exceptions
from referencing.jsonschema import DRAFT4, DRAFT6, DRAFT7, DRAFT201909, DRAFT202012

from ...errors import InvalidGrammar, UnsupportedSchema
from .keywords import DIALECTS, KEYWORDS, Dialect, is_schema

Signed: TypeAlias = int
State: TypeAlias = frozenset[int]
"""A conjunction of signed places; the empty one is any value."""

TRUE: Signed = 1
FALSE: Signed = -1

MAX_DEPTH = 256  # the parser recurses natively: it crashed at 803 levels

_SPECIFICATIONS = {
    Dialect.DRAFT4: DRAFT4,
    Dialect.DRAFT6: DRAFT6,
    Dialect.DRAFT7: DRAFT7,
    Dialect.D2019: DRAFT201909,
    Dialect.D2020: DRAFT202012,
}
# Of places that may be one where they are equal: none names a property, so that none has a place in
# the order of properties, and none is the target of a reference by a name or an identifier.
_PLAIN = frozenset(
    ("type", "enum", "const", "minLength", "maxLength", "pattern", "format", "contentEncoding",
     "contentMediaType", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
     "multipleOf", "minItems", "maxItems", "uniqueItems")
)  # fmt: skip
_NESTING = frozenset(("items", "additionalProperties", "anyOf", "allOf", "oneOf"))
_APART = frozenset(KEYWORDS) - _PLAIN - _NESTING | {"id", "$schema", "$recursiveAnchor"}
_DYNAMIC_ANCHORS = {"$dynamicRef": "$dynamicAnchor", "$recursiveRef": "$recursiveAnchor"}


class Resource:
    """A schema with its own base URI: the document, and each subschema with an `$id`."""

    def __init__(self, contents: Any, dialect: Dialect, resolver: Any = None) -> None:
        self.contents = contents
        self.dialect = dialect
        self._resolver = resolver

    @property
    def resolver(self) -> Any:
        """The resolver of `referencing`; made on first use, since most documents need none."""
        if self._resolver is None:
            specification: Any = _SPECIFICATIONS[self.dialect]
            resource = specification.create_resource(self.contents)
            registry: Any = jsonschema_specifications.REGISTRY
            self._resolver = (
                registry.with_resource(resource.id() or "", resource)
                .crawl()
                .resolver(resource.id() or "")
            )
        return self._resolver


@dataclass(slots=True, eq=False)
class Place:
    """One subschema. `alternatives`, where not None, replaces the schema: any of these."""

    number: int
    schema: dict[str, Any]
    pointer: str
    resource: Resource
    alternatives: tuple[Signed, ...] | None = None
    children: dict[object, Signed] = field(default_factory=dict)
    contents: tuple[object, ...] | None = None  # of one that stands for all equal ones

    @property
    def dialect(self) -> Dialect:
        return self.resource.dialect


class Document:
    """Places by number. Numbers ascend in the order in which the schema is read."""

    def __init__(self, schema: object, dialect: str | None = None) -> None:
        default = Dialect.D2020 if dialect is None else _dialect(dialect)
        if not is_schema(schema):
            raise InvalidGrammar.of("json_schema", schema, "a schema: an object, true or false")
        if _is_deeper(schema, MAX_DEPTH):
            raise InvalidGrammar(
                f"/: the schema is nested too deeply: deeper than {MAX_DEPTH} objects and arrays",
                "json_schema",
            )
        root = Resource(schema, _declared(schema, default))
        nothing = Resource({}, default)
        self._places = [Place(0, {}, "", nothing), Place(1, {}, "", nothing)]
        self._numbers: dict[int, int] = {}
        self._of_contents: dict[tuple[object, ...], int] = {}  # equal places without properties
        self._kept: list[object] = []  # kept alive, so that no id() is reused
        self._contents = schema
        self.root = self._locate(schema, "", root)

    def __getitem__(self, signed: Signed) -> Place:
        return self._places[abs(signed)]

    def child(self, place: Place, *tokens: str | int) -> Signed:
        """The subschema at these keys below the place."""
        schema: Any = place.schema
        for token in tokens:
            schema = schema[token]
        if schema is True:
            return TRUE
        if schema is False:
            return FALSE
        return self._numbers.get(id(schema)) or self._locate(
            schema, place.pointer + "".join(map(_pointed, tokens)), place.resource
        )

    def made(self, place: Place, key: object, schema: dict[str, Any], resource: Resource) -> Signed:
        """A synthetic subschema for something of the place's, made once per key."""
        if key not in place.children:
            place.children[key] = self._add(schema, place.pointer, resource)
        return place.children[key]

    def any_of(self, place: Place, alternatives: tuple[Signed, ...]) -> Signed:
        """The union of places."""
        if alternatives not in place.children:
            number = self._add({}, place.pointer, place.resource)
            self._places[number].alternatives = alternatives
            place.children[alternatives] = number
        return place.children[alternatives]

    def target(self, place: Place, keyword: str) -> Signed:
        """What the reference at the place's `keyword` points to."""
        if keyword not in place.children:
            place.children[keyword] = self._resolved(place, keyword)
        return place.children[keyword]

    def _resolved(self, place: Place, keyword: str) -> Signed:
        reference: str = place.schema[keyword]
        if reference.startswith("#") and (reference == "#" or reference[1] == "/"):
            found = _pointer_within(place.resource.contents, reference[1:])
            if found is not None:
                self._require_static(place, keyword, found)
                return self._locate(found, unquote(reference[1:]), place.resource)
        try:
            resolved = place.resource.resolver.lookup(reference)
        except (referencing.exceptions.Unresolvable, ValueError) as error:
            raise _unresolved(place, keyword, reference) from error
        contents, resolver = resolved.contents, resolved.resolver
        self._require_static(place, keyword, contents)
        resource = Resource(contents, _declared(contents, place.dialect), resolver)
        return self._locate(contents, f"{place.pointer}/{keyword}", resource)

    def _require_static(self, place: Place, keyword: str, target: Any) -> None:
        """A dynamic reference is a plain one where its target is no dynamic anchor, or is the only
        one of its name. (JSON Schema Core 2020-12, section 8.2.3.2; 2019-09, section 8.2.4.2.)"""
        anchor = _DYNAMIC_ANCHORS.get(keyword)
        name = target.get(anchor) if anchor is not None and isinstance(target, dict) else None
        if anchor is None or not name:
            return
        places = [schema for schema in _dictionaries(self._contents) if schema.get(anchor) == name]
        if [id(schema) for schema in places] != [id(target)]:
            raise UnsupportedSchema(
                place.pointer, keyword, "what it means depends on the way by which it is reached"
            )

    def _locate(self, schema: object, pointer: str, resource: Resource) -> Signed:
        if isinstance(schema, bool):
            return TRUE if schema else FALSE
        if not isinstance(schema, dict):
            raise InvalidGrammar(
                f"{pointer or '/'}: {schema!r:.200} is not allowed: a schema is an object, true or "
                "false",
                "json_schema",
            )
        number = self._numbers.get(id(schema))
        if number is None:
            identifier = "id" if resource.dialect == Dialect.DRAFT4 else "$id"
            if identifier in schema and schema is not resource.contents:
                resource = _inner(schema, identifier, pointer, resource)
            contents = _contents(schema)
            if contents is None:
                _check(schema, pointer, resource.dialect)
                number = self._add(schema, pointer, resource)
            else:
                contents = (resource.dialect, *contents)
                number = self._of_contents.get(contents)
                if number is None:
                    _check(schema, pointer, resource.dialect)
                    number = self._of_contents[contents] = self._add(schema, pointer, resource)
                    self._places[number].contents = contents
                else:
                    self._kept.append(schema)
            self._numbers[id(schema)] = number
        return number

    def _add(self, schema: dict[str, Any], pointer: str, resource: Resource) -> int:
        self._kept.append(schema)
        self._places.append(Place(len(self._places), schema, pointer, resource))
        return len(self._places) - 1


def _is_deeper(value: object, depth: int) -> bool:
    """Whether objects and arrays are nested deeper than `depth`."""
    level = [value]
    for _ in range(depth + 1):
        containers = [one for one in level if isinstance(one, (dict, list))]
        level = [
            inner
            for one in containers
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return True


def _contents(schema: dict[str, Any]) -> tuple[object, ...] | None:
    """What a schema says, without annotations, where equal ones may be one place."""
    found: list[object] = []
    for name, value in schema.items():
        if name in _PLAIN:
            if name in ("enum", "const") and _has_containers(value):
                return None
            found += (name, value if type(value) is str else repr(value))
        elif name in _NESTING:
            parts = [_inner_contents(one) for one in (value if type(value) is list else [value])]
            if None in parts:
                return None
            found += (name, type(value) is list, *parts)
        elif name in _APART:
            return None
    return tuple(found)


def _inner_contents(schema: Any) -> object:
    if isinstance(schema, dict):
        return _contents(schema)
    return schema if isinstance(schema, bool) else None


def _has_containers(value: Any) -> bool:
    """Whether a constant, or one of a list, is an array or an object."""
    parts = value if isinstance(value, list) else [value]
    return any(isinstance(one, (dict, list)) for one in parts)


def _check(schema: dict[str, Any], pointer: str, dialect: Dialect) -> None:
    if dialect <= Dialect.DRAFT7 and "$ref" in schema:
        KEYWORDS["$ref"].check(schema["$ref"], pointer)
        return  # its siblings are ignored, even malformed ones
    for name, value in schema.items():
        keyword = KEYWORDS.get(name)
        if keyword is not None and keyword.since <= dialect <= keyword.until:
            keyword.check(value, pointer)


def _dialect(name: str) -> Dialect:
    found = DIALECTS.get(name.rstrip("#"))
    if found is None:
        raise InvalidGrammar.of("dialect", name, f"one of {', '.join(DIALECTS)}")
    return found


def _declared(schema: object, default: Dialect) -> Dialect:
    if not isinstance(schema, dict) or "$schema" not in schema:
        return default
    name = schema["$schema"]
    if not isinstance(name, str):
        raise InvalidGrammar.of("$schema", name, "the URI of a dialect")
    known = DIALECTS.get(
        name.rstrip("#").replace("https://json-schema.org/draft-", "http://json-schema.org/draft-")
    )
    if known is None:
        raise UnsupportedSchema("", "$schema", f"{name!r} is none of {', '.join(DIALECTS)}")
    return known


def _inner(schema: dict[str, Any], identifier: str, pointer: str, outer: Resource) -> Resource:
    name = schema[identifier]
    if not isinstance(name, str) or name.startswith("#"):
        return outer  # malformed (found by the check) or, up to draft 7, an anchor
    if outer.dialect <= Dialect.DRAFT7 and "$ref" in schema:
        return outer
    specification: Any = _SPECIFICATIONS[outer.dialect]
    try:
        resolver = outer.resolver.in_subresource(specification.create_resource(schema))
    except ValueError as error:
        raise InvalidGrammar(f"{pointer}: {identifier}={name!r}: {error}", "json_schema") from error
    return Resource(schema, _declared(schema, outer.dialect), resolver)


def _pointer_within(contents: Any, fragment: str) -> Any:
    """The subschema at a JSON pointer, None where it is absent or in another resource."""
    for token in fragment.split("/")[1:]:
        token = unquote(token).replace("~1", "/").replace("~0", "~")
        if isinstance(contents, list) and token.isdigit() and int(token) < len(contents):
            contents = contents[int(token)]
        elif isinstance(contents, dict) and token in contents:
            contents = contents[token]
        else:
            return None
        if isinstance(contents, dict) and ("$id" in contents or "id" in contents):
            return None
    return contents


def _unresolved(place: Place, keyword: str, reference: str) -> InvalidGrammar:
    if reference.startswith("#"):
        return InvalidGrammar(
            f"{place.pointer or '/'}: {keyword}={reference!r} points to nothing", "json_schema"
        )
    return UnsupportedSchema(
        place.pointer,
        keyword,
        f"{reference!r} is not in the document; remote schemas are not fetched",
    )


def _dictionaries(value: Any) -> Iterator[dict[str, Any]]:
    pending = [value]
    while pending:
        current = pending.pop()
        if isinstance(current, dict):
            yield current
            pending.extend(current.values())
        elif isinstance(current, list):
            pending.extend(current)


def _pointed(token: str | int) -> str:
    if isinstance(token, str) and ("~" in token or "/" in token):
        token = token.replace("~", "~0").replace("/", "~1")
    return f"/{token}"
