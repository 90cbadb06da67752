"""Programs in SGLang's style (examples/sglang) run as they stand, over ZeroMQ and over HTTP.

What is asserted holds whatever the model says: structure, variables, lengths, constraints. What the
embedded model was trained to say is asserted for the programs that end in it.
"""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

import stemma as st
from stemma.server.app import create_app

FOLDER = Path(st.__file__).parent / "examples" / "sglang"
NAMES = [path.stem for path in sorted(FOLDER.glob("*.py"))]
ROLES = {"system", "user", "assistant"}


@pytest.fixture(scope="module")
def over_http(embedded: st.Engine) -> Iterator[st.Runtime]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(embedded), log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    run = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    run.start()
    while not server.started:
        time.sleep(0.005)
    with st.Runtime(f"http://127.0.0.1:{listener.getsockname()[1]}") as runtime:
        yield runtime
    server.should_exit = True
    run.join(5)


@pytest.fixture(params=["zeromq", "http"])
def backend(
    request: pytest.FixtureRequest, embedded: st.Engine
) -> Iterator[st.Engine | st.Runtime]:
    chosen = embedded if request.param == "zeromq" else request.getfixturevalue("over_http")
    st.set_default_backend(chosen)
    yield chosen
    st.set_default_backend(None)


def program(name: str) -> Any:
    return SimpleNamespace(**runpy.run_path(str(FOLDER / f"{name}.py")))


def test_there_is_a_program_for_each_of_sglangs_kinds_and_it_uses_sglangs_name() -> None:
    assert len(NAMES) >= 12
    for name in NAMES:
        source = (FOLDER / f"{name}.py").read_text()
        assert "import stemma as sgl" in source
        assert "@sgl.function" in source
        assert f"def test_{name}(" in Path(__file__).read_text()


@pytest.mark.parametrize("name", NAMES)
def test_each_program_runs_as_it_stands(
    name: str, embedded: st.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    st.set_default_backend(embedded)
    try:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    finally:
        st.set_default_backend(None)
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_judge(backend: st.Runtime) -> None:
    here = program("judge")
    for state in here.judge.run_batch([{"review": text} for text in here.REVIEWS]):
        for dimension, (_, answers) in here.DIMENSIONS.items():
            assert state["verdicts"][dimension] in answers
        summary = json.loads(state["output"])
        assert summary["topic"] == state["verdicts"]["topic"]
        assert summary["grade"] in "ABCD"
        assert [message["role"] for message in state.messages()] == ["user", "assistant"]


def test_few_shot_qa(backend: st.Runtime) -> None:
    here = program("few_shot_qa")
    states = here.few_shot_qa.run_batch([{"question": q} for q in here.QUESTIONS])
    assert len(states) == len(here.QUESTIONS)
    for question, state in zip(here.QUESTIONS, states):
        messages = state.messages()
        assert len(messages) == 2 * len(here.EXAMPLES) + 2
        assert question in messages[-2]["content"]
        assert messages[-1]["content"] == state["answer"]
        assert "\n" not in state["answer"]


def test_multi_turn(backend: st.Runtime) -> None:
    here = program("multi_turn")
    state = here.multi_turn.run(here.QUESTIONS)
    assert state["answer_2"] == "Your name is Nora."
    assert state["answer_3"] == "You live in Bergen."
    assert here.multi_turn_by_blocks.run(here.QUESTIONS).messages() == state.messages()
    assert [m["role"] for m in state.messages()] == ["system", *["user", "assistant"] * 4]


def test_choices(backend: st.Runtime) -> None:
    here = program("choices")
    for name, method in here.METHODS.items():
        if name == "unconditional_likelihood_normalized" and not isinstance(backend, st.Engine):
            with pytest.raises(st.ProgramError, match="choices_method"):
                here.sentiment.run("What a lovely lamp!", method)
            continue
        state = here.sentiment.run("What a lovely lamp!", method)
        assert state["sentiment"] in ("positive", "negative")
    answer = here.next_step.run("What is 48 * 17?")
    assert answer["operation"] in ("multiply", "add", "subtract")
    assert re.fullmatch(r" \d\d (by|and|from) \d\d", answer["numbers"])
    content = answer.messages()[-1]["content"]
    assert content == f"Thought: I need to {answer['operation']}{answer['numbers']}."


def test_json_decode(backend: st.Runtime) -> None:
    here = program("json_decode")
    by_regex = here.by_regex.run(here.TEXT)["json_output"]
    assert re.fullmatch(here.PERSON_REGEX, by_regex)
    person = here.Person.model_validate_json(here.by_schema.run(here.TEXT)["json_output"])
    assert person == here.Person(name="Ada Moor", age=34, city="Lisbon")
    fields = here.by_fields.run(here.TEXT)
    assert json.loads(fields["json_output"])["age"] == int(fields["age"])


def test_tool_use(backend: st.Runtime) -> None:
    here = program("tool_use")
    for question, answer in (
        ("What is 48 * 17?", 816),
        ("What is the population of Tarnby?", 31750),
    ):
        state = here.tool_use.run(question)
        assert state["tool"] in (" calculator", " lookup")
        written = f"\nAction:{state['tool']}[{state['argument']}]\nObservation: {state['result']}\n"
        assert written in state.messages()[-1]["content"]
        if isinstance(backend, st.Engine):  # over HTTP text is tokenized anew
            assert state["result"] == answer


def test_react(backend: st.Runtime) -> None:
    here = program("react")
    state = here.react.run("How many more people live in Velmora than in Tarnby?")
    assert (state["answer"], state["num_steps"]) == ("16450", 4)
    assert all(f"step_{step}" in state for step in range(4))
    assert state.messages()[-1]["content"].count("\nObservation: ") == 3


def test_tips(backend: st.Runtime) -> None:
    state = program("tips").expand_tips.run("sleeping better", 3)
    assert len(state["detail"]) == 3
    content = state.messages()[-1]["content"]
    assert content == "".join(f"{i}. {text}\n" for i, text in enumerate(state["detail"], 1))


def test_streaming(backend: st.Runtime) -> None:
    here = program("streaming")
    state = here.introduce.run("Ada", "Lisbon", stream=True)
    whole = "".join(state.text_iter())
    assert whole == state.text()
    assert "Ada" in state["answer_1"] and state["answer_1"] in whole
    pieces = asyncio.run(here.stream_async("Nora", "Bergen"))
    assert "".join(pieces) == here.introduce.run("Nora", "Bergen")["answer_2"]


def test_parallel_sampling(backend: st.Runtime) -> None:
    here = program("parallel_sampling")
    state = here.by_forks.run(here.TEXT, 5, seed=2)
    assert len(state["answer"]) == len(state["quantity"]) == 5
    assert sum(count for _, count in state["votes"]) == 5
    samples = here.by_n.run(here.TEXT, 5, seed=2)["quantity"]
    assert len(samples) == 5
    assert all(re.fullmatch(r'\{"quantity":\d{1,3}\}', text) for text in samples)


def test_multi_document_qa(backend: st.Runtime) -> None:
    here = program("multi_document_qa")
    state = here.multi_document_qa.run(here.DOCUMENTS, "Ada", "Rome")
    assert len(state["answer"]) == len(here.DOCUMENTS)
    assert {*state["answer"], state["final"]} <= {"yes", "no"}
    kept = [text for text, answer in zip(here.DOCUMENTS, state["answer"]) if answer == "yes"]
    assert state["kept"] == kept
    text = here.concatenated.run(here.DOCUMENTS).text()
    places = [text.find(document) for document in here.DOCUMENTS]
    assert places == sorted(places) and -1 not in places


def test_tree_of_thought(backend: st.Runtime) -> None:
    here = program("tree_of_thought")
    state = here.tree_of_thought.run("Plan two days of travel.", seed=1)
    assert len(state["paths"]) == here.NUM_KEPT
    for path in state["paths"]:
        assert len(path) == here.DEPTH
        assert all(re.fullmatch(here.CITY, step) for step in path)
    assert state["result"] in ("yes", "no")
