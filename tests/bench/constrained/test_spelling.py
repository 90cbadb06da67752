"""The spellings under which an instance may be accepted."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as strategy

from stemma.bench.constrained.matchers.spelling import (
    MAX_SPELLINGS,
    mentioned_names,
    spelled,
    spellings,
)

scalars = strategy.none() | strategy.booleans() | strategy.integers() | strategy.text(max_size=5)
values = strategy.recursive(
    scalars | strategy.floats(allow_nan=False, allow_infinity=False),
    lambda below: (
        strategy.lists(below, max_size=4)
        | strategy.dictionaries(strategy.text(max_size=3), below, max_size=6)
    ),
    max_leaves=12,
)


@given(values, strategy.lists(strategy.text(max_size=3)))
def test_every_spelling_is_the_value_and_none_comes_twice(value: object, names: list[str]) -> None:
    texts = list(spellings(value, names))
    assert 1 <= len(texts) == len(set(texts)) <= MAX_SPELLINGS
    for text in texts:
        assert json.loads(text) == value


def test_properties_come_first_in_the_schemas_order_then_as_given_then_permuted() -> None:
    texts = list(spellings({"x": 1, "b": {"d": 2, "c": 3}}, ["b", "c", "d"]))
    assert texts[0] == '{"b":{"c":3,"d":2},"x":1}'
    assert texts[1] == '{"x":1,"b":{"d":2,"c":3}}'
    assert len(texts) == 4


def test_large_objects_are_not_permuted_and_the_number_of_spellings_is_bounded() -> None:
    six = {str(i): i for i in range(6)}
    assert len(list(spellings(six, []))) == 1
    rows = [{"a": 1, "b": 2} for _ in range(50)]
    assert len(list(spellings(rows, []))) < MAX_SPELLINGS


def test_numbers_without_fraction_are_integers_and_none_has_an_exponent() -> None:
    assert spelled([1.0, -0.0, 1e20, 1e-07, 2.5, True]) == (
        "[1,0,100000000000000000000,0.0000001,2.5,true]"
    )


def test_strings_are_unescaped_where_json_allows_it() -> None:
    assert spelled({"é\n": "\u2028\x01\x7f"}) == '{"é\\n":"\u2028\\u0001\x7f"}'


def test_names_are_collected_depth_first_through_the_whole_schema() -> None:
    schema = {
        "properties": {"a": {"properties": {"deep": {}}}, "b": {"enum": [{"no": 1}]}},
        "$defs": {"other": {"anyOf": [{"properties": {"late": {}, "a": {}}}]}},
    }
    assert mentioned_names(schema) == ["a", "b", "deep", "late"]
