"""LoRA adapters as clients meet them: over HTTP, in programs, loaded and unloaded meanwhile."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapters import make_adapter
from engine_thread import Backend, engine_in_thread
from http_server import http_client, http_server

import stemma as st
from stemma.errors import ModelLoadError, ModelNotFound
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.server.access.api_keys import file_entry, new_key

MODEL = "stemma-tiny"
NAMES = (None, "first", "second")
PROMPT = "The adapters of this model say"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def folders(root: Path) -> dict[str, Path]:
    names = ("first", "second", "third")
    return {
        name: make_adapter(root / name, EMBEDDED_MODEL, seed=seed, std=0.4)
        for seed, name in enumerate(names)
    }


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path], root: Path) -> Iterator[Backend]:
    paths = [(name, folders[name]) for name in ("first", "second")]
    options = {"max_loras_per_batch": 2, "max_total_tokens": 8192, "lora_root": root}
    with engine_in_thread(lora_paths=paths, **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def http(engine: Backend) -> Iterator[httpx.Client]:
    with http_client(engine) as client:
        yield client


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def completed(http: httpx.Client, **fields: Any) -> str:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | fields
    return str(post(http, "/v1/completions", **body)["choices"][0]["text"])


@st.function
def one_gen(s: Any, lora: str | None) -> None:
    s += "a" + st.gen("text", max_tokens=1, lora_path=lora)


@pytest.fixture(scope="module")
def said(http: httpx.Client) -> dict[str | None, str]:
    """What each says, by the adapter's name; one after the other."""
    texts = {name: completed(http, lora_path=name) for name in NAMES}
    assert len(set(texts.values())) == 3
    return texts


def test_a_model_names_an_adapter_alone_and_behind_the_base(
    http: httpx.Client, said: dict[str | None, str]
) -> None:
    for name in ("first", "second"):
        assert completed(http, model=name) == completed(http, model=f"{MODEL}:{name}") == said[name]
    assert completed(http, model=MODEL) == completed(http, lora_path="") == said[None]
    reply = post(http, "/v1/completions", prompt="a", max_tokens=1, model=f"{MODEL}:first")
    assert reply["model"] == f"{MODEL}:first"


def test_every_endpoint_takes_an_adapter(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Who are you?"}]
    plain = {"temperature": 0, "messages": messages, "max_tokens": 6}

    def answers(name: str) -> list[Any]:
        chat = post(http, "/v1/chat/completions", model=name, **plain)
        claude = post(http, "/v1/messages", model=name, **plain)
        response = post(http, "/v1/responses", model=name, input="Who?", temperature=0)
        embedding = post(http, "/v1/embeddings", model=name, input="a word")
        score = post(http, "/score", model=name, text="One or two?", choices=[" one", " two"])
        return [
            chat["choices"][0]["message"]["content"],
            claude["content"],
            response["output"][0]["content"],
            embedding["data"][0]["embedding"],
            score["logprobs"],
        ]

    for base, first in zip(answers(MODEL), answers("first"), strict=True):
        assert base != first


def test_generate_takes_an_adapter_for_each_prompt(
    http: httpx.Client, said: dict[str | None, str]
) -> None:
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    for _ in range(2):  # then on a warm cache
        answers = post(
            http,
            "/generate",
            text=[PROMPT] * 3,
            lora_path=list(NAMES),
            sampling_params=sampling,
        )
        assert [answer["text"] for answer in answers] == [said[name] for name in NAMES]


def test_programs_name_adapters_for_a_run_or_a_call(
    engine: Backend, http: httpx.Client, said: dict[str | None, str]
) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}

    @st.function
    def program(s: Any) -> None:
        s += PROMPT
        forks = s.fork(3)
        for fork, name in zip(forks, ("second", "", None)):
            fork += st.gen("text", lora_path=name, **options)
        forks.join()
        for index, fork in enumerate(forks):
            s[f"text{index}"] = fork["text"]

    @st.function
    def chain(s: Any) -> None:
        s += PROMPT + st.gen("a", lora_path="first", **options)
        s += " and " + st.gen("b", lora_path="second", **options)
        s += st.select("c", ["yes", "no"], lora_path="first")

    state = program.run(backend=engine, lora_path="first")
    assert [state[f"text{i}"] for i in range(3)] == [said["second"], said[None], said["first"]]
    state = chain.run(backend=engine)
    assert state["a"] == said["first"]
    engine.flush_cache()
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    first = post(http, "/generate", text=PROMPT, lora_path="first", sampling_params=sampling)
    prompt = post(http, "/tokenize", text=PROMPT)["tokens"]
    between = post(http, "/tokenize", text=" and ", add_special_tokens=False)["tokens"]
    ids = [*prompt, *first["output_ids"], *between]
    again = post(http, "/generate", input_ids=ids, lora_path="second", sampling_params=sampling)
    assert state["b"] == again["text"]
    assert state["c"] in ("yes", "no")


def test_an_adapter_that_nobody_knows_is_a_model_that_does_not_exist(
    http: httpx.Client, engine: Backend
) -> None:
    third = ({"model": "third"}, {"model": f"{MODEL}:third"}, {"lora_path": "third"})
    empty = ({"model": f"{MODEL}:"}, {"lora_path": f"{MODEL}:"})
    for fields in (*third, *empty):
        for stream in (False, True):
            body = {"prompt": "a", "max_tokens": 1, "stream": stream, **fields}
            reply = http.post("/v1/completions", json=body)
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (404, "model_not_found")
            assert "'first', 'second'" in error["message"]
    assert http.post("/tokenize", json={"model": "third", "text": "a"}).status_code == 404
    assert http.get("/v1/models/third").status_code == 404
    reply = http.post("/tokenize", json={"model": f"{MODEL}:", "text": "a"})
    assert reply.status_code == 404 and f"'{MODEL}:' does not exist" in reply.text
    with pytest.raises(st.ProgramError, match="'third' does not exist"):
        one_gen.run(None, backend=engine, lora_path="third")["text"]
    both = {"model": "first", "lora_path": "second", "prompt": "a"}
    assert http.post("/v1/completions", json=both).status_code == 400


def test_an_answer_sent_back_hits_the_cache_of_its_own_adapter(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Speak of rivers."}]
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    first = post(http, "/v1/chat/completions", model="first", messages=messages, **body)
    messages.append(first["choices"][0]["message"])
    messages.append({"role": "user", "content": "And of the sea?"})
    cached = {}
    for name in ("first", "second", MODEL):
        reply = post(http, "/v1/chat/completions", model=name, messages=messages, **body)
        cached[name] = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached["first"] >= first["usage"]["total_tokens"] - 1
    assert max(cached["second"], cached[MODEL]) < 8  # what any chat begins with


def test_hints_keep_what_an_adapter_has_computed(http: httpx.Client) -> None:
    completed(http, model="first", prompt="A prompt to be kept for long")
    action = {
        "action_id": "a", "action_type": "pin", "action_version": 1,
        "payload": {"target": {"prompt": "A prompt to be kept for long"}, "ttl_ms": 1000},
    }  # fmt: skip
    answers = [
        post(http, "/kv_hints", protocol_version=1, message_id="m", actions=[action], **fields)
        for fields in ({"model": "first"}, {"lora_path": "second"}, {})
    ]
    found = [answer["outcomes"][0]["outcome"] for answer in answers]
    assert found[0] == "accepted"
    assert not {"accepted"} & set(found[1:])  # at most what other prompts begin with is there


def test_models_lists_the_adapters(http: httpx.Client, folders: dict[str, Path]) -> None:
    base, *adapters = http.get("/v1/models").json()["data"]
    assert (base["id"], base["parent"]) == (MODEL, None)
    told = [(each["id"], each["root"], each["parent"]) for each in adapters]
    assert told == [(name, str(folders[name]), MODEL) for name in ("first", "second")]
    assert http.get("/v1/models/second").json() == adapters[1]
    completed(http, lora_path="first")
    namespaces = {node["namespace"] for node in http.get("/tree").json()["nodes"]}
    assert f"#lora:{adapters[0]['revision']}" in namespaces


def test_adapters_come_and_go_while_others_stream(
    http: httpx.Client, folders: dict[str, Path], said: dict[str | None, str]
) -> None:
    streamed: list[str] = []

    def stream() -> None:
        body = {
            "prompt": PROMPT, "model": "first", "max_tokens": 200, "temperature": 0,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        with http.stream("POST", "/v1/completions", json=body) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    streamed.append(json.loads(line[6:])["choices"][0]["text"])

    thread = threading.Thread(target=stream)
    thread.start()
    answer = post(http, "/load_lora_adapter", lora_name="new", lora_path=str(folders["third"]))
    assert answer["loaded_adapters"]["new"] == str(folders["third"])
    text = completed(http, model="new")
    assert text not in said.values()
    post(http, "/v1/unload_lora_adapter", lora_name="new")
    thread.join()
    assert "".join(streamed).startswith(said["first"])
    reply = http.post("/v1/completions", json={"prompt": "a", "model": "new"})
    assert reply.status_code == 404
    assert http.post("/unload_lora_adapter", json={"lora_name": "new"}).status_code == 404
    post(http, "/v1/load_lora_adapter", lora_name="other", lora_path=str(folders["third"]))
    assert completed(http, model="other") == text
    post(http, "/unload_lora_adapter", lora_name="other")


def test_others_are_answered_while_adapters_wait_to_be_loaded(
    http: httpx.Client, engine: Backend, root: Path
) -> None:
    """More of them than the server has threads, behind one that takes two seconds to be refused."""
    make_adapter(root / "endless", EMBEDDED_MODEL, exclude_modules=r"([a-z0-9_.]+)+!")
    is_sent = threading.Event()

    def note(event: str, info: dict[str, Any]) -> None:
        if event == "http11.send_request_body.complete":
            is_sent.set()

    def load(name: str, path: str) -> int:
        body = {"lora_name": name, "lora_path": path}
        return http.post("/load_lora_adapter", json=body, extensions={"trace": note}).status_code

    def are_answered_first() -> bool:
        is_sent.clear()
        with ThreadPoolExecutor(50) as pool:
            first = pool.submit(load, "0", "endless")
            assert is_sent.wait(120)  # else others may come before it
            others = [pool.submit(load, str(index), "nowhere") for index in range(1, 50)]
            for path in ("/v1/models", "/health", "/server_info", "/metrics"):
                assert http.get(path).status_code == 200
            assert completed(http)
            were_loading = not first.done() and not any(each.done() for each in others)
            assert {each.result() for each in (first, *others)} == {400}
        return were_loading

    # Where others wait for the adapters this never comes to pass; on a busy machine not always.
    assert any(are_answered_first() for _ in range(20))


def test_unloading_waits_for_those_who_use_it(http: httpx.Client, folders: dict[str, Path]) -> None:
    """Under that name: who has the same adapter by another one is not waited for."""
    post(http, "/load_lora_adapter", lora_name="alias", lora_path=str(folders["third"]))
    post(http, "/load_lora_adapter", lora_name="new", lora_path=str(folders["third"]))
    answers: list[str] = []
    fields = {"model": "new", "max_tokens": 300}
    thread = threading.Thread(target=lambda: answers.append(completed(http, **fields)))
    thread.start()
    while not http.get("/server_info").json()["num_running"]:
        assert thread.is_alive()
    assert post(http, "/unload_lora_adapter", lora_name="alias")["num_requests"] == 0
    assert not answers
    reply = post(http, "/unload_lora_adapter", lora_name="new")
    thread.join()
    assert reply["num_requests"] == 0
    assert len(answers) == 1 and answers[0]


def test_what_cannot_be_loaded_is_refused_by_what_is_wrong(
    http: httpx.Client, engine: Backend, folders: dict[str, Path], root: Path, tmp_path: Path
) -> None:
    def refused(name: str, path: Path) -> str:
        body = {"lora_name": name, "lora_path": str(path)}
        reply = http.post("/load_lora_adapter", json=body)
        assert reply.status_code == 400
        return str(reply.json()["error"]["message"])

    assert "a folder within lora_root" in refused("bad", tmp_path)
    assert "a folder within lora_root" in refused("bad", root / ".." / tmp_path.name)
    assert "adapter_config.json is missing" in refused("bad", root)
    assert "a folder's path" in refused("bad", Path("first\0"))
    assert "not taken" in refused("first", folders["third"])
    make_adapter(root / "large", EMBEDDED_MODEL, rank=5)
    assert "rank 5; this engine has room for ranks up to 4" in refused("bad", Path("large"))
    with pytest.raises(ModelLoadError, match="rank 5"):
        engine.load_lora_adapter("bad", root / "large")
    with pytest.raises(ModelNotFound, match="'bad' does not exist"):
        engine.unload_lora_adapter("bad")


def test_metrics_count_adapters(http: httpx.Client, said: dict[str | None, str]) -> None:
    text = http.get("/metrics").text
    assert f'stemma_lora_slots{{model="{MODEL}"}} 2.0' in text
    assert f'stemma_lora_adapters_in_use{{model="{MODEL}"}} 0.0' in text
    assert "stemma_lora_loads_total" in text and "stemma_lora_evictions_total" in text


def test_loading_is_for_admins_where_callers_are_kept_apart(
    engine: Backend, tmp_path: Path
) -> None:
    key, root = new_key(), new_key()
    entries = file_entry("alice", key) + file_entry("root", root) + "is_admin = true\n"
    (tmp_path / "keys.toml").write_text(entries)
    settings = {"api_keys": str(tmp_path / "keys.toml"), "isolate_cache": True}
    with http_server(engine, **settings) as url:
        for path in ("load_lora_adapter", "v1/load_lora_adapter", "unload_lora_adapter"):
            body = {"lora_name": "nobody", "lora_path": "/nowhere"}
            statuses = [
                httpx.post(
                    f"{url}/{path}", json=body, headers={"authorization": f"Bearer {each}"}
                ).status_code
                for each in (key, root)
            ]
            assert statuses[0] == 403 and statuses[1] in (400, 404)


def test_an_engine_without_adapters_says_so(embedded: st.Engine) -> None:
    with http_client(embedded) as http:
        reply = http.post("/v1/completions", json={"prompt": "a", "lora_path": "x"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "lora_path")
        reply = http.post("/v1/completions", json={"prompt": "a", "model": f"{MODEL}:x"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
        body = {"lora_name": "x", "lora_path": "/nowhere"}
        reply = http.post("/load_lora_adapter", json=body)
        assert reply.status_code == 400 and "enable_lora" in reply.text
    with pytest.raises(st.ProgramError, match="serves no adapters"):
        one_gen.run("x", backend=embedded)["text"]
