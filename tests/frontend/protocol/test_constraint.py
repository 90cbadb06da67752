"""What gen takes for a constraint, and what it makes of it."""

from __future__ import annotations

import json
import re
from typing import Any

import pydantic
import pytest

import stemma as st
from stemma.errors import InvalidProgram
from stemma.frontend.dsl.expr import GenExpr, SelectExpr
from stemma.frontend.protocol.constraint import (
    DTYPES,
    MAX_SOURCE_BYTES,
    Constraint,
    constraint_of,
    schema_text,
)
from stemma.frontend.protocol.ir import GenParams


def constraint(**options: Any) -> Constraint | None:
    expr = st.gen("x", **options)
    assert isinstance(expr, GenExpr)
    return expr.params.constraint


def test_a_gen_carries_what_it_was_given() -> None:
    assert constraint() is None
    assert constraint(regex="a+") == Constraint("regex", "a+")
    assert constraint(regex="") == Constraint("regex", "")
    assert constraint(ebnf='start: "a"') == Constraint("ebnf", 'start: "a"')
    tag = {"triggers": ["<"], "structures": []}
    assert constraint(structural_tag=tag) == Constraint(
        "structural_tag", '{"triggers":["<"],"structures":[]}'
    )
    schema = {"type": "object", "properties": {"b": {}, "a": {"const": "é"}}}
    text = '{"type":"object","properties":{"b":{},"a":{"const":"é"}}}'
    assert constraint(json_schema=schema) == Constraint("json_schema", text)
    assert constraint(json_schema=json.dumps(schema, indent=3)) == Constraint("json_schema", text)
    assert constraint(
        json_schema=True, whitespace="flexible", property_order="any", lenient=True
    ) == Constraint("json_schema", "true", "flexible", "any", True)


def test_choices_are_a_select_as_in_sglang() -> None:
    assert isinstance(st.gen("x", choices=["a", "b"]), SelectExpr)


@pytest.mark.parametrize(
    ("dtype", "right", "wrong"),
    [
        (int, ["0", "-7", "123456789012345678"], ["+1", "01", "1.0", "", "1234567890123456789"]),
        (float, ["0", "-1.5", "3.0", "12"], [".5", "1.", "1e5", "nan"]),
        (bool, ["True", "False"], ["true", "0", ""]),
        (str, ['""', '"a é\\t"'.replace("\\t", " ")], ["a", '"a', '"a"b"', '"\n"']),
    ],
)
def test_a_dtype_is_a_regex_whose_texts_python_reads(
    dtype: type, right: list[str], wrong: list[str]
) -> None:
    made = constraint(dtype=dtype)
    assert made is not None and made == Constraint("regex", DTYPES[dtype])
    for text in right:
        assert re.fullmatch(made.source, text), text
        if dtype in (int, float):
            dtype(text)
    for text in wrong:
        assert not re.fullmatch(made.source, text), text


def test_gen_int_and_gen_string_are_gens_with_a_dtype() -> None:
    assert st.gen_int("x", 5) == st.gen("x", 5, dtype=int)
    assert st.gen_string("x", stop="y") == st.gen("x", dtype=str, stop="y")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"regex": "a", "ebnf": "b"}, "regex and ebnf"),
        ({"regex": "a", "choices": ["b"]}, "regex and choices"),
        ({"dtype": int, "json_schema": {}}, "json_schema and dtype"),
        ({"dtype": complex}, "dtype"),
        ({"dtype": "integer"}, "dtype"),
        ({"regex": 5}, "regex"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"regex": "a" * (MAX_SOURCE_BYTES + 1)}, "at most"),
        ({"json_schema": {"enum": [1] * MAX_SOURCE_BYTES}}, "at most"),
        ({"json_schema": "[" * (MAX_SOURCE_BYTES + 1)}, "at most"),
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": [1]}, "json_schema"),
        ({"json_schema": {"a": {1, 2}}}, "not JSON"),
        ({"json_schema": {"minimum": float("nan")}}, "not JSON"),
        ({"json_schema": "[" * 100_000}, "not JSON"),
        ({"json_schema": {}, "whitespace": "some"}, "whitespace"),
        ({"json_schema": {}, "property_order": "random"}, "property_order"),
        ({"regex": "a", "whitespace": "compact"}, "only together with json_schema or tags"),
        ({"lenient": True}, "only together with json_schema or tags"),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_is_written(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidProgram, match=words):
        st.gen("x", **options)


class Address(pydantic.BaseModel):
    city: str
    tags: dict[str, int] = {}


class Person(pydantic.BaseModel):
    name: str
    home: Address | None = None
    others: list[Address] = []


class Open(pydantic.BaseModel, extra="allow"):
    name: str = "properties"


def test_objects_of_a_pydantic_model_are_closed_unless_they_say_otherwise() -> None:
    schema = json.loads(schema_text(Person))
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Address"]["additionalProperties"] is False
    tags = schema["$defs"]["Address"]["properties"]["tags"]
    assert tags["additionalProperties"] == {"type": "integer"}
    assert schema["properties"]["others"]["default"] == []
    assert json.loads(schema_text(Open))["additionalProperties"] is True
    # A dict says itself what it means.
    assert schema_text({"properties": {}}) == '{"properties":{}}'


def test_defaults_of_a_run_keep_a_constraint_and_its_type() -> None:
    made = constraint_of(regex="a")
    params = GenParams(constraint=made).with_defaults(GenParams(temperature=0.5))
    assert params.constraint is made and params.temperature == 0.5


@pytest.mark.parametrize(
    "given",
    [None, 5, {}, {"kind": "regex", "more": 1}, {"kind": "magic"}, {"kind": "regex", "source": 5},
     {"kind": "json_schema", "whitespace": []}, {"kind": "json_schema", "is_lenient": "yes"}],
)  # fmt: skip
def test_senseless_constraints_on_the_wire_are_refused(given: object) -> None:
    with pytest.raises(InvalidProgram):
        GenParams.from_wire({"constraint": given})
