"""Each keyword: a schema, instances that are valid and instances that are not."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from canonical_json import canonical_text, in_decimals, key_order
from grammar_oracle import grammar_matches

from stemma.constrained.schema.schema_grammar import schema_grammar

INTEGER = {"type": "integer"}
TREE = {
    "type": "object",
    "properties": {"v": INTEGER, "kids": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["v"],
    "additionalProperties": False,
}
SHAPES = {
    "oneOf": [
        {"properties": {"kind": {"const": "circle"}, "r": INTEGER}, "required": ["kind", "r"]},
        {"properties": {"kind": {"const": "square"}, "side": INTEGER}, "required": ["kind"]},
    ],
    "type": "object",
}

# A generic list, bound to words on one way and to anything on the other.
GENERIC = {
    "$id": "http://x.test/root",
    "properties": {"words": {"$ref": "words"}, "all": {"$ref": "list"}},
    "$defs": {
        "words": {
            "$id": "words",
            "$ref": "list",
            "$defs": {"word": {"$dynamicAnchor": "item", "type": "string"}},
        },
        "list": {
            "$id": "list",
            "type": "array",
            "items": {"$dynamicRef": "#item"},
            "$defs": {"any": {"$dynamicAnchor": "item"}},
        },
    },
}
RECURSIVE = {
    "$schema": "https://json-schema.org/draft/2019-09/schema",
    "$id": "http://x.test/outer",
    "$recursiveAnchor": True,
    "type": ["object", "array"],
    "properties": {"a": {"$ref": "inner"}},
    "$defs": {"a": {"$id": "inner", "$recursiveAnchor": True, "items": {"$recursiveRef": "#"}}},
}

CASES: list[tuple[Any, list[Any], list[Any]]] = [
    (True, [None, 1, "a", [], {}], []),
    ({}, [None, True, 1.5, "\u2028", [[]], {"a": {}}], []),
    ({"type": "null"}, [None], [False, 0, ""]),
    ({"type": "boolean"}, [True, False], [None, 1]),
    (INTEGER, [0, -3, 10**30], [0.5, "1", True]),
    ({"type": "number"}, [0, 1.5, -0.25], ["1", None]),
    ({"type": ["string", "null"]}, ["", None], [0, []]),
    ({"not": INTEGER}, [0.5, "x", None, {}], [1, -20]),
    ({"enum": [1, "a", None, [1, {"b": 2}], {"c": []}]}, [1, "a", None, [1, {"b": 2}], {"c": []}],
     [True, "b", [], [1], {"c": [1]}, {}]),
    ({"enum": [0, False]}, [0, False], [True, 1, None]),
    ({"const": 1.0}, [1], [True, 2]),
    ({"not": {"const": {"a": 1}}}, [{}, {"a": 2}, {"a": 1, "b": 1}, 1], [{"a": 1}]),
    ({"not": {"enum": ["a", 1.5]}}, ["b", 1, 2.5, None], ["a", 1.5]),
    # strings
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "aé\U0001f600"],
     ["a", "abcd"]),
    ({"not": {"minLength": 3}}, ["", "ab"], ["abc", 1, None]),
    ({"pattern": "^a+$", "type": "string"}, ["a", "aaa"], ["", "ab"]),
    ({"pattern": "b", "maxLength": 2}, ["b", "ab", 5], ["a", "abc"]),
    ({"not": {"pattern": "b"}}, ["", "a"], ["b", "abc", 3]),
    ({"type": "string", "pattern": "\\n"}, ["a\nb"], ["ab"]),
    # numbers
    ({"type": "integer", "minimum": -5, "maximum": 12}, [-5, 0, 9, 12], [-6, 13, 99]),
    ({"type": "number", "exclusiveMinimum": 0.5, "maximum": 10.25}, [0.51, 1, 10, 10.25],
     [0.5, 0, -1, 10.26, 11]),
    ({"minimum": -2.5, "exclusiveMaximum": -0.05}, [-2.5, -1, -0.06, "x"], [-2.51, -0.05, 0, 3]),
    ({"type": "integer", "multipleOf": 7}, [0, 7, -14, 7007], [1, 8, -15]),
    ({"multipleOf": 0.01, "type": "number"}, [0, 19.99, -3, 0.1], [0.001, 1.234]),
    ({"multipleOf": 0.25, "minimum": 0.5, "maximum": 2}, [0.5, 0.75, 1, 2], [0.25, 0.6, 2.25]),
    ({"type": "integer", "multipleOf": 5, "minimum": 3}, [5, 10, 12345], [0, 3, 7, 12346]),
    ({"type": "number", "not": {"multipleOf": 3}}, [1, 3.5, -2], [0, 3, -6]),
    ({"allOf": [{"multipleOf": 4}, {"multipleOf": 6}]}, [0, 12, -24], [4, 6, 18]),
    ({"type": "number", "not": {"minimum": 0}, "minimum": -3}, [-3, -0.5], [0, 1, -4]),
    # arrays
    ({"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2}, [[1], [1, 2]],
     [[], [1, 2, 3], ["a"]]),
    ({"prefixItems": [INTEGER, {"type": "string"}], "items": False}, [[], [1], [1, "a"], 3],
     [["a"], [1, 1], [1, "a", 1]]),
    ({"items": [INTEGER], "additionalItems": {"type": "null"}}, [[1, None, None]],
     [[None], [1, 1]]),
    ({"contains": INTEGER}, [[1], ["a", 2], {}], [[], ["a"]]),
    ({"contains": INTEGER, "minContains": 2, "maxContains": 3}, [[1, "a", 2], [1, 2, 3]],
     [[1], [1, 2, 3, 4]]),
    ({"contains": INTEGER, "minContains": 0}, [[], ["a"]], []),
    ({"not": {"contains": INTEGER}}, [[], ["a"]], [[1], ["a", 1], 3]),
    ({"not": {"items": INTEGER}}, [["a"], [1, "a"]], [[], [1], "a"]),
    ({"not": {"minItems": 2}}, [[], [1]], [[1, 2], 1]),
    ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
     [[], ["a"], ["c", "a"], ["a", "b", "c"]], [["a", "a"], ["a", "b", "a"]]),
    ({"uniqueItems": True, "prefixItems": [{"type": "boolean"}] * 2, "items": False},
     [[], [True], [True, False]], [[True, True]]),
    ({"uniqueItems": True, "maxItems": 1}, [[], [{}]], [[1, 1]]),
    ({"unevaluatedItems": False, "prefixItems": [INTEGER]}, [[], [1]], [[1, 2], ["a"]]),
    ({"anyOf": [{"prefixItems": [{"const": 1}]}, {"prefixItems": [True, {"const": 2}]}],
      "unevaluatedItems": False}, [[], [1], [1, 2], ["x", 2]], [["x", 3], [1, 2, 3], [1, 3]]),
    ({"contains": {"type": "string"}, "unevaluatedItems": INTEGER}, [["a", 1], ["a"]],
     [[1], ["a", None]]),
    # objects
    ({"type": "object", "properties": {"a": INTEGER, "b": {"type": "string"}}, "required": ["b"],
      "additionalProperties": False}, [{"a": 1, "b": ""}, {"b": "x"}],
     [{}, {"a": 1}, {"a": "1", "b": ""}, {"b": "", "c": 1}]),
    ({"properties": {"a": INTEGER}}, [{}, {"a": 1, "z": None}, {"z": 1}, 5], [{"a": "x"}]),
    ({"properties": {"a": False}}, [{}, {"b": 1}], [{"a": 1}]),
    ({"patternProperties": {"^x-": INTEGER}, "additionalProperties": False},
     [{}, {"x-1": 1, "x-": 2}], [{"a": 1}, {"x-1": "a"}]),
    ({"patternProperties": {"a": INTEGER, "b$": {"minimum": 5}}}, [{"a": 1, "xb": 7}, {"ab": 5}],
     [{"ab": 1}, {"a": "x"}, {"b": 1}]),
    ({"properties": {"ab": True}, "patternProperties": {"a": INTEGER}}, [{"ab": 1}], [{"ab": "x"}]),
    ({"additionalProperties": {"type": "string"}}, [{}, {"q": ""}], [{"q": 1}]),
    ({"propertyNames": {"maxLength": 2}}, [{}, {"ab": 1}], [{"abc": 1}]),
    ({"propertyNames": {"enum": ["b", "a"]}, "minProperties": 1}, [{"b": 1}, {"b": 1, "a": 2}],
     [{}, {"c": 1}]),
    ({"propertyNames": False}, [{}], [{"a": 1}]),
    ({"minProperties": 2, "properties": {"a": INTEGER}}, [{"a": 1, "b": 1}, {"b": 1, "c": 2}],
     [{}, {"a": 1}]),
    ({"maxProperties": 1}, [{}, {"b": 1}, []], [{"a": 1, "b": 2}]),
    ({"properties": {"a": True, "b": True, "c": True}, "additionalProperties": False,
      "minProperties": 1, "maxProperties": 2}, [{"a": 1}, {"b": 1, "c": 2}],
     [{}, {"a": 1, "b": 2, "c": 3}]),
    ({"not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}, 5]),
    ({"not": {"properties": {"a": INTEGER}}}, [{"a": "x"}], [{}, {"a": 1}, {"b": 1}]),
    ({"not": {"additionalProperties": INTEGER, "properties": {"a": True}}},
     [{"a": 1, "b": "x"}, {"q": None}], [{}, {"a": "x"}, {"b": 1}]),
    ({"not": {"propertyNames": {"pattern": "^a"}}}, [{"b": 1}, {"a": 1, "b": 1}], [{}, {"ab": 1}]),
    ({"not": {"minProperties": 1}}, [{}], [{"a": 1}]),
    ({"dependentRequired": {"a": ["b"]}}, [{}, {"a": 1, "b": 1}, {"b": 1}], [{"a": 1}]),
    ({"dependentSchemas": {"a": {"properties": {"b": INTEGER}}}}, [{"b": "x"}, {"a": 1, "b": 1}],
     [{"a": 1, "b": "x"}]),
    ({"dependencies": {"a": ["b"], "c": {"required": ["d"]}}}, [{"a": 1, "b": 1}, {"c": 1, "d": 1}],
     [{"a": 1}, {"c": 1}]),
    ({"properties": {"a": True}, "unevaluatedProperties": False}, [{}, {"a": 1}], [{"b": 1}]),
    ({"allOf": [{"properties": {"a": INTEGER}}], "properties": {"b": True},
      "unevaluatedProperties": False}, [{"a": 1, "b": 2}], [{"a": 1, "c": 2}, {"a": "x"}]),
    ({"anyOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]},
                {"properties": {"b": True}, "required": ["b"]}], "unevaluatedProperties": False},
     [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 2, "b": 1}, {}, {"b": 1, "c": 1}]),
    ({"if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
      "then": {"properties": {"b": True}}, "unevaluatedProperties": INTEGER},
     [{"a": 1, "b": "x"}, {"b": 2}], [{"b": "x"}, {"a": 1, "c": ""}]),
    # applicators
    ({"allOf": [{"properties": {"a": {"minimum": 0}}}, {"properties": {"a": INTEGER},
                 "required": ["a"]}]}, [{"a": 3}], [{"a": -1}, {"a": 0.5}, {}]),
    ({"anyOf": [INTEGER, {"maxLength": 1}]}, [1, "a", None], ["ab"]),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, [1.5], [1, "a"]),
    ({"oneOf": [{"multipleOf": 3}, {"multipleOf": 5}]}, [3, 5, 10], [15, 0, 1, "a"]),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}],
     [{}, {"a": 1, "b": 1}, 3]),
    (SHAPES, [{"kind": "circle", "r": 1}, {"kind": "square"},
              {"kind": "square", "side": 2, "q": 1}], [{"kind": "circle"}, {"kind": "oval"}, {}]),
    ({"not": {"oneOf": [INTEGER, {"minimum": 5}]}}, [5, 6], [1, 5.5, "a"]),
    ({"if": INTEGER, "then": {"minimum": 5}, "else": {"type": "string"}}, [5, "a"], [4, 5.5, None]),
    ({"not": {"if": INTEGER, "then": {"minimum": 5}}}, [4], [5, "a"]),
    ({"not": {}}, [], [1, {}]),
    # references
    (TREE, [{"v": 1}, {"v": 1, "kids": [{"v": 2, "kids": []}, {"v": 3}]}],
     [{"kids": []}, {"v": 1, "kids": [{}]}]),
    ({"$defs": {"n/~ %": INTEGER}, "items": {"$ref": "#/$defs/n~1~0%20%25"}}, [[1]], [["a"]]),
    ({"$id": "http://x.test/a", "$defs": {"b": {"$id": "b", "$anchor": "here", "type": "null"}},
      "items": {"$ref": "b#here"}}, [[None]], [[1]]),
    ({"$dynamicRef": "#n", "$defs": {"a": {"$dynamicAnchor": "n", "type": "null"}}}, [None], [1]),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": INTEGER}}, [3], [2, 3.5]),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a", "minimum": 3,
      "definitions": {"a": INTEGER}}, [2], [3.5]),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": 5}, [[1]], []),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3, "exclusiveMinimum": True,
      "id": "http://x.test/"}, [4, 3.5], [3]),
    ({"$schema": "https://json-schema.org/draft/2019-09/schema", "items": {"$recursiveRef": "#"},
      "type": "array"}, [[[], [[]]]], [[1]]),
    ({"$schema": "https://json-schema.org/draft/2019-09/schema", "$recursiveAnchor": True,
      "items": {"$recursiveRef": "#"}, "type": "array"}, [[[], [[]]]], [[1]]),
    ({"$id": "http://x.test/", "items": {"$dynamicRef": "#plain"},  # no dynamic anchor: as $ref
      "$defs": {"a": {"$anchor": "plain", "type": "null"},
                "b": {"$id": "b", "$dynamicAnchor": "plain", "type": "string"}}},
     [[None]], [["a"]]),
    (GENERIC, [{"words": ["a"]}, {"all": [1, "a"]}], [{"words": [1]}]),
    (RECURSIVE, [{"a": [{}, {"a": [[]]}]}], [{"a": [1]}, {"a": [{"a": [1]}]}]),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0])[:60])
def test_a_schema_matches_its_valid_instances_only(case: tuple[Any, list[Any], list[Any]]) -> None:
    schema, valid, invalid = case
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    order = key_order(schema)
    grammar = None if schema == {"not": {}} else schema_grammar(schema).grammar
    for instance in (*valid, *invalid):
        expected = instance in valid and any(instance is one for one in valid)
        if "dependencies" not in str(schema) and "additionalItems" not in str(schema):
            assert kind(in_decimals(schema)).is_valid(in_decimals(instance)) == expected, (
                f"the case {instance} is wrong"
            )
        if grammar is not None:
            text = canonical_text(instance, order)
            assert grammar_matches(grammar, text) == expected, text
