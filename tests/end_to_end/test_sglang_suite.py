"""The programs that SGLang tests its frontend with, in words of our own, on the embedded model.

What is asserted is the API: what is there, of which form, under which constraint. Whether a model
knows capitals is not ours to test, and images are for models that read them.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn

import stemma as sgl
from stemma.server.app import create_app


@pytest.fixture(scope="module", autouse=True)
def backend(embedded: sgl.Engine) -> Iterator[sgl.Engine]:
    sgl.set_default_backend(embedded)
    yield embedded
    sgl.set_default_backend(None)


def test_few_shot_questions_are_answered_alone_and_in_a_batch() -> None:
    @sgl.function
    def capital_of(s: Any, question: str) -> None:
        s += "Some questions, each with its answer.\n"
        s += "Q: Which city is the capital of Spain?\nA: Madrid\n"
        s += "Q: Which city is the capital of Norway?\nA: Oslo\n"
        s += "Q: " + question + "\nA:" + sgl.gen("answer", stop="\n", temperature=0, max_tokens=8)

    assert "\n" not in capital_of.run(question="Which city is the capital of Peru?")["answer"]
    questions = [{"question": f"The capital of {name}?"} for name in ("Chad", "Iran", "Fiji")]
    states = capital_of.run_batch(questions, temperature=0.1)
    assert [type(state["answer"]) for state in states] == [str] * 3


def test_two_turns_of_a_chat_are_its_messages() -> None:
    @sgl.function
    def two_turns(s: Any, first: str, second: str) -> None:
        s += sgl.system("You are a friendly guide.")
        s += sgl.user(first)
        s += sgl.assistant(sgl.gen("answer_1"))
        with s.user():
            s += second
        with s.assistant():
            s += sgl.gen("answer_2")

    asked = {"first": "Write about a week at sea.", "second": "Now shorter."}
    state = two_turns.run(**asked, temperature=0.7, max_new_tokens=16)
    roles = [message["role"] for message in state.messages()]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert state.messages()[-1]["content"] == state["answer_2"]


class Alphabetical:
    """Takes the first choice in the alphabet: a `choices_method` without a base class."""

    def __call__(self, *, choices: list[str], **_: Any) -> Any:
        return sgl.ChoicesDecision(min(choices))


@pytest.mark.parametrize(
    "method",
    [
        None,
        sgl.token_length_normalized,
        sgl.greedy_token_selection,
        sgl.unconditional_likelihood_normalized,
        Alphabetical(),
    ],
    ids=("none", "normalized", "greedy", "unconditional", "own"),
)
def test_a_select_is_one_of_the_choices(method: Any) -> None:
    verdicts = ["True", "False", "Unknown"]

    @sgl.function
    def judge(s: Any, statement: str) -> None:
        s += "Is it true, false or not known?\nStatement: Lima is in Peru.\nAnswer: True\n"
        s += "Statement: " + statement + "\n"
        s += "Answer:" + sgl.select("answer", verdicts, choices_method=method)

    state = judge.run(statement="Green is better than blue.")
    assert state["answer"] in verdicts
    assert len(state.get_meta_info("answer")["choice_logprobs"]) == 3


def test_numbers_are_generated_as_whole_ones() -> None:
    @sgl.function
    def numbers(s: Any) -> None:
        s += "A minute has " + sgl.gen_int("seconds") + " seconds,\n"
        s += "and a leap year " + sgl.gen_int("days") + " days.\n"

    state = numbers.run(temperature=0.1)
    assert int(state["seconds"]) + int(state["days"]) is not None


def described(name: Any, population: Any, latitude: Any) -> Any:
    @sgl.function
    def program(s: Any) -> None:
        s += "Describe a city as a JSON object.\n"
        with s.var_scope("json_output"):
            s += '{\n  "name": ' + name + ",\n"
            s += '  "population": ' + population + ",\n"
            s += '  "latitude": ' + latitude + "\n}"

    return program.run(temperature=0.0, max_new_tokens=64)


def test_a_scope_of_single_fields_is_one_json_object() -> None:
    state = described(
        sgl.gen(regex=r'"[\w ]{1,20}"', max_tokens=32),
        sgl.gen(regex=r"[1-9][0-9]{0,8}", stop=[" ", "\n"]),
        sgl.gen(regex=r"-?[1-9][0-9]?\.[0-9]{1,6}", stop=[" ", "\n"]),
    )
    city = json.loads(state["json_output"])
    assert isinstance(city["name"], str) and isinstance(city["population"], int)


def test_a_scope_of_typed_fields_has_each_in_its_place() -> None:
    state = described(sgl.gen_string("name"), sgl.gen_int("population"), sgl.gen(dtype=float))
    found = re.fullmatch(
        r'\{\n  "name": (".*),\n  "population": (-?\d+),\n  "latitude": (-?[\d.]+)\n\}',
        state["json_output"],
    )
    assert found is not None and found[1] == state.text("name")
    assert int(found[2]) == int(state["population"]) and float(found[3]) is not None


def test_a_value_is_used_in_the_middle_of_the_text_that_follows() -> None:
    @sgl.function
    def expert(s: Any, question: str) -> None:
        s += "Question: " + question + "\nSomebody who knows is"
        s += sgl.gen("expert", stop=[".", "\n"], max_tokens=12) + ".\n"
        s += "For example," + s["expert"] + " would say " + sgl.gen("answer", stop=".") + "."

    state = expert.run(question="Where does rain come from?", temperature=0.1, max_new_tokens=16)
    assert state.text().count(state["expert"]) >= 2 and state.text().endswith(".")


def test_a_tools_result_is_a_value() -> None:
    @sgl.function
    def compute(s: Any, left: int, right: int) -> None:
        s += "times(2,3)=6\ntimes(5,5)=25\n"
        s += f"What is {left} times {right}? It is times(" + sgl.gen("arguments", stop=")")
        s += ") = "
        with s.var_scope("answer"):
            s += str(left * right)

    state = compute(left=257, right=983, temperature=0, max_new_tokens=12)
    assert int(state["answer"]) == 257 * 983 and ")" not in state["arguments"]


def test_a_loop_of_thoughts_and_actions_ends_as_it_decides() -> None:
    @sgl.function
    def react(s: Any, question: str) -> None:
        s += "Question: " + question + "\n"
        for i in range(1, 4):
            s += f"Thought {i}:" + sgl.gen(stop=[".", "\n"]) + ".\n"
            s += f"Action {i}: " + sgl.select(f"action_{i}", ["Search", "Finish"])
            if s[f"action_{i}"] == "Finish":
                s += " [" + sgl.gen("answer", stop="]") + "].\n"
                return
            s += " [" + sgl.gen(stop="]") + f"].\nObservation {i}:"
            s += sgl.gen(stop=[".", "\n"]) + ".\n"

    state = react.run(question="Who wrote it?", temperature=0.1, max_new_tokens=12)
    actions = [state[name] for name in state.names() if name.startswith("action_")]
    assert ("answer" in state) == (actions[-1] == "Finish")
    assert actions[:-1] == ["Search"] * (len(actions) - 1)


def test_forks_are_decoded_in_parallel_and_summed_up() -> None:
    num_tips = 3

    @sgl.function
    def tips(s: Any, topic: str) -> None:
        s += f"Give {num_tips} tips for {topic}.\n"
        for i in range(num_tips):
            s += f"{i}." + sgl.gen(max_tokens=8, stop=[".", "\n"]) + ".\n"
        forks = s.fork(num_tips)
        for i in range(num_tips):
            forks[i] += f"Tip {i} in detail:"
            forks[i] += sgl.gen("detail", 12, stop=["\n\n"])
        forks.join()
        for i in range(num_tips):
            s += f"Tip {i}:" + forks[i]["detail"] + "\n"
        s += "In short," + sgl.gen("summary", max_tokens=16)

    state = tips.run(topic="a good walk", temperature=0.3)
    assert isinstance(state["summary"], str) and len(state["detail"]) == num_tips
    assert all(f"Tip {i}:{text}\n" in state.text() for i, text in enumerate(state["detail"]))


def test_forks_are_encoded_in_parallel_and_appended_in_their_order() -> None:
    facts = ["Ann is Bea's mother.", "Cid is Dan's father.", "Eve is Flo's aunt."]

    @sgl.function
    def read(s: Any, question: str) -> None:
        s += "Remember these.\n"
        forks = s.fork(len(facts))
        forks += lambda i: f"Statement {i}: {facts[i]}\n"
        forks.join(mode="concate_and_append")
        s += "Question: " + question + "\nAnswer:" + sgl.gen("answer", max_tokens=8)

    state = read.run(question="Who is Dan's father?", temperature=0)
    places = [state.text().index(f"Statement {i}: {fact}") for i, fact in enumerate(facts)]
    assert places == sorted(places) and state.text().endswith(state["answer"])


def test_text_is_streamed_as_a_whole_and_of_one_value() -> None:
    @sgl.function
    def qa(s: Any, question: str) -> None:
        s += sgl.system("You are a friendly guide.")
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen("answer", max_tokens=16))

    state = qa(question="Write about a week at sea.", stream=True, temperature=0)
    assert "".join(state.text_iter()) == state.text()
    state = qa(question="Write about a week at sea.", stream=True, temperature=0)
    assert "".join(state.text_iter("answer")) == state["answer"]


def test_an_output_matches_its_regex() -> None:
    regex = r"((25[0-5]|2[0-4]\d|[01]?\d\d?)\.){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)"

    @sgl.function
    def address(s: Any) -> None:
        s += "Q: Which address has the server?\nA: "
        s += sgl.gen("answer", temperature=0, regex=regex)

    assert re.fullmatch(regex, address.run()["answer"])


def test_values_have_the_types_that_were_asked_for() -> None:
    @sgl.function
    def typed(s: Any) -> None:
        s += "Its full name is " + sgl.gen("text", dtype=str, stop="\n", max_tokens=24) + "\n"
        s += "It is from " + sgl.gen("year", dtype=int) + "\n"
        s += "It is " + sgl.gen("length", dtype=float) + " long\n"
        s += "Is it blue? " + sgl.gen("is_blue", dtype=bool) + "\n"

    state = typed.run(temperature=0)
    state["year"] = int(state["year"])
    state["length"] = float(state["length"])
    assert isinstance(state["year"], int) and isinstance(state["length"], float)
    assert str(state["is_blue"]) in ("True", "False")


@pytest.mark.parametrize("has_method", [False, True])
def test_a_batch_of_selects_takes_sglangs_options(has_method: bool) -> None:
    """As its benchmark of endings does, whose data is not here."""

    @sgl.function
    def ending(s: Any, context: str, endings: list[str]) -> None:
        s += "Somebody goes on: " + context
        s += sgl.select("answer", choices=endings)

    endings = ["They sail.", "They sing of the sea.", "Rain."]
    arguments = [{"context": f"Day {i}. ", "endings": endings} for i in range(8)]
    states = ending.run_batch(arguments, temperature=0, num_threads=8, progress_bar=has_method)
    assert all(state["answer"] in endings for state in states)


def test_an_answer_has_at_least_as_many_tokens_as_asked_for(backend: sgl.Engine) -> None:
    @sgl.function
    def convo(s: Any) -> None:
        s += sgl.user("What is the capital of Iceland?")
        s += sgl.assistant(sgl.gen("answer", min_tokens=64, max_tokens=128))

    state = convo.run(temperature=0)
    meta = state.get_meta_info("answer")
    assert 64 <= meta["completion_tokens"] <= 128
    tokenizer = backend.get_tokenizer()
    assert tokenizer.decode(meta["output_ids"]) == state["answer"]


# --- speculation over HTTP, where a prompt is paid each time --------------------------------------


@pytest.fixture(scope="module")
def endpoint(embedded: sgl.Engine) -> Iterator[sgl.OpenAI]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(embedded), log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    run = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    run.start()
    while not server.started:
        time.sleep(0.005)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    with sgl.OpenAI("stemma-tiny", base_url=url, flavor="stemma") as backend:
        yield backend
    server.should_exit = True
    run.join(5)


def test_speculation_sends_fewer_prompt_tokens(endpoint: sgl.OpenAI, embedded: sgl.Engine) -> None:
    def character(s: Any) -> None:
        s += "Name: Ada\nAge: 3\nName: Bob\nAge: 5\nName:"  # the model goes on: " Bob."
        s += sgl.gen("name", stop=".", temperature=0) + "."
        s += sgl.gen("rest", stop="\n", temperature=0)

    sgl.global_config.default_backend = endpoint
    try:
        usage = sgl.global_config.default_backend.token_usage  # type: ignore[union-attr]
        spent = []
        for program in (sgl.function(num_api_spec_tokens=64)(character), sgl.function(character)):
            usage.reset()
            state: Any = program()
            state.sync()
            assert state["name"] and state["rest"] is not None
            spent.append(usage.prompt_tokens)
    finally:
        sgl.set_default_backend(embedded)
    assert 0 < spent[0] < spent[1], spent


# --- calls without a program ----------------------------------------------------------------------


def test_generate_answers_what_the_server_does(served: Any) -> None:
    sampling = {"max_new_tokens": 8, "temperature": 1.0, "sampling_seed": 7, "n": 2}
    options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    body = {"text": ["Hi, my name is", "One, two,"], "sampling_params": sampling, **options}
    over_http = httpx.post(f"{served.url}/generate", json=body, timeout=60).json()
    with sgl.Runtime(served.endpoint) as runtime:
        answers: Any = runtime.generate(body["text"], sampling, **options)
    assert len(answers) == len(over_http) == 4
    own = ("id", "e2e_latency", "cached_tokens", "drafted_tokens", "accepted_tokens")
    for answer, expected in zip(answers, over_http, strict=True):
        assert answer["meta_info"].keys() == expected["meta_info"].keys()
        for name in own:
            del answer["meta_info"][name], expected["meta_info"][name]
        assert answer["text"] == expected["text"]
        assert answer["output_ids"] == expected["output_ids"]
        assert answer["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]


def test_generate_over_http_has_no_ids(served: Any) -> None:
    with sgl.Runtime(served.url) as runtime:
        answer: Any = runtime.generate("Hi, my name is", {"max_new_tokens": 4, "temperature": 0})
        assert answer["meta_info"]["completion_tokens"] == 4 and answer["output_ids"] is None
        with pytest.raises(sgl.InvalidRequest, match="over HTTP"):
            runtime.get_tokenizer()
        with pytest.raises(sgl.ProgramError, match="token ids cannot be sent"):
            runtime.generate(input_ids=[1, 2])


def test_a_method_of_ones_own_needs_log_probabilities(endpoint: sgl.OpenAI) -> None:
    @sgl.function
    def judge(s: Any) -> None:
        s += "Is it?" + sgl.select("answer", ["yes", "no"], choices_method=Alphabetical())

    with pytest.raises(sgl.InvalidProgram, match="no log probabilities of choices"):
        judge.run(backend=endpoint)
