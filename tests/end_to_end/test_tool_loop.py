"""`st.tool_loop` on a real engine, on endpoints of OpenAI's API, and in async functions.

The embedded model is steered by a regex in place of the constraint that the loop sets.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from engine_thread import Backend, engine_in_thread
from openai_stand_in import StandIn, standing_in
from templates import TINY_TOOLS
from waiting import PATIENCE_S

import stemma as st
from stemma.frontend.dsl.expr import GenExpr
from stemma.frontend.dsl.tool_loop import ToolLoop
from stemma.frontend.protocol import ir
from stemma.frontend.protocol.constraint import constraint_of
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL

CALL = r'<tool_call>\n\{{"name": "{name}", "arguments": \{{{arguments}\}}\}}\n</tool_call>'
ULM, BAD = r'"city":"Ulm"', r'"town":"Ulm"'
ANSWER = "It rains\\."


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    folder = tmp_path_factory.mktemp("tools") / "tiny-tools"
    shutil.copytree(EMBEDDED_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TINY_TOOLS)
    with engine_in_thread(folder, max_total_tokens=8192, num_threads=1) as engine:
        yield engine


@pytest.fixture
def endpoint() -> Iterator[StandIn]:
    with standing_in() as state:
        yield state


def call(name: str = "weather", arguments: str = ULM) -> str:
    return CALL.format(name=name, arguments=arguments)


def steer(monkeypatch: pytest.MonkeyPatch, outputs: list[str]) -> None:
    """Each gen of a loop is of the next of these languages."""
    append = st.ProgramState._append
    left = iter(outputs)

    def steered(self: st.ProgramState, other: Any, source: str | None) -> None:
        if isinstance(other, GenExpr) and other.name == "answer":
            constraint = constraint_of(regex=next(left))
            other = replace(other, params=replace(other.params, constraint=constraint))
        append(self, other, source)

    monkeypatch.setattr(st.ProgramState, "_append", steered)


@st.tool
def weather(city: str) -> dict[str, str]:
    """Weather of a city."""
    return {"city": city, "sky": "rain"}


@st.function
def ask(s: st.ProgramState, tools: Any = (weather,), **options: Any) -> Any:
    s += st.system("Be brief.") + st.user("How is the weather in Ulm?")
    return st.tool_loop(list(tools), **options)(s)


@st.function
async def ask_async(s: st.ProgramState, tools: Any = (weather,), **options: Any) -> Any:
    s += st.system("Be brief.") + st.user("How is the weather in Ulm?")
    return await st.tool_loop(list(tools), **options)(s)


def test_calls_are_carried_out_and_the_answer_is_returned(
    engine: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    steer(monkeypatch, [call() + "\\n" + call("nothing"), call(arguments=BAD), ANSWER])
    state = ask.run(backend=engine, temperature=0)
    assert state.ret_value == state["answer"] == "It rains."
    roles = " ".join(message["role"] for message in state.messages())
    assert roles == "system user assistant tool tool assistant tool assistant"
    first, rain, unknown, second, refused = state.messages()[2:7]
    assert [c["function"]["name"] for c in first["tool_calls"]] == ["weather", "nothing"]
    assert json.loads(rain["content"]) == {"city": "Ulm", "sky": "rain"}
    assert rain["tool_call_id"] == first["tool_calls"][0]["id"]
    assert unknown["content"] == "error: tool='nothing' is not allowed; allowed: one of ['weather']"
    assert "town: Extra inputs" in refused["content"] and second["content"] is None
    as_generated = '{"name": "weather", "arguments": {"city":"Ulm"}}'
    assert state.text().count(as_generated) == 1


def test_a_turn_finds_all_that_was_said_in_the_cache(
    engine: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generated ids stay, though the template would write the call otherwise."""
    named = call(arguments='"city":"[A-Z][a-z]{2,9}"')
    steer(monkeypatch, [named, named, "It [a-z]{4,8}\\."])
    state = ask.run(backend=engine, temperature=0)
    meta = state.get_meta_info("answer")
    assert meta["prompt_tokens"] - meta["cached_tokens"] < 40, "a result and a role"


def test_a_loop_is_the_same_in_an_async_function_and_its_tools_run_side_by_side(
    engine: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both calls of a turn must have begun before either ends."""
    both = threading.Barrier(2, timeout=60)

    @st.tool
    def meet(name: str) -> str:
        both.wait()
        return name

    @st.tool
    async def meet_async(name: str) -> str:
        await asyncio.to_thread(both.wait)
        return name

    turn = call("meet", '"name":"a"') + "\\n" + call("meet_async", '"name":"b"')
    for run in (
        lambda: ask.run(tools=(meet, meet_async), backend=engine, temperature=0),
        lambda: asyncio.run(
            ask_async.arun(tools=(meet, meet_async), backend=engine, temperature=0)
        ),
    ):
        steer(monkeypatch, [turn, ANSWER])
        state = run()
        monkeypatch.undo()
        told = [m["content"] for m in state.messages() if m["role"] == "tool"]
        assert (state.ret_value, told) == ("It rains.", ["a", "b"])


def test_a_call_is_a_pause_of_the_time_that_the_tool_takes(
    engine: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    steer(monkeypatch, [call() + "\\n" + call(), call(), ANSWER])
    state = ask.run(tools=(st.tool(weather.fn, expected_s=2.5),), backend=engine, temperature=0)
    pauses = [op for _, op in state._program.log if isinstance(op, ir.Pause)]
    assert [(p.label, p.expected_s) for p in pauses] == [("weather", 2.5)] * 2


def test_pure_tools_of_a_turn_that_is_likely_begin_before_it_ends(
    engine: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the turn has come often enough; what the model is told is the same."""
    begun, called = threading.Event(), list[str]()

    @st.tool(pure=True)
    def look_up(city: str) -> str:
        """Weather of a city."""
        called.append(threading.current_thread().name)
        begun.set()
        return "rain in " + city

    def said() -> str:
        steer(monkeypatch, [call("look_up", arguments='"city":"[A-Z][a-z]{9,12}"'), ANSWER])
        called.clear()
        begun.clear()
        text = ask.run(tools=(look_up,), backend=engine, temperature=0).text()
        monkeypatch.undo()
        return text

    texts = {said() for _ in range(12)}
    early = ToolLoop._early

    def once_begun(self: ToolLoop, *args: Any) -> Any:
        assert begun.wait(PATIENCE_S), "it was not told what the turn would say"
        return early(self, *args)

    monkeypatch.setattr(ToolLoop, "_early", once_begun)
    assert texts == {said()} and called == ["stemma-early"]


def test_what_a_tool_raises_is_told_or_raised(
    engine: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    @st.tool(expected_s=0.0)
    def weather(city: str) -> str:
        raise LookupError(f"no {city}")

    steer(monkeypatch, [call(), ANSWER])
    state = ask.run(tools=(weather,), backend=engine, temperature=0)
    assert state.messages()[3]["content"] == "error: LookupError: no Ulm"
    monkeypatch.undo()
    steer(monkeypatch, [call(), ANSWER])
    with pytest.raises(LookupError, match="no Ulm"):
        ask.run(tools=(weather,), on_error="raise", backend=engine, temperature=0)


def test_a_result_that_is_no_unicode_text_is_told_without_what_is_none(
    engine: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    @st.tool
    def weather(city: str) -> str:
        raise LookupError(f"no {city}\udcff")

    @st.tool
    def name(city: str) -> str:
        return f"{city}\udcff"

    steer(monkeypatch, [call() + "\\n" + call("name"), ANSWER])
    state = ask.run(tools=(weather, name), backend=engine, temperature=0)
    told = [m["content"] for m in state.messages() if m["role"] == "tool"]
    assert told == ["error: LookupError: no Ulm?", "Ulm?"]


def test_a_tool_that_raises_stop_iteration_ends_an_async_loop(
    engine: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    @st.tool
    def weather(city: str) -> str:
        return next(iter([name for name in ["Rome"] if name == city]))

    steer(monkeypatch, [call(), ANSWER])
    run = ask_async.arun(tools=(weather,), backend=engine, temperature=0)
    state = asyncio.run(asyncio.wait_for(run, 60))
    assert state.messages()[3]["content"].startswith("error: RuntimeError")


def test_the_last_turn_has_to_answer(engine: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    steer(monkeypatch, [call(), call()])
    with pytest.raises(st.MaxTurnsExceeded, match="max_turns=2: the last turn calls weather"):
        ask.run(max_turns=2, backend=engine, temperature=0)


def test_a_model_that_knows_no_tools_is_named_as_the_cause(engine: Backend) -> None:
    folder = engine.get_server_info()["model"]
    assert folder == "tiny-tools"
    with engine_in_thread(num_threads=1, max_total_tokens=2048) as plain:
        if plain.get_server_info()["template_knows_tools"]:
            pytest.skip("the embedded model knows tools")
        with pytest.raises(st.ProgramError, match="tools: the model's chat template knows none"):
            ask.run(backend=plain)


@pytest.mark.parametrize("streams", [False, True])
def test_an_endpoint_reads_the_calls_itself(endpoint: StandIn, streams: bool) -> None:
    function = {"name": "weather", "arguments": '{"city": "Ulm"}'}
    endpoint.calls.append([{"id": "call_1", "type": "function", "function": function}])
    endpoint.answer = lambda body: "It rains."
    backend = st.OpenAI("some", base_url=endpoint.url, api_key="k", is_chat_model=True)
    if streams:
        state = ask.stream(backend=backend)
        assert "".join(state.text_iter()).endswith("It rains.\n")
    else:
        state = ask.run(backend=backend)
    assert state.messages()[-1] == {"role": "assistant", "content": "It rains."}
    first, second = endpoint.bodies
    assert first["tools"] == second["tools"] == [weather.definition]
    called, told = second["messages"][2:]
    assert called["tool_calls"][0]["function"] == function and called["content"] is None
    assert told == {
        "role": "tool",
        "content": '{"city":"Ulm","sky":"rain"}',
        "tool_call_id": "call_1",
        "name": "weather",
    }


def test_messages_of_role_tool_can_be_written_by_hand(engine: Backend) -> None:
    @st.function
    def told(s: st.ProgramState) -> None:
        s += st.user("Weather?") + st.role("tool", "rain", tool_call_id="call_1", name="weather")
        s += st.assistant(st.gen("answer", max_tokens=4))

    state = told.run(backend=engine, temperature=0)
    assert state.messages()[1] == {
        "role": "tool", "content": "rain", "tool_call_id": "call_1", "name": "weather"
    }  # fmt: skip
    assert "<|user|>rain" in state.text()
    for fields in ({"role": "x"}, {"content": "x"}, {"f": object()}, {"f": "x" * 2**21}):
        with pytest.raises(st.InvalidProgram, match="fields"):
            st.role("tool", "x", **fields)
