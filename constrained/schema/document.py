"""A schema document as numbered places, with references resolved.

A place is a subschema; other modules work on its number with a sign: `+n` means that the instance
is valid under place n, `-n` that it is not. There are finitely many conjunctions of such numbers,
which is why recursion ends. The `referencing` library resolves references that are more than a
pointer into the same resource; nothing is ever fetched.

A dynamic reference means the anchor that the outermost resource on the way to it defines (JSON
Schema Core 2020-12, section 8.2.3.2; 2019-09, section 8.2.4.2). Of that way only one thing matters:
for each name the first anchor that was met. This is a resource's `scope`, and a subschema that is
reached under several scopes is several places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import unquote, urldefrag, urljoin

import jsonschema_specifications
import referencing
import referencing.exceptions
from referencing.jsonschema import DRAFT4, DRAFT6, DRAFT7, DRAFT201909, DRAFT202012

from ...errors import LENIENT, InvalidGrammar, UnsupportedSchema
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
RECURSIVE = ""  # in a scope: the name of 2019-09's anchor, which has none
Scope: TypeAlias = frozenset[tuple[str, int]]
"""For each name of a dynamic anchor the first one met, as the id() of a kept `Anchor`."""


@dataclass(frozen=True, slots=True, eq=False)
class Resource:
    """A schema with its own base URI: the document, and each subschema with an `$id`, which begins
    at `pointer`."""

    contents: Any
    dialect: Dialect
    base: str = ""
    scope: Scope = frozenset()
    pointer: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Anchor:
    """The subschema of a dynamic anchor, and its resource as the way to it has it."""

    schema: Any
    resource: Resource


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
        self._numbers: dict[tuple[int, Scope], int] = {}
        self._kept: list[object] = []  # kept alive, so that no id() is reused
        self._registry: Any = None
        self._bases: dict[int, str] = {}
        self._resources: dict[tuple[int, Scope], Resource] = {}
        self._anchors: dict[int, Anchor] = {}
        nothing = Resource({}, default)
        self._places = [Place(0, {}, "", nothing), Place(1, {}, "", nothing)]
        self._of_contents: dict[tuple[object, ...], int] = {}  # equal places without properties
        self._referring: dict[tuple[object, ...], int] = {}  # the same with references in them
        self._first_equal: dict[int, int] = {}  # by number: the place that `_referring` has
        dialect_of_root = declared(schema, default)
        base = _SPECIFICATIONS[dialect_of_root].create_resource(schema).id() or ""
        self._contents, self._dialect, self._base = schema, dialect_of_root, base
        self.root = self._locate(schema, "", self._entered(schema, dialect_of_root, base))

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
        return self._numbers.get((id(schema), place.resource.scope)) or self._locate(
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

    def meant(self, signed: Signed) -> Signed:
        """A place that stands for this one where it is alone in a state: the target of one that is
        a reference, the first of those that say the same. Beside others a place has its own rank
        in the order of properties."""
        seen: set[int] = set()
        meant = signed
        while abs(meant) > TRUE and self._is_reference(self[meant]):
            if abs(meant) in seen:
                return signed  # an error, found where it is expanded
            seen.add(abs(meant))
            try:
                target = self.target(self[meant], "$ref")
            except UnsupportedSchema:
                return signed
            meant = target if meant > 0 else -target
        number = abs(meant)
        if number > TRUE and number not in self._first_equal:
            self._first_equal[number] = self._first_equal_to(self[meant])
        number = self._first_equal.get(number, number)
        return number if meant > 0 else -number

    def _first_equal_to(self, place: Place) -> int:
        if place.alternatives is not None or place.contents is not None:
            return place.number
        contents = _contents(place.schema, allows_references=True)
        if contents is None:
            return place.number
        return self._referring.setdefault((id(place.resource), *contents), place.number)

    def _is_reference(self, place: Place) -> bool:
        """Whether all that a place says is that it is another one."""
        if place.alternatives is not None or "$ref" not in place.schema:
            return False
        said = KEYWORDS.keys() & place.schema.keys() - {"$defs", "definitions"}
        return place.dialect <= Dialect.DRAFT7 or said == {"$ref"}

    def _resolved(self, place: Place, keyword: str) -> Signed:
        reference: str = place.schema[keyword]
        found, pointer, resource = self._found(place, keyword, reference)
        scope = dict(resource.scope)
        if keyword == "$recursiveRef" and RECURSIVE in scope and _is_recursive(found):
            anchor = self._anchors[scope[RECURSIVE]]
            found, resource = anchor.schema, self._seen_from(resource, anchor.resource)
        elif keyword == "$dynamicRef" and isinstance(found, dict):
            name = urldefrag(reference).fragment
            if name in scope and found.get("$dynamicAnchor") == name:
                anchor = self._anchors[scope[name]]
                found, resource = anchor.schema, self._seen_from(resource, anchor.resource)
        return self._locate(found, pointer, resource)

    def _found(self, place: Place, keyword: str, reference: str) -> tuple[Any, str, Resource]:
        """What a reference points to by its text alone, its pointer, and its resource."""
        resource = place.resource
        if reference.startswith("#") and (reference == "#" or reference[1] == "/"):
            found = _pointer_within(resource.contents, reference[1:])
            if found is not None:
                return found, resource.pointer + unquote(reference[1:]), resource
        pointer = f"{place.pointer}/{keyword}"
        try:
            uri, fragment = urldefrag(urljoin(resource.base, reference))
            if fragment and not fragment.startswith("/"):
                found = self.registry.anchor(uri, fragment).value.resource.contents
                root = self.registry.get_or_retrieve(uri).value.contents
            else:
                resolved = self.registry.resolver(uri).lookup(f"#{fragment}")
                found, root = resolved.contents, resolved.resolver.lookup("#").contents
        except (referencing.exceptions.Unresolvable, KeyError, ValueError) as error:
            raise _unresolved(place, keyword, reference) from error
        if root is resource.contents:
            return found, pointer, resource
        base = self._bases.get(id(root), uri)
        return found, pointer, self._entered(root, place.dialect, base, resource.scope)

    @property
    def registry(self) -> Any:
        """The resources of `referencing`; made on first use, since most documents need none."""
        if self._registry is None:
            specification: Any = _SPECIFICATIONS[self._dialect]
            resource = specification.create_resource(self._contents)
            registry: Any = jsonschema_specifications.REGISTRY
            self._registry = registry.with_resource(self._base, resource).crawl()
            self._bases = {id(self._registry[uri].contents): uri for uri in self._registry}
        return self._registry

    def _entered(
        self,
        contents: Any,
        default: Dialect,
        base: str,
        outer: Scope = frozenset(),
        pointer: str = "",
    ) -> Resource:
        """A resource as it is met under a scope, which its own dynamic anchors extend."""
        resource = self._resources.get((id(contents), outer))
        if resource is None:
            dialect = declared(contents, default)
            scope = dict(outer)
            for name, schema in _dynamic_anchors(contents, dialect):
                if name not in scope:
                    anchor = Anchor(schema, Resource(contents, dialect, base))
                    scope[name] = id(anchor)
                    self._anchors[id(anchor)] = anchor
            resource = Resource(contents, dialect, base, frozenset(scope.items()), pointer)
            self._resources[id(contents), outer] = resource
            self._kept.append(contents)
        return resource

    def _seen_from(self, outer: Resource, resource: Resource) -> Resource:
        """Another resource, entered from `outer`."""
        if resource.contents is outer.contents:
            return outer
        return self._entered(
            resource.contents, resource.dialect, resource.base, outer.scope, resource.pointer
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
        key = (id(schema), resource.scope)
        number = self._numbers.get(key)
        if number is None:
            identifier = "id" if resource.dialect == Dialect.DRAFT4 else "$id"
            if identifier in schema and schema is not resource.contents:
                resource = self._inner(schema, identifier, pointer, resource)
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
            self._numbers[key] = number
        return number

    def _inner(
        self, schema: dict[str, Any], identifier: str, pointer: str, outer: Resource
    ) -> Resource:
        """The resource that begins at a subschema with an identifier, if one does."""
        name = schema[identifier]
        if not isinstance(name, str) or name.startswith("#"):
            return outer  # malformed (found by the check) or, up to draft 7, an anchor
        if outer.dialect <= Dialect.DRAFT7 and "$ref" in schema:
            return outer
        try:
            base = urljoin(outer.base, name).rstrip("#")
        except ValueError as error:
            raise InvalidGrammar(
                f"{pointer}: {identifier}={name!r}: {error}", "json_schema"
            ) from error
        return self._entered(schema, outer.dialect, base, outer.scope, pointer)

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


def _contents(
    schema: dict[str, Any], *, allows_references: bool = False
) -> tuple[object, ...] | None:
    """What a schema says, without annotations, where equal ones may be one place."""
    found: list[object] = []
    for name, value in schema.items():
        if name in _PLAIN:
            if name in ("enum", "const") and _has_containers(value):
                return None
            found += (name, value if type(value) is str else repr(value))
        elif name in _NESTING:
            inner = value if type(value) is list else [value]
            parts = [_inner_contents(one, allows_references) for one in inner]
            if None in parts:
                return None
            found += (name, type(value) is list, *parts)
        elif name == "$ref" and allows_references:
            found += (name, repr(value))
        elif name in _APART:
            return None
    return tuple(found)


def _inner_contents(schema: Any, allows_references: bool) -> object:
    if isinstance(schema, dict):
        return _contents(schema, allows_references=allows_references)
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


def dialect_of(schema: object, default: str | None) -> Dialect:
    """The dialect that a schema declares, or the one of this name; 2020-12 where neither is."""
    return declared(schema, Dialect.D2020 if default is None else _dialect(default))


def _dialect(name: str) -> Dialect:
    found = DIALECTS.get(name.rstrip("#"))
    if found is None:
        raise InvalidGrammar.of("dialect", name, f"one of {', '.join(DIALECTS)}")
    return found


def declared(schema: object, default: Dialect) -> Dialect:
    """The dialect that a schema declares, else the default."""
    if not isinstance(schema, dict) or "$schema" not in schema:
        return default
    name = schema["$schema"]
    if not isinstance(name, str):
        raise InvalidGrammar.of("$schema", name, "the URI of a dialect")
    known = DIALECTS.get(
        name.rstrip("#").replace("https://json-schema.org/draft-", "http://json-schema.org/draft-")
    )
    if known is None:
        known_names = ", ".join(name for name in DIALECTS if "/" in name)
        raise UnsupportedSchema(
            "",
            "$schema",
            f"{name!r} is none of {known_names}",
            "one of these; without it the schema is read as 2020-12",
        )
    return known


def _is_recursive(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("$recursiveAnchor") is True


def _dynamic_anchors(contents: Any, dialect: Dialect) -> Iterator[tuple[str, Any]]:
    """The names and subschemas of a resource's own dynamic anchors."""
    if dialect == Dialect.D2019 and _is_recursive(contents):
        yield RECURSIVE, contents
    if dialect < Dialect.D2020:
        return
    pending = [contents]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict) and (part is contents or not isinstance(part.get("$id"), str)):
            name = part.get("$dynamicAnchor")
            if isinstance(name, str):
                yield name, part
            pending += [inner for key, inner in part.items() if key not in ("enum", "const")]


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
        f"{reference!r} is not in the document, and nothing is fetched",
        "`stemma schema bundle FILE --with OTHER`, which makes one document of several, or "
        + LENIENT,
    )


def _pointed(token: str | int) -> str:
    if isinstance(token, str) and ("~" in token or "/" in token):
        token = token.replace("~", "~0").replace("/", "~1")
    return f"/{token}"
