"""Forced calls on the embedded model under templates of other models' formats, through a real
client: streamed and not, and their results sent back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from chats import TEMPLATES
from engine_thread import serving
from fastapi.testclient import TestClient
from server_process import ServerProcess

import stemma as st
from stemma.frontend.client.backend import Backend
from stemma.frontend.dsl.expr import GenExpr
from stemma.frontend.protocol.constraint import constraint_of
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.server.app import create_app
from stemma.server.settings import ServerSettings

ASK: list[Any] = [{"role": "user", "content": "What is the weather in Ulm?"}]
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F", None]},
        "where": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "days", "where"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
FORMATS = ("qwen3_coder_tools", "glm4", "deepseek_v3_tools", "kimi_k2_tools", "lfm2_tools",
           "gemma4_tools")  # fmt: skip
UNKNOWN = "{{ tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module", params=FORMATS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Backend]:
    file = tmp_path_factory.mktemp(request.param) / "template.jinja"
    file.write_text(TEMPLATES[request.param])
    with serving(EMBEDDED_MODEL, dtype="float32", kernels="auto", chat_template=str(file),
                 max_model_len=None, max_total_tokens=8192) as backend:  # fmt: skip
        yield backend


@pytest.fixture(scope="module")
def client(engine: Backend) -> Iterator[openai.OpenAI]:
    with TestClient(create_app(engine), base_url="http://localhost") as http:
        yield openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    """Without reasoning, which no model of random words ends."""
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    fields = {"messages": ASK, "tools": [WEATHER, CLOCK], "max_tokens": 200, "seed": 4, **fields}
    return client.chat.completions.create(
        model="default", temperature=1.2, extra_body=extra, **fields
    )


def is_valid(arguments: str) -> bool:
    found = json.loads(arguments)
    return (
        {"city", "days", "where"} <= set(found) <= {"city", "days", "where", "unit"}
        and len(found["city"]) <= 12
        and found["days"] in range(1, 10)
        and found["where"]["x"] in range(10)
        and found.get("unit") in ("C", "F", None)
    )


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_is_valid_and_streamed_as_it_is(client: openai.OpenAI, choice: Any) -> None:
    tools = [WEATHER] if choice == "required" else [WEATHER, CLOCK]
    whole = ask(client, tools=tools, tool_choice=choice).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    assert call.function.name == "weather" and is_valid(call.function.arguments)
    chunks = [c.choices[0] for c in ask(client, tools=tools, tool_choice=choice, stream=True)]
    assert chunks[-1].finish_reason == "tool_calls"
    assert not any(chunk.delta.content for chunk in chunks)
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
    assert [part.function.name for part in parts if part.function.name] == ["weather"]
    assert "".join(p.function.arguments or "" for p in parts) == call.function.arguments
    assert parts[0].id and (parts[0].id == call.id or not call.id.startswith("functions."))


def test_a_calls_result_is_answered(client: openai.OpenAI) -> None:
    message = ask(client, tool_choice=NAMED).choices[0].message
    (call,) = message.tool_calls
    turn = message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    second = ask(client, messages=[*ASK, turn, result], tool_choice="none", max_tokens=8)
    assert second.choices[0].finish_reason in ("stop", "length")
    assert second.usage.prompt_tokens > 20


def test_a_tool_may_leave_its_parameters_out(client: openai.OpenAI) -> None:
    bare: Any = {"type": "function", "function": {"name": "bare"}}
    (call,) = ask(client, tools=[bare], tool_choice="required").choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("bare", {})


def test_an_unknown_format_is_told_at_start_and_a_forced_call_is_refused_until_it_is_named(
    tmp_path: Path,
) -> None:
    """Both through the server and in `st.tool_loop`."""
    (tmp_path / "unknown.jinja").write_text(UNKNOWN)
    flags = ("--chat-template", str(tmp_path / "unknown.jinja"), "--num-threads", "1")
    body = {"messages": ASK, "tools": [WEATHER], "max_tokens": 400, "temperature": 0}
    with ServerProcess(tmp_path / "plain", *flags) as server:
        assert "no mark of a known format" in server.log
        chat = server.url + "/v1/chat/completions"
        forced = httpx.post(chat, json={**body, "tool_choice": "required"}, timeout=60)
        assert (
            forced.status_code == 400 and "--tool-call-parser" in forced.json()["error"]["message"]
        )
        free = httpx.post(chat, json={**body, "max_tokens": 4}, timeout=60).json()["choices"][0]
        assert free["message"]["content"] and "--tool-call-parser" in free["warnings"][0]
        with st.Runtime(server.endpoint) as runtime:
            with pytest.raises(st.InvalidProgram, match="no mark of a known format"):
                agent.run(backend=runtime)
            named = create_app(runtime, ServerSettings(tool_call_parser="glm"))
            with TestClient(named, base_url="http://localhost") as http:
                forced = {**body, "tool_choice": "required"}
                reply = http.post("/v1/chat/completions", json=forced).json()
        (call,) = reply["choices"][0]["message"]["tool_calls"]
        assert is_valid(call["function"]["arguments"])


# --- st.tool_loop ---------------------------------------------------------------------------------


@st.tool
def weather(city: str, days: int = 1) -> str:
    """Weather of a city."""
    return f"{city} {days} {type(days).__name__}"


@st.function
def agent(s: st.ProgramState) -> Any:
    s += st.user("How is the weather?")
    return st.tool_loop([weather])(s)


@pytest.mark.parametrize(
    ("engine", "call"),
    [
        ("qwen3_coder_tools", "<tool_call>\\n<function=weather>\\n<parameter=city>\\n12\\n"
         "</parameter>\\n<parameter=days>\\n2\\n</parameter>\\n</function>\\n</tool_call>"),
        ("lfm2_tools", r"<\|tool_call_start\|>\[weather\(city='12', days=2\)\]<\|tool_call_end\|>"),
    ],
    indirect=["engine"],
)  # fmt: skip
def test_a_tool_loop_reads_the_same_formats(
    engine: Backend, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    append, outputs = st.ProgramState._append, iter([call, "Wet\\."])

    def steered(self: st.ProgramState, other: Any, source: str | None) -> None:
        if isinstance(other, GenExpr) and other.name == "answer":
            constraint = constraint_of(regex=next(outputs))
            other = GenExpr(other.name, replace(other.params, constraint=constraint))
        append(self, other, source)

    monkeypatch.setattr(st.ProgramState, "_append", steered)
    state = agent.run(backend=engine, temperature=0)
    assert state.ret_value == "Wet."
    assert [m["content"] for m in state.messages() if m["role"] == "tool"] == ["12 2 int"]
