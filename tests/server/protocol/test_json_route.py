"""Bodies: JSON and nothing else, and the fields of one that nobody reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, cast

import pytest
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as some
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stemma.server.api.openai.completions import CompletionRequest
from stemma.server.app import ROOMS
from stemma.server.generation.service import EngineLink, Service
from stemma.server.protocol import json_bounds, json_route
from stemma.server.protocol.failures import Refusal
from stemma.server.protocol.json_bounds import (
    MAX_CONTAINERS,
    MAX_NESTING,
    MAX_TEXTS,
    MAX_VALUES,
    require_bounded,
)
from stemma.server.protocol.json_route import parse_json
from stemma.server.protocol.known_fields import MAX_REPORTED, KnownFields, warning_of
from stemma.server.settings import ServerSettings

JSON = some.recursive(
    some.none()
    | some.booleans()
    | some.integers()
    | some.floats(allow_nan=False, allow_infinity=False)
    | some.text(),
    lambda inner: some.lists(inner) | some.dictionaries(some.text(), inner),
    max_leaves=20,
)


@given(JSON)
def test_json_is_read_as_it_was_written(value: Any) -> None:
    assert parse_json(json.dumps(value, allow_nan=False).encode()) == value


@given(some.binary(max_size=40) | some.text('{}[]",:01eE+-.tru null', max_size=9).map(str.encode))
def test_any_bytes_are_json_or_refused(body: bytes) -> None:
    try:
        value = parse_json(body)
    except Refusal as refusal:
        assert refusal.status_code == 400 and refusal.code == "invalid_json"
    else:
        assert value == json.loads(body.decode())


def test_a_byte_order_mark_before_the_json_is_no_part_of_it() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": "\xef\xbb\xbf"}') == {"a": "\ufeff"}
    with pytest.raises(Refusal):
        parse_json(b"\xef\xbb\xbf\xef\xbb\xbf{}")


def test_whole_surrogate_pairs_are_text() -> None:
    body = b'["\\ud83d\\ude00", "\\\\ud800"]'
    assert parse_json(body) == ["\U0001f600", "\\ud800"]


def test_a_name_that_is_there_twice_is_found_in_time() -> None:
    """Comparing each of these with all others would take minutes."""
    names = ",".join(f'"{number % 199_999}":0' for number in range(200_000))
    with pytest.raises(Refusal, match="'0' is there twice"):
        parse_json(f"{{{names}}}".encode())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "Expecting value"),
        (b'{"a": 1', "Expecting"),
        (b'{"a": "\xff"}', "invalid UTF-8 at byte 7"),
        ('{"a": 1}'.encode("utf-16"), "invalid UTF-8"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": [-Infinity]}', "-Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too large"),
        (b'{"a": 0.' + b"9" * 5000 + b"}", "too large"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' is there twice"),
        (b"[" * 100_000, "levels deep"),
        (b'{"a":' * 900 + b"1" + b"}" * 900, "levels deep"),
        (b"[" * (MAX_NESTING + 1) + b"]" * (MAX_NESTING + 1), "levels deep"),
        (b"{} {}", "Extra data"),
        (b'{"a": ["\\ud800"]}', "half of a surrogate pair"),
        (b'{"\\uDFFF": 1}', "half of a surrogate pair"),
    ],
)
def test_what_is_no_json_is_refused_with_the_reason(body: bytes, reason: str) -> None:
    with pytest.raises(Refusal) as caught:
        parse_json(body)
    assert reason in str(caught.value.detail)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (rb'{"a": "\ud800"}', "a"),
        (rb'{"a": {"b": [1, "x\uDFFFy"]}}', "a.b.1"),
        (rb'{"a": [{"\udc00": 1}]}', "a.0"),
        (rb'{"\udc00": 1}', None),
        (rb'{"a": "\udc00\ud800"}', "a"),
    ],
)
def test_escapes_that_are_no_character_are_refused_by_their_field(
    body: bytes, field: str | None
) -> None:
    with pytest.raises(Refusal) as caught:
        parse_json(body)
    assert (caught.value.status_code, caught.value.field) == (400, field)


def test_as_deep_as_allowed_and_as_broad_as_one_likes_is_read() -> None:
    assert parse_json(b"[" * MAX_NESTING + b"]" * MAX_NESTING)
    assert len(parse_json(b"[" + b"[]," * 10_000 + b"[]]")) == 10_001


@pytest.mark.parametrize(
    ("value", "most"),
    [
        ("1", MAX_VALUES),
        ("null", MAX_VALUES),
        ('"a"', MAX_TEXTS),
        ("[]", MAX_CONTAINERS),
        ("[1]", MAX_CONTAINERS),
        ('{"\\\\":1}', MAX_CONTAINERS),
    ],
)
def test_what_decodes_to_too_much_is_refused_before_it_is_decoded(
    value: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of as many, with what is around it, is one too many; half of them are fine."""
    assert parse_json(f"[{','.join([value] * (most // 2))}]".encode())
    monkeypatch.setattr(json_route, "_DECODER", None)
    with pytest.raises(Refusal, match=f"at most {most}") as caught:
        parse_json(f"[{','.join([value] * (most + 1))}]".encode())
    assert caught.value.status_code == 413


@pytest.mark.parametrize("escape", ['\\"', "\\\\", '\\\\\\"', "\\u005b"])
def test_what_is_in_texts_is_not_counted(escape: str) -> None:
    text = "," * MAX_VALUES + escape + "[" * MAX_CONTAINERS
    assert parse_json(f'{{"{text}": ["{text}"]}}'.encode()) == json.loads(
        f'{{"{text}": ["{text}"]}}'
    )


@given(JSON)
def test_the_scan_counts_what_there_is(value: Any) -> None:
    body = json.dumps(value).encode()
    num_containers, depth = shape_of(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bounds, "MAX_CONTAINERS", num_containers)
        patch.setattr(json_bounds, "MAX_NESTING", depth)
        patch.setattr(json_bounds, "_SLICE_BYTES", 3)
        require_bounded(body)
        for name, most in (("MAX_CONTAINERS", num_containers), ("MAX_NESTING", depth)):
            if most:
                patch.setattr(json_bounds, name, most - 1)
                with pytest.raises(Refusal):
                    require_bounded(body)
                patch.setattr(json_bounds, name, most)


def shape_of(value: Any) -> tuple[int, int]:
    """Its lists and objects, and their depth."""
    if not isinstance(value, list | dict):
        return 0, 0
    within = [shape_of(v) for v in (value.values() if isinstance(value, dict) else value)]
    return 1 + sum(num for num, _ in within), 1 + max((depth for _, depth in within), default=0)


class Part(BaseModel):
    type: Literal["text"]
    text: str


class Picture(BaseModel):
    url: str
    within: Picture | None = None


class Message(BaseModel):
    role: str
    content: str | list[Part | Picture]
    extra: dict[str, Any] | None = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")

    messages: list[Message] | None = None


class Body(BaseModel):
    messages: list[Message]
    schema_: dict[str, Any] | bool = Field(default=True, alias="schema")
    tags: Open | None = None
    first: tuple[Message, ...] | Message | None = None


@pytest.mark.parametrize(
    ("body", "unknown"),
    [
        ({"messages": []}, []),
        ({"messages": [], "foo": 1}, ["foo"]),
        ({"messages": [{"role": "a", "foo": 1}, {"bar": 1}]}, ["messages.0.foo", "messages.1.bar"]),
        (
            {"messages": [{"content": [{"type": "x", "url": "y", "z": 1}]}]},
            ["messages.0.content.0.z"],
        ),
        ({"messages": [{"content": "text", "extra": {"any": 1}}]}, []),
        ({"schema": {"any": {"thing": 1}}, "schema_": 1}, []),
        ({"tags": {"foo": 1, "messages": [{"foo": 1}]}}, ["tags.messages.0.foo"]),
        ({"first": {"foo": 1}}, ["first.foo"]),
        ({"first": [{"foo": 1}]}, ["first.0.foo"]),
        ({"messages": 3, "tags": "x"}, []),  # of the wrong type: pydantic's business
        ([{"foo": 1}], ["0.foo"]),
        ("text", []),
    ],
)
def test_fields_that_no_model_declares_are_found_wherever_there_is_a_model(
    body: Any, unknown: list[str]
) -> None:
    known = KnownFields.of(Body)
    assert known is not None and list(known.unknown_in(body)) == unknown


def test_a_type_without_models_is_not_searched() -> None:
    assert KnownFields.of(dict[str, Any]) is None and KnownFields.of(str | list[int]) is None
    assert KnownFields.of(dict[str, Message]) is None
    assert KnownFields.of(Body | None) is not None


@given(some.lists(some.text(min_size=1), max_size=40, unique=True))
def test_a_warning_fits_a_header_whatever_the_fields_are_called(names: list[str]) -> None:
    known = KnownFields.of(Part)
    assert known is not None
    unknown = list(known.unknown_in(dict.fromkeys(names, 1)))
    text = warning_of(unknown)
    assert text.isascii() and text.isprintable() and len(text) < 16_000
    assert text.endswith("and more") == (len(unknown) > MAX_REPORTED)


def _body_models() -> list[type[BaseModel]]:
    service = Service(cast(EngineLink, None), ServerSettings())
    routes = [route for room in ROOMS for route in room.router(service).routes]
    fields = [route.body_field for route in routes if isinstance(route, APIRoute)]
    return [field.field_info.annotation for field in fields if field is not None]


def _schemas_in(schema: object) -> Iterator[dict[str, Any]]:
    """All parts of a core schema that say what a value must be."""
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield schema
        for name, part in schema.items():
            if name not in ("metadata", "serialization"):
                yield from _schemas_in(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from _schemas_in(part)


def test_a_list_of_a_body_is_refused_at_its_first_wrong_item() -> None:
    models = _body_models()
    assert len(models) > 10
    for model in models:
        schema = model.__pydantic_core_schema__
        lists = [part for part in _schemas_in(schema) if part["type"] == "list"]
        slow = [part for part in lists if not part.get("fail_fast") and "items_schema" in part]
        assert [part for part in slow if part["items_schema"]["type"] != "any"] == []


@pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "logit_bias", "structured_outputs"])
def test_a_body_that_is_wrong_all_through_has_few_errors(field: str) -> None:
    is_list = field in ("prompt", "stop_token_ids")
    wrong: Any = [{}] * 2000 if is_list else {str(i): "" for i in range(2000)}
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": "", field: wrong})
    assert caught.value.error_count() < 10
