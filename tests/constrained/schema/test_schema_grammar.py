"""Errors, options and spelling of schema grammars."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from grammar_oracle import grammar_matches

from stemma.constrained.regular.build import NotRegular, build_dfa
from stemma.constrained.schema.keywords import KEYWORDS, keyword_table
from stemma.constrained.schema.schema_grammar import schema_grammar
from stemma.errors import InvalidGrammar, UnsupportedSchema

DRAFT7 = "http://json-schema.org/draft-07/schema#"


def matches(schema: Any, text: str, **options: Any) -> bool:
    return grammar_matches(schema_grammar(schema, **options).grammar, text)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "nonsense"}, ("type='nonsense'", "null, boolean")),
        ({"properties": {"a": {"minLength": "3"}}}, ("/properties/a: minLength='3'",)),
        ({"items": {"minLength": 1e30}}, ("/items: minLength=1e+30", "from 0 to 2147483647")),
        ({"maxItems": 2**31}, ("maxItems=2147483648", "from 0 to 2147483647")),
        ({"required": 5}, ("required=5", "list of property names")),
        ({"items": {"a/b": 1, "anyOf": []}}, ("/items: anyOf=[]",)),
        ({"properties": {"a/b": {"not": 3}}}, ("/properties/a~1b: not=3",)),
        ({"minimum": float("nan")}, ("minimum=nan",)),
        ({"enum": [float("inf")]}, ("JSON values only",)),
        ([1], ("a schema: an object, true or false",)),
        ({"$ref": "#"}, ("refers to itself",)),
        ({"not": {"$ref": "#"}}, ("refers to itself",)),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}},
          "$ref": "#/$defs/a"}, ("/$defs/a: ", "refers to itself")),
        ({"$ref": "#/$defs/x"}, ("points to nothing",)),
        ({"const": "\ud800"}, ("surrogates",)),
        ({"properties": {"\ud800": {}}}, ("surrogates",)),
        (False, ("matches no document",)),
        ({"type": "string", "enum": [1]}, ("matches no document",)),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"},
         ("matches no document",)),
        ({"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "^b"}]},
         ("matches no document",)),
        ({"contains": {"const": 1}, "minContains": 10**6}, ("more than 12000 rules",)),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_used_is_an_error_that_says_why(
    schema: Any, words: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidGrammar) as caught:
        schema_grammar(schema)
    assert not isinstance(caught.value, UnsupportedSchema)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("schema", "pointer", "keyword"),
    [
        ({"items": {"$ref": "http://127.0.0.1:9/x.json"}}, "/items", "$ref"),
        ({"properties": {"a": {"not": {"uniqueItems": True}}}}, "/properties/a", "uniqueItems"),
        ({"properties": {"a": {"pattern": "(a)\\1"}}}, "/properties/a", "pattern"),
        ({"properties": {"a": {"pattern": "("}}}, "/properties/a", "pattern"),
        ({"type": "integer", "multipleOf": 12345}, "", "multipleOf"),
        ({"$schema": "http://example.com/mine"}, "", "$schema"),
        ({"$schema": DRAFT7, "contentMediaType": "application/json"}, "", "contentMediaType"),
        ({"allOf": [{"oneOf": [{"properties": {f"{i}{j}": {"type": "null"} for j in range(9)}}
                               for i in range(8)]}]}, "", "allOf"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_names_its_place_and_keyword(
    schema: Any, pointer: str, keyword: str
) -> None:
    with pytest.raises(UnsupportedSchema) as caught:
        schema_grammar(schema)
    assert (caught.value.pointer, caught.value.keyword) == (pointer, keyword)


def test_lenient_drops_the_keyword_with_a_warning() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "not": {"uniqueItems": True}}
    built = schema_grammar(schema, is_lenient=True)
    assert grammar_matches(built.grammar, "[1,1]")
    assert not grammar_matches(built.grammar, '["a"]')
    assert len(built.warnings) == 1
    assert built.warnings[0].startswith("/: uniqueItems is not enforced")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"$ref": "http://127.0.0.1:9/x.json"}, "1"),
        ({"pattern": "(a)\\1"}, '"aa"'),
        ({"not": {"pattern": "(a)\\1"}}, '"b"'),
        ({"patternProperties": {"(a)\\1": True}, "additionalProperties": False}, '{"aa":1}'),
        ({"type": "integer", "multipleOf": 12345}, "24690"),
        ({"type": "number", "not": {"multipleOf": 12345}, "minimum": 1}, "2"),
        ({"not": {"uniqueItems": True}}, "[1,1]"),
        ({"contains": {"maximum": 9}, "minContains": 2, "uniqueItems": True}, "[1,1]"),
    ],
)
def test_lenient_enforces_less_never_more(schema: Any, text: str) -> None:
    built = schema_grammar(schema, is_lenient=True)
    assert built.warnings
    assert grammar_matches(built.grammar, text)


def test_lenient_drops_what_multiplies_out_to_too_much() -> None:
    branches = [{"properties": {f"{i}{j}": {"type": "null"} for j in range(9)}} for i in range(12)]
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "oneOf": branches}
    built = schema_grammar(schema, is_lenient=True)
    assert built.warnings
    others = "".join(f',"{i}0":1' for i in range(1, 12))
    assert grammar_matches(built.grammar, '{"a":null' + others + "}")
    assert not grammar_matches(built.grammar, '{"a":1' + others + "}")


def test_open_variants_exclude_each_other() -> None:
    """Without `additionalProperties: false` an object may be valid under two branches."""
    schema = {
        "oneOf": [
            {"properties": {k: {"type": "string"} for k in (f"{i}x", f"{i}y", "name")},
             "required": ["name", f"{i}x"], "type": "object"}
            for i in range(4)
        ]
    }  # fmt: skip
    assert matches(schema, '{"1x":"","name":""}') or matches(schema, '{"name":"","1x":""}')
    assert matches(schema, '{"name":"","1x":"","1y":"","2x":1}')
    assert not matches(schema, '{"name":"","1x":"","2x":""}')
    assert not matches(schema, '{"name":"","1x":0}')


def test_strict_schemas_have_no_warnings() -> None:
    assert schema_grammar({"type": "integer", "description": "x", "unknown": 1}).warnings == ()


def test_flexible_whitespace_is_bounded_and_optional() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "null"}}, "b": {}},
        "required": ["a"],
        "additionalProperties": False,
    }
    pretty = '{\n  "a" : [\n    null,\n null ],\n  "b":\t[ ]\n}'
    assert matches(schema, pretty, whitespace="flexible")
    assert matches(schema, '{"a":[null],"b":{}}', whitespace="flexible")
    assert not matches(schema, pretty)
    assert not matches(schema, '{\n\n"a":[]}', whitespace="flexible")
    assert not matches(schema, "{" + " " * 21 + '"a":[]}', whitespace="flexible")


def test_keys_come_in_the_schemas_order_unless_any_is_asked_for() -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in "abc"},
        "required": ["a", "c"],
        "additionalProperties": False,
    }
    assert matches(schema, '{"a":1,"b":2,"c":3}')
    assert not matches(schema, '{"c":1,"a":2}')
    for text in ('{"c":1,"a":2}', '{"b":0,"c":1,"a":2}', '{"a":1,"c":2}'):
        assert matches(schema, text, property_order="any")
    for text in ('{"c":1}', '{"a":1,"c":2,"a":3}', "{}"):
        assert not matches(schema, text, property_order="any")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind", "z"],
          "if": {"properties": {"kind": {"const": "a"}}},
          "then": {"properties": {"x": {"type": "integer"}}}}, '{"kind":"b","x":"s","z":1}'),
        ({"anyOf": [{"properties": {"x": {"type": "null"}}, "required": ["x"]},
                    {"properties": {"y": {"type": "null"}}, "required": ["y"]}]},
         '{"x":1,"y":null}'),
        ({"oneOf": [{"properties": {"t": {"const": 1}, "size": {"type": "null"}}},
                    {"properties": {"t": {"const": 2}, "name": {"type": "null"}}}],
          "required": ["t", "name"]}, '{"t":2,"size":3,"name":null}'),
        ({"dependentRequired": {"a": ["b"]}, "required": ["c"]}, '{"b":1,"c":2}'),
    ],
)  # fmt: skip
def test_a_keys_place_is_the_same_in_every_branch(schema: dict[str, Any], text: str) -> None:
    schema = {"type": "object", **schema}
    assert matches(schema, text)
    members = text[1:-1].split(",")
    swapped = ",".join([*members[:-2], members[-1], members[-2]])
    assert not matches(schema, f"{{{swapped}}}")


def test_branches_with_very_many_keys_place_their_own_only() -> None:
    """Else each branch would have a rule for the keys of all others."""
    branches = [
        {"properties": {"t": {"const": i}, **{f"{i}.{j}": {"type": "null"} for j in range(20)}},
         "required": ["t"]}
        for i in range(40)
    ]  # fmt: skip
    schema = {"type": "object", "oneOf": branches}
    start = time.process_time()
    assert matches(schema, '{"t":1,"1.0":null,"0.0":5}')
    assert time.process_time() - start < 2


def test_any_order_takes_counts_and_free_keys() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": {"type": "null"},
        "maxProperties": 2,
    }
    assert matches(schema, '{"x":null,"a":1}', property_order="any")
    assert not matches(schema, '{"x":null,"a":1,"y":null}', property_order="any")
    assert not matches(schema, '{"x":null}', property_order="any")


def test_any_order_of_many_keys_is_refused() -> None:
    schema = {"properties": dict.fromkeys("abcdefg", True)}
    with pytest.raises(UnsupportedSchema, match="any order"):
        schema_grammar(schema, property_order="any")


def test_free_keys_are_reported() -> None:
    closed = {"type": "object", "properties": {"a": True}, "additionalProperties": False}
    closed["properties"] = {"a": {"type": "null"}}
    assert not schema_grammar(closed).needs_unique_keys
    assert schema_grammar({"type": "object"}).needs_unique_keys
    few_keys = {"patternProperties": {"^[ab]$": {"type": "null"}}, "additionalProperties": False}
    assert not schema_grammar({"type": "object", **few_keys}).needs_unique_keys


def test_strings_have_one_spelling_unless_nothing_is_asked_of_them() -> None:
    anything, short = {"type": "string"}, {"type": "string", "maxLength": 9}
    for text in (r'"\"\\\b\f\n\r\t\u001f\u0000"', '"é\u2028\x7f"', '"\U0001f600"'):
        assert matches(anything, text)
        assert matches(short, text)
    for text in (r'"\u0041"', r'"\/"', r'"\ud83d\ude00"', r'"\u001F"'):
        assert matches(anything, text)
        assert not matches(short, text)
    for text in (r'"\ud83d"', r'"\ude00"', '"\n"', r'"\x41"', '"'):
        assert not matches(anything, text)
        assert not matches(short, text)


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"pattern": r"^\d+$"}, ['"3"'], ['"\u0663"', r'"3\n"']),
        ({"pattern": r"^\D$"}, ['"x"'], ['"\u0663"', '"3"']),
        ({"pattern": r"^\S$"}, ['"x"', '"\u0663"'], ['"\ufeff"', r'"\u001c"']),
        ({"pattern": r"^[^\d]$"}, ['"x"'], ['"\u0663"']),
        ({"pattern": "^.$"}, ['"x"'], ['"\u2028"', r'"\r"', r'"\n"']),
        ({"not": {"pattern": "^.$"}}, ['"xx"', r'"\n"'], ['"x"', '"\u2028"', r'"\r"', r'"x\n"']),
        ({"not": {"pattern": r"^\d$"}}, ['"x"'], ['"3"', '"\u0663"', r'"3\n"']),
        ({"not": {"pattern": r"\s"}}, ['"x"'], ['" "', '"\ufeff"', r'"\u001c"']),
        ({"pattern": "^(a{,2}|x)$"}, ['"x"'], ['"aa"', '"a{,2}"']),
        ({"not": {"pattern": "^a{,2}$"}}, ['"x"'], ['"aa"', '"a{,2}"']),
        ({"pattern": "^[]ab]$|^[^]a]$|^c$"}, ['"c"'], ['"b"', '"xa]"', '"d"']),
        ({"pattern": r"^\p{Nd}$"}, ['"\u0663"'], ['"x"']),  # no regex of Python's
        ({"enum": ["3", "\u0663"], "pattern": r"^\d$"}, ['"3"'], ['"\u0663"']),
        ({"type": "object", "patternProperties": {r"^\d$": {"type": "integer"}},
          "additionalProperties": {"type": "null"}},
         ['{"3":1,"x":null}'], ['{"\u0663":1}', '{"\u0663":null}']),
        ({"type": "object", "properties": {"\u0663": True},
          "patternProperties": {r"^\d$": {"type": "integer"}}},
         ['{"\u0663":1}'], ['{"\u0663":null}']),
        ({"type": "object", "propertyNames": {"pattern": r"^\d$"}},
         ['{"3":1}'], ['{"\u0663":1}', '{"x":1}']),
        ({"type": "object", "not": {"propertyNames": {"pattern": r"^\d$"}}},
         ['{"x":1}'], ['{"\u0663":1}', '{"3":1}']),
    ],
)  # fmt: skip
def test_where_two_readings_of_a_pattern_differ_both_hold(
    schema: Any, yes: list[str], no: list[str]
) -> None:
    assert [text for text in yes if not matches(schema, text)] == []
    assert [text for text in no if matches(schema, text)] == []


def test_numbers_are_canonical_with_an_exponent_only_where_nothing_is_asked() -> None:
    assert matches({"type": "number"}, "-1.5e+10")
    assert not matches({"type": "number", "minimum": 0}, "1e5")
    for text in ("3.0", "03", "-0", "1e2", "+1"):
        assert not matches({"type": "integer"}, text)


def test_formats_can_be_annotations() -> None:
    assert not matches({"format": "date"}, '"x"')
    assert matches({"format": "date"}, '"x"', asserts_format=False)
    assert matches({"format": "vendor-made"}, '"x"')


def test_a_dialect_may_be_declared_or_given() -> None:
    schema = {"prefixItems": [{"type": "integer"}]}
    assert not matches(schema, '["a"]')
    assert matches(schema, '["a"]', dialect="draft7")
    assert matches({"$schema": DRAFT7, **schema}, '["a"]')
    with pytest.raises(InvalidGrammar, match="dialect='draft9'"):
        schema_grammar(schema, dialect="draft9")


def test_a_plain_object_is_regular_and_linear() -> None:
    properties = {f"p{i}": {"type": "boolean"} for i in range(40)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    dfa = build_dfa(schema_grammar(schema).grammar)
    assert dfa.num_states < 40 * 25
    with pytest.raises(NotRegular):
        build_dfa(schema_grammar({"type": "object"}).grammar)


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(100),
        nested(2000),
        {"enum": [f"value {i}" for i in range(5000)]},
        {"properties": {f"p{i}": {"type": "integer"} for i in range(1000)}},
        {"pattern": "^(a{1000}){100}$"},
        {"minLength": 10**9},
        {"type": "array", "maxItems": 10**9},
        {"minimum": 1e200},
        {"oneOf": [{"required": [f"k{j}" for j in range(i)]} for i in range(20)]},
        {"allOf": [{"if": {"properties": {"k": {"const": i}}, "required": ["k"]},
                    "then": {"required": [f"k{i}"]}} for i in range(30)]},
    ],
    ids=range(10),
)  # fmt: skip
def test_hard_schemas_end_soon_in_a_grammar_or_an_error(schema: Any) -> None:
    start = time.process_time()
    try:
        schema_grammar(schema)
    except InvalidGrammar as error:
        assert str(error).startswith("/")
    assert time.process_time() - start < 2


def test_a_schema_nested_too_deeply_is_refused() -> None:
    schema_grammar(nested(250))
    with pytest.raises(InvalidGrammar, match="/: the schema is nested too deeply: deeper than 256"):
        schema_grammar(nested(300))


def test_the_documentation_has_the_table_of_keywords() -> None:
    import stemma

    page = (re.sub(r"/[^/]*$", "", stemma.__file__ or "")) + "/docs/use/json-schema.md"
    with open(page, encoding="utf-8") as file:
        assert keyword_table() in file.read(), "run keyword_table() and put it into the page"
    assert all(f"`{name}`" in keyword_table() for name in KEYWORDS)


@pytest.mark.parametrize("keyword", ["$ref", "anyOf"])
def test_a_recursive_union_takes_rules_for_each_kind_and_not_for_each_pair(keyword: str) -> None:
    to_any = {"$ref": "#/$defs/any"}
    member = to_any if keyword == "$ref" else {"anyOf": [to_any, {"type": "null"}]}
    kinds = {
        f"n{i}": {
            "type": "object",
            "properties": {"kind": {"const": i}, "next": {**member, "title": f"after {i}"}},
            "required": ["kind"],
        }
        for i in range(50)
    }
    either = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in kinds]}
    schema = {"$ref": "#/$defs/any", "$defs": {**kinds, "any": either}}
    assert len(schema_grammar(schema).grammar.rules) < 50 * 6


def test_a_place_keeps_its_rank_where_it_is_beside_another() -> None:
    """The reference comes second, though its target was read first."""
    schema = {
        "properties": {
            "x": {"$ref": "#/$defs/b"},
            "y": {"properties": {"a": {"const": 1}}, "required": ["a"]},
        },
        "allOf": [{"properties": {"y": {"$ref": "#/$defs/b"}}}],
        "required": ["y"],
        "additionalProperties": False,
        "$defs": {"b": {"type": "object", "properties": {"b": {"const": 2}}, "required": ["b"]}},
    }
    assert matches(schema, '{"y":{"a":1,"b":2}}')


@pytest.mark.parametrize("values", [{"const": 1}, {"enum": [3, 1.0]}])
def test_branches_that_share_a_value_of_their_tag_still_exclude_each_other(values: Any) -> None:
    def branch(tag: Any, **properties: Any) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"t": tag, **properties},
            "required": ["t"],
            "additionalProperties": False,
        }

    integer = {"type": "integer"}
    schema = {"oneOf": [branch({"enum": [1, 2]}, a=integer), branch(values, a=integer, b=integer)]}
    assert matches(schema, '{"t":2,"a":5}') and matches(schema, '{"t":1,"a":5,"b":6}')
    assert not matches(schema, '{"t":1}') and not matches(schema, '{"t":1,"a":5}')
