"""Constrained answers over HTTP: each way of asking for one, tools, and input that means harm."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import httpx
import openai
import pydantic
import pytest

import stemma as st

MODEL = "stemma-tiny"
BLANK_ID = 236  # of its token " "
TEXT = "Text: Anna Berg is 34 years old. She lives in Lisbon.\nExtract name, age, city as JSON."
ASK: list[Any] = [{"role": "user", "content": TEXT}]
PLAIN = {"messages": ASK, "temperature": 0, "max_tokens": 64}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"enum": [1, 7]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NONSENSE = {"type": "function", "function": {"name": "no", "parameters": {"type": "nonsense"}}}
CLOCK = {"type": "function", "function": {"name": "clock"}}


class Person(pydantic.BaseModel):
    name: str
    age: int
    city: str


@pytest.fixture
def client(served: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def ask(served: Any, **fields: Any) -> httpx.Response:
    url = f"{served.url}/v1/chat/completions"
    headers = {"content-type": "application/json"}  # json.dumps, for the lone surrogates
    content = json.dumps({**PLAIN, **fields})
    return httpx.post(url, content=content, headers=headers, timeout=60)


def answer(served: Any, **fields: Any) -> str:
    reply = ask(served, **fields)
    assert reply.status_code == 200, reply.text
    content: str = reply.json()["choices"][0]["message"]["content"]
    return content


def test_a_pydantic_model_is_parsed_from_the_answer(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(
        model=MODEL, messages=ASK, temperature=0, response_format=Person
    )
    parsed = reply.choices[0].message.parsed
    assert parsed == Person(name="Anna Berg", age=34, city="Lisbon")
    assert reply.choices[0].finish_reason == "stop"


def test_a_constrained_stream_is_the_whole_answer(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": MODEL, "messages": ASK, "temperature": 1.5, "seed": 4,
        "response_format": {
            "type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}
        },
    }  # fmt: skip
    whole = client.chat.completions.create(**fields).choices[0].message.content
    chunks = list(client.chat.completions.create(**fields, stream=True))
    pieces = [piece for chunk in chunks if (piece := chunk.choices[0].delta.content)]
    assert whole == "".join(pieces)
    assert whole is not None and set(json.loads(whole)) == {"name", "age"}
    assert pieces  # perhaps one: what was said before is guessed


def test_what_a_grammar_takes_is_told_beside_log_probabilities(served: Any) -> None:
    def cost(properties: list[str], **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        listed = Person.model_json_schema()["properties"]
        schema = {"type": "object", "properties": {name: listed[name] for name in properties},
                  "required": properties, "additionalProperties": False}  # fmt: skip
        reply = ask(served, json_schema=schema, logprobs=True, top_logprobs=1, **fields)
        choice = reply.json()["choices"][0]
        return choice["constraint_cost"], choice["logprobs"]["content"]

    asked, tokens = cost(["name", "age", "city"])
    assert asked["num_redirected"] == 0 and 0 <= asked["logprob_lost"] < 0.1
    assert asked["num_tokens"] == len(tokens)
    other, tokens = cost(["city", "age", "name"])
    assert other["num_redirected"] == sum(token["is_redirected"] for token in tokens) > 0
    assert other["logprob_lost"] == pytest.approx(-sum(t["allowed_logprob"] for t in tokens))
    assert other["logprob_lost"] > 1 > asked["logprob_lost"]
    for token in tokens:  # greedy: the likeliest token of those that are allowed
        best = token["top_logprobs"][0]
        assert token["is_redirected"] == (best["token"] != token["token"])
        assert token["logprob"] - 1e-4 <= token["allowed_logprob"] <= 0
    any_order, _ = cost(["city", "age", "name"], property_order="any")
    assert any_order["num_redirected"] == 0
    plain = ask(served, logprobs=True).json()["choices"][0]
    assert "constraint_cost" not in plain
    assert "allowed_logprob" not in plain["logprobs"]["content"][0]


def test_a_grammar_of_one_text_costs_what_the_model_thinks_of_it(served: Any) -> None:
    reply = ask(served, regex="zz", logprobs=True).json()["choices"][0]
    tokens = reply["logprobs"]["content"]
    assert reply["message"]["content"] == "zz" and tokens
    for token in tokens[1:]:
        assert token["allowed_logprob"] == pytest.approx(token["logprob"], abs=1e-3)
    assert reply["constraint_cost"]["num_redirected"] >= 1


def test_json_objects_and_text_are_formats_too(served: Any) -> None:
    found = answer(served, response_format={"type": "json_object"}, max_tokens=200)
    assert isinstance(json.loads(found), dict)
    assert answer(served, response_format={"type": "text"}) == answer(served)
    beside = answer(served, response_format={"type": "json_object", "schema": SCHEMA})
    assert set(json.loads(beside)) == {"name", "age"}


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "[A-Z]{3}-[0-9]{2}"},
        {"guided_regex": "[A-Z]{3}-[0-9]{2}"},
        {"structured_outputs": {"regex": "[A-Z]{3}-[0-9]{2}"}},
        {"ebnf": 'start: /[A-Z]{3}/ "-" /[0-9]{2}/'},
        {"guided_grammar": 'root ::= [A-Z] [A-Z] [A-Z] "-" [0-9] [0-9]'},
        {"guided_choice": ["ABC-12", "DEF-34"]},
        {"structured_outputs": {"choice": ["ABC-12", "DEF-34"]}},
    ],
    ids=str,
)
def test_each_way_to_ask_for_a_language_is_obeyed_on_both_endpoints(
    served: Any, fields: dict[str, Any]
) -> None:
    assert re.fullmatch("[A-Z]{3}-[0-9]{2}", answer(served, **fields))
    body = {"prompt": "The code: ", "temperature": 1, "max_tokens": 30, **fields}
    reply = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()
    assert re.fullmatch("[A-Z]{3}-[0-9]{2}", reply["choices"][0]["text"])


CALL = {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "</f>"}  # fmt: skip
FORMAT = {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL], "at_least_one": True,
          "stop_after_first": True}  # fmt: skip
NEWER = {"type": "structural_tag", "format": FORMAT}
OLDER = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": NEWER},
        {"structural_tag": NEWER},
        {"structural_tag": json.dumps(NEWER)},
        {"structured_outputs": {"structural_tag": NEWER}},
        {"structured_outputs": {"structural_tag": json.dumps(NEWER)}},
        {"response_format": {"type": "structural_tag", "format": CALL}},
    ],
    ids=["response_format", "dict", "text", "structured_outputs", "as text", "a tag alone"],
)
def test_each_way_to_ask_for_tags_is_obeyed(served: Any, fields: dict[str, Any]) -> None:
    found = answer(served, **fields)
    assert found.startswith("<f=a>") and found.endswith("</f>")
    assert set(json.loads(found[5:-4])) == {"name", "age"}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": OLDER},
        {"structural_tag": json.dumps(OLDER)},
        {"structured_outputs": {"structural_tag": json.dumps(OLDER)}},
    ],
    ids=["response_format", "text", "structured_outputs"],
)
def test_tags_in_the_older_notation_leave_text_free(served: Any, fields: dict[str, Any]) -> None:
    assert answer(served, **fields) == answer(served)


def elements(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*parts]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"type": "const_string", "value": "so be it"}, "so be it"),
        ({"type": "regex", "pattern": "[A-Z]{3}"}, "[A-Z]{3}"),
        ({"type": "grammar", "grammar": 'root ::= "(" root? ")" | "x"'}, r"\(*x?\)*"),
        (elements({"type": "any_text", "max_chars": 5}, {"type": "const_string", "value": "|"}),
         r"(?s:.{0,5})\|"),
        ({"type": "tag", "begin": "<", "content": {"type": "any_text", "max_chars": 9}, "end": ">"},
         "<[^>]{0,9}>"),
        ({"type": "or", "elements": [{"type": "const_string", "value": "yes"},
                                     {"type": "const_string", "value": "no"}]}, "yes|no"),
        ({"type": "repeat", "min": 2, "max": 3, "content": {"type": "regex", "pattern": "[ab]"}},
         "[ab]{2,3}"),
        ({"type": "tags_with_separator", "separator": ";", "at_least_one": True,
          "stop_after_first": True, "tags": [CALL]}, r"<f=a>\{.*\}</f>"),
        ({"type": "qwen_xml_parameter", "json_schema": {
            "type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}},
            "required": ["n"]}}, r"\n?<parameter=n>\n?[0-9]\n?</parameter>\n?"),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_each_form_of_a_tag_is_obeyed(served: Any, content: dict[str, Any], said: str) -> None:
    tags = {"type": "structural_tag", "format": content}
    assert re.fullmatch(said, answer(served, response_format=tags))


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": SCHEMA},
        {"json_schema": json.dumps(SCHEMA)},
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
    ],
    ids=["json_schema", "json_schema text", "guided_json", "structured_outputs"],
)
def test_each_way_to_ask_for_a_schema_is_obeyed(served: Any, fields: dict[str, Any]) -> None:
    assert answer(served, **fields) == '{"name":"Anna Berg","age":34}'


@pytest.mark.parametrize(
    "fields",
    [{"json_schema": True}, {"guided_json": True}, {"structured_outputs": {"json": True}}],
    ids=str,
)
def test_true_is_a_schema_too(served: Any, fields: dict[str, Any]) -> None:
    question = [{"role": "user", "content": "Who are you?"}]
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer(served, messages=question))
    json.loads(answer(served, messages=question, **fields, max_tokens=200))


@pytest.mark.parametrize("is_disabled", [True, False])
def test_vllms_switches_are_heeded(served: Any, is_disabled: bool) -> None:
    pair = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    switches = {
        "disable_any_whitespace": is_disabled,
        "disable_additional_properties": False,
        "disable_fallback": is_disabled,
    }
    outputs = {"json": pair, **switches}
    bias = {str(BLANK_ID): 100}
    found = answer(served, structured_outputs=outputs, logit_bias=bias, max_tokens=200)
    assert json.loads(found) == [1, 1] and (found == "[1,1]") == is_disabled
    assert answer(served, structured_outputs={"regex": "abc", **switches}) == "abc"


def test_jump_forward_changes_no_answer(served: Any) -> None:
    both = {answer(served, json_schema=SCHEMA, jump_forward=on, seed=1) for on in (True, False)}
    assert len(both) == 1


def test_a_stop_string_cuts_json_and_is_named(served: Any) -> None:
    (choice,) = ask(served, json_schema=SCHEMA, stop=['"age"']).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", '"age"')
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice["message"]["content"])


def test_n_answers_are_each_constrained(served: Any) -> None:
    short = {"name": {"type": "string", "maxLength": 20}, "age": {"enum": [1, 34]}}
    schema = {**SCHEMA, "properties": short}
    reply = ask(served, json_schema=schema, n=4, temperature=3, max_tokens=400).json()
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["stop"] * 4
    for choice in reply["choices"]:
        assert set(json.loads(choice["message"]["content"])) == {"name", "age"}


def test_what_strict_refuses_lenient_does_with_a_warning(served: Any) -> None:
    """Multiples of a large number are more than a grammar can say."""
    number = {"type": "integer", "multipleOf": 12345}
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], "number": number}}  # type: ignore[dict-item]
    form = {"name": "x", "schema": schema}
    strict = ask(served, response_format={"type": "json_schema", "json_schema": form})
    assert strict.status_code == 400 and strict.json()["error"]["param"] == "response_format"
    form["strict"] = False
    lenient = ask(served, response_format={"type": "json_schema", "json_schema": form}).json()
    assert lenient["choices"][0]["warnings"]
    assert {"name", "age"} <= set(json.loads(lenient["choices"][0]["message"]["content"]))


def test_a_lenient_answer_that_is_invalid_all_the_same_says_where(served: Any) -> None:
    schema = {"type": "integer", "multipleOf": 12345, "minimum": 1, "maximum": 10**12}
    reply = ask(served, json_schema=schema, lenient=True)
    assert reply.status_code == 200, reply.text
    warnings = reply.json()["choices"][0]["warnings"]
    assert any("not a multiple" in warning for warning in warnings), warnings


# --- tools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called_with_arguments_of_its_schema(
    client: openai.OpenAI, stream: bool
) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 128}
    fields |= {"tools": [WEATHER, CLOCK], "tool_choice": "required"}
    if stream:
        chunks = list(client.chat.completions.create(**fields, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert not any(delta.content for delta in deltas)
        parts = [part for delta in deltas for part in delta.tool_calls or ()]
        assert parts[0].id and len(parts) > 1, "the name first, then arguments as they come"
        calls = parts[:1]
        calls[0].function.arguments = "".join(part.function.arguments for part in parts)
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = client.chat.completions.create(**fields).choices[0]
        assert choice.message.content is None
        calls, reason = choice.message.tool_calls, choice.finish_reason
    assert reason == "tool_calls" and calls is not None
    (call,) = calls
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert set(arguments) == {"city", "days"} and arguments["days"] in (1, 7)
    else:
        assert call.function.name == "clock" and arguments == {}


def test_a_named_tool_is_the_one_that_is_called(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    reply = client.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, tools=[WEATHER, CLOCK], tool_choice=choice
    )  # type: ignore[call-overload]
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"city", "days"}


@pytest.mark.parametrize("is_named", [False, True], ids=["required", "named"])
def test_what_a_tools_schema_has_beyond_grammars_is_refused_or_a_warning(
    served: Any, is_named: bool
) -> None:
    number = {"type": "integer", "multipleOf": 12345, "minimum": 1, "maximum": 10**12}
    parameters = {
        "type": "object",
        "properties": {"number": number},
        "required": ["number"],
        "additionalProperties": False,
    }
    function = {"name": "pair_up", "parameters": parameters}
    named = {"type": "function", "function": {"name": "pair_up"}}
    choice = named if is_named else "required"
    tools = [{"type": "function", "function": function}]
    found = ask(served, tools=tools, tool_choice=choice).json()["choices"][0]
    (call,) = found["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["number"] in range(1, 10**12 + 1)
    of_grammar, of_answer = found["warnings"]
    assert of_grammar.startswith("tools[0] (pair_up): /properties/number: multipleOf")
    assert "not a multiple" in of_answer or "not valid" in of_answer
    function["strict"] = True
    strict = ask(served, tools=tools, tool_choice=choice)
    assert strict.status_code == 400 and strict.json()["error"]["param"] == "tools"


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "(a"}, "regex"),
        ({"regex": "a(?=b)"}, "regex"),
        ({"regex": "[^\\s\\S]"}, "regex"),
        ({"guided_regex": "(?P<x>a)(?P=x)"}, "guided_regex"),
        ({"ebnf": "start: nothing"}, "ebnf"),
        ({"ebnf": "start: )"}, "ebnf"),
        ({"json_schema": {"type": "nonsense"}}, "json_schema"),
        ({"json_schema": {"$ref": "https://example.com/x.json"}}, "json_schema"),
        ({"json_schema": {"$ref": "#/$defs/no"}}, "json_schema"),
        ({"json_schema": {"$ref": "#"}}, "json_schema"),
        ({"json_schema": {"type": "string", "pattern": "("}}, "json_schema"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": False}, "json_schema"),
        ({"guided_json": {"enum": []}}, "guided_json"),
        ({"regex": "a\ud800"}, "regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a\udfff"]}, "guided_choice.0"),
        ({"structured_outputs": {"json": {"type": "nonsense"}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"magic": 1}}, "structured_outputs.magic"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", **SCHEMA}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
        ({"regex": "a", "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": {}, "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "no"}}},
         "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "required", "regex": "a"}, "regex"),
        ({"regex": "a", "lenient": False}, "lenient"),
        ({"guided_regex": "a", "whitespace": "compact"}, "whitespace"),
        ({"ebnf": 'start: "a"', "property_order": "any"}, "property_order"),
        ({"guided_choice": ["a"], "formats": "ignore"}, "formats"),
        ({"guided_json": False}, "guided_json"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
         "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json": {}, "disable_additional_properties": True}},
         "structured_outputs.disable_additional_properties"),
        ({"tools": [NONSENSE], "tool_choice": "required"}, "tools"),
        ({"tools": [NONSENSE], "tool_choice": {"type": "function", "function": {"name": "no"}}},
         "tools"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)  # fmt: skip
def test_what_cannot_be_is_a_400_that_names_the_field(
    served: Any, fields: dict[str, Any], param: str
) -> None:
    reply = ask(served, **fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    assert error["param"] == param


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    return schema


HARMFUL = [
    {"regex": "(a{1000}){100}"},
    {"regex": "a{100000}"},
    {"regex": "(a|b)*a(a|b){20}"},
    {"regex": "((((a*)*)*)*)*b"},
    {"json_schema": deep(100)},
    {"json_schema": {"enum": [f"value {i}" for i in range(5000)]}},
    {"json_schema": {"type": "string", "pattern": "^(a|b)*a(a|b){18}$"}},
    {"json_schema": {"const": "\x00"}},
    {"json_schema": '{"const":"\\ud800"}'},
    {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}},
    {"ebnf": 'start: start "a" | "b"'},
    {"ebnf": "start: start"},
    {"guided_choice": [f"choice {i}" * 20 for i in range(2000)]},
]


def test_a_grammar_that_a_parser_never_gets_through_ends_alone(served: Any) -> None:
    """Behind a letter its bytes are forced without end: a greedy A leaves nothing to B."""
    replies: list[httpx.Response] = []
    endless = "start: /[A-Z]/ A B\nA: /a+/\nB: /ab/"
    hostile = threading.Thread(target=lambda: replies.append(ask(served, ebnf=endless)))
    usual = answer(served)
    hostile.start()
    while hostile.is_alive():
        assert answer(served) == usual
    (reply,) = replies
    assert reply.status_code == 400 and "its parser's process ended" in reply.text
    assert answer(served, ebnf='start: "(" start ")" | "x"', max_tokens=1) in ("(", "x")


def test_harmful_grammars_are_answered_or_refused_while_others_are_served(
    served: Any, embedded: st.Engine
) -> None:
    """Each of them three times and all at once."""
    replies: list[tuple[dict[str, Any], httpx.Response]] = []

    def send(fields: dict[str, Any]) -> None:
        replies.append((fields, ask(served, **fields, max_tokens=8)))

    threads = [threading.Thread(target=send, args=(f,)) for f in HARMFUL * 3]
    for thread in threads:
        thread.start()
    normal = answer(served, regex="[0-9]{3} [a-z]{3}")
    assert re.fullmatch("[0-9]{3} [a-z]{3}", normal)
    for thread in threads:
        thread.join(60)
    assert len(replies) == len(threads)
    for fields, reply in replies:
        assert reply.status_code in (200, 400, 503), (fields, reply.text)
        if reply.status_code != 200:
            assert reply.json()["error"]["message"]
    assert answer(served) and answer(served, json_schema=SCHEMA)


def test_an_example_given_as_a_schema_is_refused_everywhere(served: Any) -> None:
    """It used to be a schema of every document, and gave `false` or `111`."""
    example = {"name": "Ann", "age": 3}
    schema = {"name": "x", "schema": example}
    tool = {"type": "function", "function": {"name": "f", "parameters": example}}
    for path, fields, param in (
        ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": schema}},
         "response_format"),
        ("chat/completions", {"guided_json": example}, "guided_json"),
        ("chat/completions", {"guided_json": json.dumps(example)}, "guided_json"),
        ("chat/completions", {"tools": [tool], "tool_choice": "auto"}, "tools"),
        ("chat/completions", {"tools": [tool], "tool_choice": "required"}, "tools"),
        ("responses", {"text": {"format": {"type": "json_schema", **schema}}}, None),
        ("messages", {"tools": [{"name": "f", "input_schema": example}]}, None),
    ):  # fmt: skip
        body = {"input": "a"} if path == "responses" else {"messages": ASK}
        if path == "messages":
            body["max_tokens"] = 8  # type: ignore[assignment]
        reply = httpx.post(f"{served.url}/v1/{path}", json={**body, **fields}, timeout=60)
        error = reply.json()["error"]
        assert reply.status_code == 400, (path, fields, reply.text)
        assert '"properties": {"name": {"type": "string"}' in error["message"]
        assert param is None or error["param"] == param


def test_what_is_wrong_with_a_schema_is_told_in_the_words_of_each_api(served: Any) -> None:
    """Which field or which tool, where in what the client sent, and a remedy that it has."""
    lost = {"type": "integer", "multipleOf": 12345}
    schema = {"type": "object", "properties": {"x": lost}}
    text_format = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    output = {"format": {"type": "json_schema", "schema": schema}}
    beta = {"name": "beta", "parameters": schema, "strict": True}
    flat = [{"type": "function", **tool} for tool in ({"name": "alpha"}, beta)]
    tools = [CLOCK, {"type": "function", "function": beta}]
    custom = [
        {"name": "alpha", "input_schema": {"type": "object"}},
        {"name": "beta", "input_schema": schema, "strict": True},
    ]
    off = '`"strict": false` in each tool, which drops the keyword'
    for path, fields, begin, remedy in (
        ("v1/chat/completions", {"tools": tools}, "tools[1] (beta)", off),
        ("v1/chat/completions", {"json_schema": schema}, "json_schema", "`lenient`, which drops"),
        ("v1/responses", {"tools": flat}, "tools[1] (beta)", off),
        ("v1/responses", {"text": {"format": text_format}}, "text.format", '`"strict": false`, wh'),
        ("v1/messages", {"tools": custom}, "tools[1] (beta)", off),
        ("v1/messages", {"output_config": output}, "output_config.format", "or leave it out"),
        ("api/chat", {"tools": tools}, "tools[1] (beta)", off),
        ("api/chat", {"format": schema}, "format", "or leave it out"),
        ("api/generate", {"prompt": "x", "format": schema}, "format", "or leave it out"),
        ("api/generate", {"prompt": "x", "format": schema, "raw": True}, "format", "or leave it"),
        ("completion", {"prompt": "x", "json_schema": schema}, "json_schema", "or leave it out"),
    ):
        body = {"input": "a"} if path == "v1/responses" else {"messages": ASK}
        body |= {"max_tokens": 8} if path == "v1/messages" else {}
        if "prompt" in fields:
            body = {}
        reply = httpx.post(f"{served.url}/{path}", json={**body, **fields}, timeout=60)
        assert reply.status_code == 400, (path, fields, reply.text)
        error = reply.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert message.startswith(f"{begin}: /properties/x: multipleOf cannot"), (path, message)
        assert remedy in message, (path, message)
