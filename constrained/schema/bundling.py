"""Bundles a schema with the schemas that it refers to, as one compound document.

Nothing is fetched while a grammar is compiled, so a schema of several files is bundled first: each
file that is referred to becomes a definition with its URI as `$id`, and no reference changes (JSON
Schema Core 2020-12, section 9.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urldefrag, urljoin

from .document import declared, dialect_of
from .keywords import Dialect

_REFERENCES = ("$ref", "$dynamicRef")


def bundled(schema: Any, resources: Mapping[str, Any], *, dialect: str | None = None) -> Any:
    """The schema with those of `resources` (by absolute URI) that it leads to.

    `dialect` is that of schemas without `$schema`. A schema that leads to none is returned as it
    is. Raises InvalidGrammar, UnsupportedSchema for an unknown dialect.
    """
    if not isinstance(schema, dict):
        return schema
    default = dialect_of(schema, dialect)
    found: dict[str, Any] = {}
    pending = [(schema, "")]
    while pending:
        part, base = pending.pop()
        for uri in _targets(part, base, _id_keyword(default)):
            if uri in resources and uri not in found:
                found[uri] = resources[uri]
                pending.append((resources[uri], uri))
    found.pop(_own_uri(schema, "", default), None)
    if not found:
        return schema
    place = "$defs" if default >= Dialect.D2019 else "definitions"
    parts: dict[str, Any] = {}
    for uri, resource in found.items():
        parts.update(_embedded(uri, resource, default))
    return {**schema, place: {**schema.get(place, {}), **parts}}


def _targets(schema: Any, base: str, id_keyword: str) -> Iterator[str]:
    """The URIs, without fragments, to which a document refers; malformed ones are left out."""
    pending = [(schema, base)]
    while pending:
        part, base = pending.pop()
        if isinstance(part, list):
            pending += [(inner, base) for inner in part]
        elif isinstance(part, dict):
            base = _joined(base, part.get(id_keyword)) or base
            for keyword in _REFERENCES:
                yield urldefrag(_joined(base, part.get(keyword)) or "").url
            pending += [(inner, base) for inner in part.values()]


def _embedded(uri: str, resource: Any, default: Dialect) -> dict[str, Any]:
    """The definitions by which a resource is found at its URI."""
    if not isinstance(resource, dict):
        return {uri: {_id_keyword(default): uri, "allOf": [resource]}}
    dialect = declared(resource, default)
    keyword = _id_keyword(dialect)
    if dialect <= Dialect.DRAFT7 and "$ref" in resource:  # beside which an identifier is ignored
        resource = {**resource, "allOf": [{"$ref": resource["$ref"]}]}
        del resource["$ref"]
    own = _own_uri(resource, uri, dialect)
    if own == uri:
        return {uri: {**resource, keyword: uri}}
    alias = {_id_keyword(default): uri, "allOf": [{"$ref": own}]}
    return {own: {**resource, keyword: own}, uri: alias}


def _own_uri(resource: dict[str, Any], base: str, dialect: Dialect) -> str:
    own = _joined(base, resource.get(_id_keyword(dialect)))
    return base if own is None else urldefrag(own).url


def _id_keyword(dialect: Dialect) -> str:
    return "id" if dialect == Dialect.DRAFT4 else "$id"


def _joined(base: str, reference: object) -> str | None:
    try:
        return urljoin(base, reference) if isinstance(reference, str) else None
    except ValueError:  # no URI, which is told where it is used
        return None
