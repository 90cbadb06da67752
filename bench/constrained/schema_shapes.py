"""Schemas as they are found in the wild, generated from a seed.

The families and their shares follow JSONSchemaBench (Geng et al., "Generating Structured Outputs
from Language Models: Benchmark and Studies", 2025): function calls, schemas from GitHub by size,
Kubernetes, configuration files of SchemaStore, events of Snowplow, articles of a newspaper. Beside
them what libraries write (pydantic, zod) and parameters of tools in OpenAPI's style. Most objects
are open, as there; most schemas have descriptions; definitions are shared and sometimes recursive.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from .schema_words import (
    FORMATS,
    IGNORED_FORMATS,
    KEY_PATTERNS,
    PATTERNS,
    VERBS,
    constants,
    name,
    names,
    sentence,
)

Schema: TypeAlias = dict[str, Any]
DRAFT4, DRAFT7 = (
    "http://json-schema.org/draft-04/schema#",
    "http://json-schema.org/draft-07/schema#",
)
DRAFT2020 = "https://json-schema.org/draft/2020-12/schema"


def generated_schema(family: str, seed: int) -> Schema:
    """One schema of a family of FAMILIES; the same for the same seed."""
    return FAMILIES[family][0](random.Random(f"{family} {seed}"))


def _described(rng: random.Random, schema: Schema, chance: float = 0.6) -> Schema:
    if rng.random() < chance:
        return {"description": sentence(rng, rng.randint(3, 14)).capitalize() + ".", **schema}
    return schema


def _text(rng: random.Random) -> Schema:
    kind = rng.random()
    schema: Schema = {"type": "string"}
    if kind < 0.50:
        return schema
    if kind < 0.62:
        return {**schema, "enum": constants(rng, rng.randint(2, 9))}
    if kind < 0.72:
        return {**schema, "format": rng.choice(list(FORMATS))}
    if kind < 0.82:
        return {**schema, "pattern": rng.choice(list(PATTERNS))}
    if kind < 0.92:
        return {**schema, "minLength": 1, "maxLength": rng.choice((20, 50, 64, 100, 191, 255))}
    return {**schema, "minLength": 1}


def _number(rng: random.Random) -> Schema:
    schema: Schema = {"type": rng.choice(("integer", "integer", "number"))}
    if rng.random() < 0.4:
        schema["minimum"] = rng.choice((0, 0, 1, -90))
        if rng.random() < 0.5:
            schema["maximum"] = rng.choice((10, 100, 180, 65535, 2147483647))
    return schema


def _scalar(rng: random.Random) -> Schema:
    kind = rng.random()
    if kind < 0.62:
        return _described(rng, _text(rng))
    if kind < 0.82:
        return _described(rng, _number(rng))
    if kind < 0.96:
        return _described(rng, {"type": "boolean"})
    return _described(rng, {"type": ["string", "null"]})


def _list(rng: random.Random, item: Schema) -> Schema:
    schema: Schema = {"type": "array", "items": item}
    if rng.random() < 0.25:
        schema["minItems"] = 1
    if rng.random() < 0.1:
        schema["maxItems"] = rng.choice((3, 5, 10, 20))
    return schema


def _object(
    rng: random.Random, properties: Mapping[str, Any], required: float = 0.4, closed: float = 0.25
) -> Schema:
    needed = [key for key in properties if rng.random() < required]
    schema: Schema = {"type": "object", "properties": dict(properties)}
    if needed:
        schema["required"] = needed
    if rng.random() < closed:
        schema["additionalProperties"] = False
    return schema


def _tree(rng: random.Random, width: int, depth: int, leaf: Callable[[], Schema]) -> Schema:
    """An object of about `width` properties, some of which are objects and arrays again."""
    properties: Schema = {}
    for key in names(rng, max(1, round(rng.uniform(0.6, 1.4) * width))):
        kind = rng.random()
        if depth > 0 and kind < 0.22:
            properties[key] = _described(rng, _tree(rng, max(2, width // 2), depth - 1, leaf))
        elif depth > 0 and kind < 0.34:
            properties[key] = _list(rng, _tree(rng, max(2, width // 2), depth - 1, leaf))
        elif kind < 0.46:
            properties[key] = _described(rng, _list(rng, leaf()))
        else:
            properties[key] = leaf()
    return _object(rng, properties)


def _function_call(rng: random.Random) -> Schema:
    """As in Glaive's data: the call of one function."""
    parameters = {key: _scalar(rng) for key in names(rng, rng.randint(1, 5))}
    if rng.random() < 0.3:
        parameters[name(rng)] = _list(rng, {"type": "string"})
    function = f"{rng.choice(VERBS)}_{name(rng)}"
    arguments = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {
        "properties": {"name": {"const": function}, "arguments": arguments},
        "required": ["name", "arguments"],
        "type": "object",
    }


def _easy(rng: random.Random) -> Schema:
    schema = _tree(rng, rng.randint(3, 9), rng.choice((0, 0, 1)), lambda: _scalar(rng))
    return {"$schema": DRAFT4, "title": name(rng), **schema}


def _with_definitions(rng: random.Random, num: int, width: int, depth: int, dialect: str) -> Schema:
    """Definitions that refer to later ones, now and then to themselves, and a root over them."""
    titles = names(rng, num)

    def leaf(later: list[str], own: str | None = None) -> Schema:
        if own and rng.random() < 0.02:
            return {"type": "array", "items": {"$ref": f"#/definitions/{own}"}}
        if later and rng.random() < 0.25:
            reference = {"$ref": f"#/definitions/{rng.choice(later)}"}
            return reference if rng.random() < 0.7 else _list(rng, reference)
        if rng.random() < 0.06:
            return {"anyOf": [_scalar(rng), _list(rng, {"type": "string"})]}
        if rng.random() < 0.04:
            return {"oneOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}]}
        if rng.random() < 0.04:
            return {"type": "object", "additionalProperties": _scalar(rng)}
        if rng.random() < 0.03:
            pattern = rng.choice(list(KEY_PATTERNS))
            return {"type": "object", "patternProperties": {pattern: _scalar(rng)},
                    "additionalProperties": False}  # fmt: skip
        return _scalar(rng)

    definitions: Schema = {}
    for index, title in enumerate(titles):
        later = titles[index + 1 :][:6]
        kind = rng.random()
        if kind < 0.2:
            definitions[title] = _described(rng, _text(rng))
            continue
        made = _tree(rng, width, min(depth, 1), partial(leaf, later, title))
        if kind < 0.3 and later:
            made.pop("additionalProperties", None)
            made = {"allOf": [{"$ref": f"#/definitions/{rng.choice(later)}"}, made]}
        elif kind < 0.36:
            made["anyOf"] = [{"required": [key]} for key in list(made["properties"])[:3]]
        definitions[title] = made
    root = _tree(rng, width, depth, lambda: leaf(titles[:8]))
    return {"$schema": dialect, "title": name(rng), **root, "definitions": definitions}


def _medium(rng: random.Random) -> Schema:
    if rng.random() < 0.5:
        schema = _tree(rng, rng.randint(6, 12), 2, lambda: _scalar(rng))
        return {"$schema": DRAFT4, "title": name(rng), **schema}
    return _with_definitions(rng, rng.randint(2, 5), rng.randint(4, 7), 1, DRAFT7)


def _hard(rng: random.Random) -> Schema:
    return _with_definitions(rng, rng.randint(4, 11), rng.randint(5, 9), 2, DRAFT7)


def _ultra(rng: random.Random) -> Schema:
    return _with_definitions(rng, rng.randint(15, 35), rng.randint(8, 11), 2, DRAFT7)


def _event(rng: random.Random) -> Schema:
    """As of Snowplow's registry: flat, closed, nullable, with lengths and bounds."""
    properties: Schema = {}
    for key in names(rng, rng.randint(3, 25)):
        if rng.random() < 0.6:
            most = rng.choice((16, 36, 64, 128, 255, 255, 512, 1024, 4096))
            properties[key] = {"type": rng.choice((["string", "null"], "string")),
                               "maxLength": most}  # fmt: skip
        elif rng.random() < 0.7:
            properties[key] = {"type": ["integer", "null"], "minimum": 0,
                               "maximum": rng.choice((32767, 2147483647))}  # fmt: skip
        else:
            properties[key] = _scalar(rng)
    schema = _object(rng, properties, 0.3, closed=1.0)
    return {"description": sentence(rng, 6), **schema}


def _metadata(rng: random.Random) -> Schema:
    texts = {"additionalProperties": {"type": ["string", "null"]}, "type": ["object", "null"]}
    reference = {"type": "object", "required": ["kind", "name"], "properties": {
        "kind": {"type": "string"}, "name": {"type": "string"}, "uid": {"type": ["string", "null"]},
        "controller": {"type": ["boolean", "null"]}}}  # fmt: skip
    return _described(rng, {"type": ["object", "null"], "properties": {
        "annotations": texts, "labels": texts, "name": {"type": ["string", "null"]},
        "namespace": {"type": ["string", "null"]},
        "creationTimestamp": {"type": ["string", "null"], "format": "date-time"},
        "generation": {"type": ["integer", "null"], "format": "int64"},
        "finalizers": {"type": ["array", "null"], "items": {"type": ["string", "null"]}},
        "ownerReferences": {"type": ["array", "null"], "items": reference},
    }})  # fmt: skip


def _kubernetes(rng: random.Random) -> Schema:
    """Everything written out, deep, nullable and open; a few wide specifications."""

    def leaf() -> Schema:
        kind = rng.random()
        if kind < 0.5:
            return _described(rng, {"type": ["string", "null"]}, 0.9)
        if kind < 0.65:
            return _described(rng, {"type": ["integer", "null"], "format": "int32"}, 0.9)
        if kind < 0.8:
            return _described(rng, {"type": ["boolean", "null"]}, 0.9)
        if kind < 0.9:
            return (
                {"oneOf": [{"type": ["string", "null"]}, {"type": ["integer", "null"]}]}
                if (rng.random() < 0.2)
                else {"type": ["object", "null"], "additionalProperties": {"type": "string"}}
            )
        return {"type": ["array", "null"], "items": {"type": ["string", "null"]}}

    spec = _tree(rng, rng.choice((6, 9, 14)), 3, leaf)
    spec.pop("additionalProperties", None)
    kind = name(rng).capitalize()
    return {
        "$schema": DRAFT7,
        "description": sentence(rng, 9),
        "type": "object",
        "required": ["metadata"] if rng.random() < 0.5 else [],
        "x-kubernetes-group-version-kind": [{"group": "apps", "kind": kind, "version": "v1"}],
        "properties": {
            "apiVersion": {"type": ["string", "null"], "enum": ["apps/v1"]},
            "kind": {"type": ["string", "null"], "enum": [kind]},
            "metadata": _metadata(rng),
            "spec": spec,
        },
    }


def _configuration(rng: random.Random) -> Schema:
    """As of SchemaStore: wide, large enums, unions, patterned keys, shared definitions."""
    rules = {key: {"$ref": "#/definitions/rule"} for key in names(rng, rng.choice((0, 10, 40)))}
    options: Schema = {key: _scalar(rng) for key in names(rng, rng.randint(8, 30))}
    definitions: Schema = {
        "severity": {"oneOf": [{"enum": [0, 1, 2]}, {"enum": ["off", "warn", "error"]}]},
        "rule": {"anyOf": [{"$ref": "#/definitions/severity"},
                           {"type": "array", "items": [{"$ref": "#/definitions/severity"}],
                            "additionalItems": True}]},
        "person": {"type": ["object", "string"], "required": ["name"],
                   "properties": {"name": {"type": "string"},
                                  "url": {"type": "string", "format": "uri"},
                                  "email": {"type": "string", "format": "email"}}},
        "dependency": {"type": "object", "additionalProperties": {"type": "string"}},
        "event": {"type": "string", "enum": constants(rng, rng.choice((30, 80, 200)))},
        "step": {"type": "object", "additionalProperties": False, "required": ["run"],
                 "properties": {"id": {"type": "string"}, "run": {"type": "string"},
                                "if": {"type": ["boolean", "number", "string"]},
                                "with": {"$ref": "#/definitions/dependency"},
                                "timeout-minutes": {"type": "number", "minimum": 1}}},
        "job": {"type": "object", "required": ["runs-on"], "additionalProperties": False,
                "properties": {
                    "runs-on": {"anyOf": [{"type": "string"},
                                          {"type": "array", "items": {"type": "string"},
                                           "minItems": 1}]},
                    "needs": {"oneOf": [{"type": "array", "items": {"type": "string"}},
                                        {"type": "string"}]},
                    "steps": {"type": "array", "items": {"$ref": "#/definitions/step"},
                              "minItems": 1},
                    "env": {"$ref": "#/definitions/dependency"}}},
    }  # fmt: skip
    properties: Schema = {
        "name": {"type": "string", "maxLength": 214,
                 "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
        "version": {"type": "string"},
        "author": {"$ref": "#/definitions/person"},
        "contributors": {"type": "array", "items": {"$ref": "#/definitions/person"}},
        "dependencies": {"$ref": "#/definitions/dependency"},
        "on": {"oneOf": [{"$ref": "#/definitions/event"},
                         {"type": "array", "items": {"$ref": "#/definitions/event"},
                          "minItems": 1}]},
        "jobs": {"type": "object", "patternProperties": {
            "^[_a-zA-Z][a-zA-Z0-9_-]*$": {"$ref": "#/definitions/job"}},
            "additionalProperties": False},
        **options,
    }  # fmt: skip
    if rules:
        properties["rules"] = {"type": "object", "properties": rules,
                               "additionalProperties": {"$ref": "#/definitions/rule"}}  # fmt: skip
    if rng.random() < 0.4:
        properties["overrides"] = {"type": "array", "items": {"$ref": "#"}}
    kept = {key: properties[key] for key in properties if key in rules or rng.random() < 0.75}
    schema = _object(rng, kept, 0.08, closed=0.3)
    if rng.random() < 0.3:
        schema["patternProperties"] = {"^_": {}}
    return {"$schema": DRAFT7, **schema, "definitions": definitions}


def _article(rng: random.Random) -> Schema:
    """As of a newspaper's content API: shared traits, alternatives of elements, recursion."""
    traits = {f"trait_{key}": _described(rng, _scalar(rng), 0.9) for key in names(rng, 10)}
    kinds, order = names(rng, rng.randint(3, 8)), list(traits)
    elements = {
        kind: {"type": "object", "additionalProperties": False, "required": ["type"],
               "properties": {"type": {"type": "string", "enum": [kind]},
                              **{t.removeprefix("trait_"): {"$ref": f"#/definitions/{t}"}
                                 for t in sorted(rng.sample(order, 5), key=order.index)}}}
        for kind in kinds
    }  # fmt: skip
    elements[kinds[0]]["properties"]["children"] = {
        "type": "array", "items": {"$ref": "#/definitions/element"}}  # fmt: skip
    any_element = {"oneOf": [{"$ref": f"#/definitions/{kind}"} for kind in kinds]}
    properties: Schema = {t.removeprefix("trait_"): {"$ref": f"#/definitions/{t}"} for t in traits}
    properties["type"] = {"type": "string", "enum": ["story"]}
    properties["version"] = {"type": "string", "pattern": "^\\d+\\.\\d+\\.\\d+$",
                             "enum": ["0.5.8"]}  # fmt: skip
    properties["content"] = {"type": "array", "items": {"$ref": "#/definitions/element"}}
    properties["owner"] = {"type": "object", "additionalProperties": False, "properties": {
        "id": {"type": "string"}, "sponsored": {"type": "boolean"}}}  # fmt: skip
    return {
        "$schema": DRAFT4, "type": "object", "properties": properties,
        "additionalProperties": False, "required": ["type", "version"],
        "definitions": {**traits, **elements, "element": any_element},
    }  # fmt: skip


def _tool_parameters(rng: random.Random) -> Schema:
    schema = _tree(rng, rng.randint(3, 10), rng.choice((0, 1, 2)), lambda: _scalar(rng))
    for value in schema["properties"].values():
        if value.get("type") in ("integer", "number") and rng.random() < 0.5:
            value["format"] = rng.choice(IGNORED_FORMATS[:4])
        if rng.random() < 0.2 and "type" in value and isinstance(value["type"], str):
            value["default"] = {"string": "", "boolean": False}.get(value["type"])
    schema["additionalProperties"] = False
    return schema


def _model(rng: random.Random) -> Schema:
    """As pydantic and zod write them: titles, `$defs`, `anyOf` null, discriminated unions."""
    titles = [title.replace("-", "").capitalize() for title in names(rng, rng.randint(2, 7))]
    titles = list(dict.fromkeys(titles))
    is_closed = rng.random() < 0.4

    def leaf(later: list[str]) -> Schema:
        kind = rng.random()
        if later and kind < 0.2:
            return {"$ref": f"#/$defs/{rng.choice(later)}"}
        if later and kind < 0.3:
            return {"items": {"$ref": f"#/$defs/{rng.choice(later)}"}, "type": "array"}
        if kind < 0.5:
            other = (
                {"$ref": f"#/$defs/{rng.choice(later)}"} if later and kind < 0.36 else _text(rng)
            )
            return {"anyOf": [other, {"type": "null"}], "default": None}
        if kind < 0.55:
            return {"additionalProperties": {"type": "number"}, "type": "object"}
        return _text(rng) if kind < 0.8 else _number(rng) if kind < 0.93 else {"type": "boolean"}

    definitions: Schema = {}
    for index, title in enumerate(titles):
        if rng.random() < 0.2:
            definitions[title] = {"enum": constants(rng, rng.randint(2, 12)), "title": title,
                                  "type": "string"}  # fmt: skip
            continue
        properties = {key: {**leaf(titles[index + 1 :]), "title": key}
                      for key in names(rng, rng.randint(2, 9))}  # fmt: skip
        definitions[title] = {**_object(rng, properties, 0.6, float(is_closed)), "title": title}
    variants = names(rng, rng.randint(2, 4))
    for variant in variants:
        properties = {"kind": {"const": variant, "type": "string"},
                      **{key: leaf(titles) for key in names(rng, 3)}}  # fmt: skip
        definitions[f"V{variant}"] = {
            **_object(rng, properties, 1.0, float(is_closed)), "required": list(properties),
        }  # fmt: skip
    root = {key: {**leaf(titles), "title": key} for key in names(rng, rng.randint(2, 8))}
    union = {"oneOf": [{"$ref": f"#/$defs/V{variant}"} for variant in variants],
             "discriminator": {"propertyName": "kind", "mapping": {
                 variant: f"#/$defs/V{variant}" for variant in variants}}}  # fmt: skip
    root[name(rng)] = {"items": union, "type": "array"} if rng.random() < 0.5 else union
    schema = {"$defs": definitions, **_object(rng, root, 0.7, float(is_closed)), "title": "Model"}
    return {"$schema": DRAFT2020, **schema} if rng.random() < 0.3 else schema


FAMILIES: Mapping[str, tuple[Callable[[random.Random], Schema], int]] = {
    "function call": (_function_call, 14),
    "github easy": (_easy, 18),
    "github medium": (_medium, 17),
    "github hard": (_hard, 11),
    "github ultra": (_ultra, 2),
    "event": (_event, 5),
    "kubernetes": (_kubernetes, 10),
    "configuration": (_configuration, 6),
    "article": (_article, 2),
    "tool parameters": (_tool_parameters, 7),
    "model": (_model, 8),
}
"""A generator for each family, and its share in percent."""
