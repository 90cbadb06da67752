"""`st.Runtime` at an HTTP address: the same programs as over ZeroMQ, call by call."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

import stemma as st
from stemma.errors import EngineError, InvalidRequest, ProgramError
from stemma.server.app import create_app


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[[st.Engine], str]]:
    """Gives an engine an HTTP address, as `stemma serve` does; in a thread of this process."""
    servers: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(engine: st.Engine) -> str:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(create_app(engine), log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        run = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        run.start()
        servers.append((server, run))
        while not server.started:
            time.sleep(0.005)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server, run in servers:
        server.should_exit = True
        run.join(5)


@pytest.fixture(scope="module")
def over_http(serve: Callable[[st.Engine], str], embedded: st.Engine) -> Iterator[st.Runtime]:
    with st.Runtime(serve(embedded)) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def random_over_http(serve: Callable[[st.Engine], str], engine: st.Engine) -> Iterator[st.Runtime]:
    with st.Runtime(serve(engine)) as runtime:
        yield runtime


# A model of bytes, held to plain letters: there a text has one tokenization only, so that what is
# sent as text call by call is what the runtime has as tokens.
PLAIN = r"[a-z ]{1,6}"


def write_randomly(s: st.ProgramState, rng: random.Random, depth: int, names: list[str]) -> None:
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice(("text", "gen", "gen", "var", "fork"))
        if kind == "text" or (kind == "var" and not names) or (kind == "fork" and depth == 0):
            s += rng.choice(("Once upon a time", " and so ", "x"))
        elif kind == "gen":
            name = f"v{len(names)}"
            s += st.gen(name, regex=PLAIN, max_tokens=8, n=rng.choice((None, None, 2)))
            names.append(name)
        elif kind == "var":
            s += s.var(rng.choice(names))
        else:
            fork_randomly(s, rng, depth, names)


def fork_randomly(s: st.ProgramState, rng: random.Random, depth: int, names: list[str]) -> None:
    forks = s.fork(rng.randint(1, 3))
    for branch in forks:
        write_randomly(branch, rng, depth - 1, list(names))
    forks.join(rng.choice(("gather_variable", "concate_and_append")))


@pytest.mark.parametrize("seed", range(12))
def test_a_program_has_the_same_values_over_http_and_zeromq(
    seed: int, random_over_http: st.Runtime, engine: st.Engine
) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        rng = random.Random(seed)
        s += "Start:"
        write_randomly(s, rng, 2, [])
        forks = s.fork(2)
        forks += lambda i: f" {i} " + st.gen("end", regex=PLAIN, max_tokens=8)
        forks.join()

    states = [program.run(backend=b, seed=seed) for b in (random_over_http, engine)]
    first, second = ({name: s[name] for name in s.names()} for s in states)
    assert first == second
    assert states[0].text() == states[1].text()


@pytest.mark.parametrize("seed", range(3))
def test_a_chat_has_the_same_values_over_http_and_zeromq(
    seed: int, random_over_http: st.Runtime, engine: st.Engine
) -> None:
    @st.function
    def chat(s: st.ProgramState) -> None:
        s += st.system("Be brief.")
        for turn in range(3):
            s += st.user(f"Turn {turn}") + st.assistant("So " + st.gen("a", regex=PLAIN))
        forks = s.fork(2)
        forks += lambda i: st.user(f"Fork {i}") + st.assistant(st.gen("b", regex=PLAIN))
        forks.join()

    states = [chat.run(backend=b, seed=seed) for b in (random_over_http, engine)]
    assert states[0].messages() == states[1].messages()
    assert states[0]["b"] == states[1]["b"]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FEATURES: dict[str, dict[str, Any]] = {
    "regex": {"regex": "[ab]{3}"},
    "json_schema": {"json_schema": SCHEMA, "whitespace": "flexible"},
    "ebnf": {"ebnf": 'start: "yes" | "no"'},
    "dtype": {"dtype": int},
    "top_k": {"top_k": 1},
    "min_p": {"min_p": 0.9, "repetition_penalty": 1.2},
    "min_tokens": {"min_tokens": 3, "max_tokens": 5, "ignore_eos": True},
    "stop": {"stop": [*"zqxjkvb", "a"], "stop_token_ids": [5]},
    "n": {"n": 3, "regex": "[ab]{8}", "temperature": 1},
    "logprobs": {"logprobs": 2, "temperature": 0},
    "jump_forward": {"json_schema": SCHEMA, "jump_forward": False},
}


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("is_chat", [False, True])
def test_features_of_the_http_api_do_what_they_do_over_zeromq(
    name: str, is_chat: bool, over_http: st.Runtime, embedded: st.Engine
) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        gen = st.gen("a", **{"max_tokens": 24, **FEATURES[name]})
        text = "Text: Ada Moor is 34 years old.\nExtract name, age as JSON."
        s += st.user(text) + st.assistant(gen) if is_chat else text + gen

    states = [program.run(backend=b, seed=4) for b in (over_http, embedded)]
    assert states[0]["a"] == states[1]["a"]
    if name == "logprobs":
        ours, theirs = (s.get_meta_info("a")["logprobs"] for s in states)
        assert [e["token"] for e in ours] == [e["token"] for e in theirs]
        got = [e["logprob"] for e in ours]
        assert got == pytest.approx([e["logprob"] for e in theirs], abs=0.1)
    metas = states[0].get_meta_info("a")
    assert all(m["prompt_tokens"] is not None for m in (metas if name == "n" else [metas]))


def test_select_is_greedy_over_http(over_http: st.Runtime) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.user("Text: Ada lives in Rome.\nDoes Ada live in Rome? Answer yes or no.")
        s += st.assistant(st.select("a", ["yes", "no"]))

    state = program.run(backend=over_http)
    assert state["a"] == "yes"
    assert state.get_meta_info("a")["choices_method"] == "greedy_token_selection"


def test_a_stream_over_http_says_what_the_value_is(over_http: st.Runtime) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.user("Hi, my name is Nora.") + st.assistant(st.gen("a", temperature=0))

    state = program.stream(backend=over_http)
    pieces = list(state.text_iter("a"))
    assert "".join(pieces) == state["a"]
    assert "Nora" in state["a"]


def test_what_the_http_api_lacks_is_refused(over_http: st.Runtime) -> None:
    @st.function
    def program(s: st.ProgramState, **options: Any) -> None:
        s += "Hi" + st.gen("a", **options)

    for name, options in (
        ("priority", {"priority": 3}),
        ("logprob_start", {"logprobs": 1, "logprob_start": 0}),
    ):
        with pytest.raises(ProgramError, match=name):
            program.run(**options, backend=over_http)
    with pytest.raises(ProgramError, match="regex"):
        program.run(regex="(", backend=over_http)
    for ask in (over_http.flush_cache, over_http.tree):
        with pytest.raises(InvalidRequest, match="ZeroMQ"):
            ask()
    assert over_http.get_server_info()["model"] == "stemma-tiny"


def test_hints_reach_the_servers_kv(over_http: st.Runtime) -> None:
    outcomes: list[Any] = []

    @st.function
    def pinned(s: st.ProgramState) -> None:
        text = s.copy()
        text += "A text of several words that is computed and then kept." + st.gen(
            "t", max_tokens=4
        )
        outcomes.append(text.pin(ttl_s=5).outcome)
        s += st.user("Hi, my name is Nora.")
        outcomes.append(s.retain(priority=50, ttl_s=5).outcome)
        s += st.assistant(st.gen("a", temperature=0))
        outcomes.append(s.retain(priority=50, ttl_s=5).outcome)

    state = pinned.run(backend=over_http)
    assert "Nora" in state["a"]
    assert [o["outcome"] for o in outcomes] == ["accepted", "missing", "accepted"], outcomes
    assert outcomes[0]["num_tokens"] > 0


def test_a_server_that_is_no_stemma_is_refused() -> None:
    from openai_stand_in import standing_in

    with standing_in() as server, pytest.raises(EngineError, match=r"st\.OpenAI"):
        st.Runtime(server.url)


def test_commands_take_an_http_endpoint(
    served: Any, stemma_command: Callable[..., Any], tmp_path: Any
) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "import stemma as sgl\n@sgl.function\ndef main(s, name):\n"
        "    s += sgl.user(f'Hi, my name is {name}.')\n"
        "    s += sgl.assistant(sgl.gen('a', temperature=0))\n"
    )
    ran = stemma_command("run", str(file), "--arg", "name=Nora", "--json", "--endpoint", served.url)
    assert "Nora" in json.loads(ran.stdout)["values"]["a"], ran.stderr
    chatted = stemma_command(
        "chat",
        "--temperature",
        "0",
        "--endpoint",
        served.url,
        stdin="Hi, my name is Nora.\n/exit\n",
    )
    assert "Nora" in chatted.stdout, chatted.stderr
