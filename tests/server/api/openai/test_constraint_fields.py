"""What requests ask of their output's form, in the words of different clients."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stemma.errors import InvalidRequest
from stemma.frontend.protocol.constraint import Constraint
from stemma.server.api.openai.chat import ChatRequest, chat_request
from stemma.server.api.openai.completions import completion_request
from stemma.server.api.responses.schema import ResponsesRequest

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
NESTED = {"name": "x", "schema": SCHEMA}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}


def constraint(form: dict[str, Any]) -> Constraint | None:
    """The same on both endpoints."""
    chat = chat_request({"messages": [{"role": "user", "content": ""}], "response_format": form})
    completion = completion_request({"prompt": "", "response_format": form})
    found = chat.constraint()
    assert found == completion.constraint()
    return found


def refusal(form: dict[str, Any]) -> tuple[str | None, str]:
    """The field and the message of what both endpoints say."""
    with pytest.raises(InvalidRequest) as refused:
        constraint(form)
    return refused.value.field, str(refused.value)


def response(form: dict[str, Any]) -> ChatRequest:
    body = ResponsesRequest.model_validate({"input": "", "text": {"format": form}})
    return body.chat(body.messages())


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_right_beside_the_type_is_enforced(kind: str) -> None:
    """llama.cpp's, Together's and Fireworks' form."""
    found = constraint({"type": kind, "schema": SCHEMA})
    assert found is not None and found.kind == "json_schema"
    assert json.loads(found.source) == SCHEMA
    assert response({"type": kind, "schema": SCHEMA}).constraint() == found


def test_a_schema_that_says_nothing_leaves_an_object_an_object() -> None:
    schemas: list[Any] = [{}, True, None]
    for schema in schemas:
        found = constraint({"type": "json_object", "schema": schema})
        assert found == Constraint("json_object")
    assert constraint({"type": "json_schema", "schema": {}}) == Constraint("json_schema", "{}")


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"type": "text", "schema": SCHEMA}, "schema"),
        ({"type": "text", "json_schema": NESTED}, "json_schema"),
        ({"type": "json_object", "json_schema": NESTED}, "json_schema"),
        ({"type": "json_schema", "json_schema": NESTED, "schema": SCHEMA}, "schema"),
        ({**TAG, "schema": SCHEMA}, "schema"),
        ({**TAG, "json_schema": NESTED}, "json_schema"),
        (SCHEMA | {"type": "json_object"}, "properties"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_form_that_the_type_does_not_have_is_refused_by_name(
    form: dict[str, Any], field: str
) -> None:
    at_fault, message = refusal(form)
    assert at_fault == f"response_format.{field}" and message.startswith(at_fault)
    assert form["type"] in message and "allowed: left out" in message


@pytest.mark.parametrize(
    ("nested", "field", "told"),
    [
        ({"name": "x", "strict": True}, "schema", '{"name": .., "schema": {..}}'),
        ({"name": "x", "schema": None}, "schema", '{"name": .., "schema": {..}}'),
        ({"name": "x", "strict": True, **SCHEMA}, "schema", "type lies right in"),
        ({**NESTED, "required": ["x"]}, "required", "in response_format.json_schema.schema"),
        ({"name": "x", "schema": json.dumps(SCHEMA)}, "schema", "leave out json.dumps"),
        ({"name": "x", "schema": [SCHEMA]}, "schema", "a JSON object is wanted"),
    ],
    ids=["none", "null", "beside", "both", "text", "list"],
)
def test_a_schema_that_is_not_where_it_belongs_is_refused_by_that_place(
    nested: dict[str, Any], field: str, told: str
) -> None:
    at_fault, message = refusal({"type": "json_schema", "json_schema": nested})
    assert at_fault == f"response_format.json_schema.{field}" and message.startswith(at_fault)
    assert told in message
    assert constraint({"type": "json_schema", "json_schema": {**NESTED, "strict": False}})


def test_responses_name_their_own_field() -> None:
    with pytest.raises(InvalidRequest, match=r"^text\.format\.schema is") as refused:
        response({"type": "text", "schema": SCHEMA}).constraint()
    assert refused.value.field == "text.format.schema"
    assert response({"type": "json_schema", "schema": SCHEMA}).constraint_field == "text.format"
