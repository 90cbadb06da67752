"""Several models behind one address: real processes, a real client, real kills."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapters import make_adapter
from checkpoints import make_checkpoint
from server_process import COMPLETIONS, ServerProcess, children, is_alive
from waiting import PATIENCE_S, wait_until

import stemma as st
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.server.access.api_keys import file_entry

LONG = 1900  # tokens; the context has 2048
TINY = f"tiny={EMBEDDED_MODEL}"
TWIN = f"org/twin-ü={EMBEDDED_MODEL}"
TWIN_NAME = "org/twin-ü"
FLAGS = ("--num-threads", "1", "--max-running-requests", "8")
KEY = "a-key-of-these-tests"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model, of a shorter context."""
    return make_checkpoint(tmp_path_factory.mktemp("other"), max_position_embeddings=512, seed=3)


def served(folder: Path, *flags: str) -> ServerProcess:
    return ServerProcess(folder / "server", *FLAGS, *flags)


def models_of(*models: str) -> list[str]:
    return [word for model in models for word in ("--model", model)]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, other: Path) -> Iterator[ServerProcess]:
    """Two models with room for both, after each was asked once; tests here unload none."""
    folder = tmp_path_factory.mktemp("both")
    with served(folder, *models_of(TINY, f"other={other}"), "--api-key", KEY) as server:
        keyed = {"authorization": f"Bearer {KEY}"}
        for name in ("tiny", "other"):
            reply = httpx.post(
                server.url + COMPLETIONS,
                json={"prompt": "Hi", "max_tokens": 2, "model": name},
                headers=keyed,
                timeout=PATIENCE_S,
            )
            assert reply.status_code == 200, reply.text
        yield server


@pytest.fixture
def http(both: ServerProcess) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=both.url, headers=headers, timeout=PATIENCE_S) as client:
        yield client


def states(server: ServerProcess, **headers: str) -> dict[str, str]:
    told = httpx.get(f"{server.url}/v1/models", headers=headers, timeout=PATIENCE_S).json()["data"]
    return {model["id"]: model["status"]["value"] for model in told}


def metric(server: ServerProcess, name: str, model: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
    found = re.search(rf'^{name}{{model="{re.escape(model)}"}} (\S+)$', text, re.MULTILINE)
    assert found, text
    return float(found[1])


@contextlib.contextmanager
def asking(*asks: Callable[[], httpx.Response]) -> Iterator[list[Any]]:
    """Requests under way beside the block; their answers once it has ended."""
    replies: list[Any] = []
    with ThreadPoolExecutor(len(asks)) as threads:
        futures = [threads.submit(ask) for ask in asks]
        yield replies
        replies += [future.result(PATIENCE_S) for future in futures]


# --- who answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "name_at"),
    [
        ("/v1/chat/completions", CHAT, "model"),
        ("/chat/completions", CHAT, "model"),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}, "model"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 16}, "model"),
        ("/v1/embeddings", {"input": "Hi"}, "model"),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 2}, "model"),
        ("/api/chat", {"messages": CHAT["messages"], "stream": False}, "model"),
        ("/api/embed", {"input": "Hi"}, "model"),
        ("/v1/rerank", {"query": "Hi", "documents": ["a", "b"]}, "model"),
    ],
)
def test_every_api_chooses_by_the_bodys_model(
    http: httpx.Client, path: str, body: dict[str, Any], name_at: str
) -> None:
    options = {"options": {"num_predict": 2}} if path == "/api/chat" else {}
    for name in ("tiny", "other"):
        reply = http.post(path, json={**body, **options, "model": name})
        assert reply.status_code == 200, reply.text
        assert reply.json()[name_at].removesuffix(":latest") == name
        assert "x-stemma-warnings" not in reply.headers


def test_our_own_endpoints_choose_by_it_too(http: httpx.Client) -> None:
    def ids(**fields: object) -> list[int]:
        reply = http.post("/tokenize", json={"text": "Hello there", **fields})
        assert reply.status_code == 200 and "x-stemma-warnings" not in reply.headers, reply.text
        return list(reply.json()["tokens"])

    assert ids() == ids(model="tiny") != ids(model="other")
    asked = {"text": "Hi", "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    texts = [http.post("/generate", json={**asked, "model": m}) for m in ("tiny", "other")]
    assert texts[0].json()["text"] != texts[1].json()["text"]
    refused = http.post("/generate", json={**asked, "model": 5})
    assert refused.status_code == 400 and "'tiny', 'other'" in refused.json()["error"]["message"]


@pytest.mark.parametrize("name", [None, "", "default", "tiny", "tiny:latest"])
def test_no_name_means_the_first_model(http: httpx.Client, name: str | None) -> None:
    path = "/api/chat" if name == "tiny:latest" else "/v1/chat/completions"
    reply = http.post(path, json={**CHAT, "model": name, "stream": False})
    if name == "tiny:latest":
        reply = http.post(path, json={"model": name, "stream": False, "messages": CHAT["messages"]})
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"].removesuffix(":latest") == "tiny"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 2}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 16}),
    ],
)
def test_a_tag_may_follow_the_name_on_every_api(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    reply = http.post(path, json={**body, "model": "other:latest"})
    assert reply.status_code == 200 and reply.json()["model"] == "other", reply.text


@pytest.mark.parametrize("name", ["nope", "tiny:adapter", "TINY", "x" * 100_000, "tiny "])
def test_an_unknown_name_is_a_404_that_lists_the_models(http: httpx.Client, name: str) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "Hi"}), ("/generate", {"text": "Hi"})):
        reply = http.post(path, json={**body, "model": name})
        error = reply.json()["error"]
        assert reply.status_code == 404 and error["code"] == "model_not_found", reply.text
        assert "there are 'tiny', 'other'" in error["message"] and len(error["message"]) < 400
    asked = http.get("/model_info", params={"model": name[:4000]})
    assert asked.status_code == 404


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"model": 5, "prompt": "Hi"}', 400),
        (b'{"model": ["tiny"], "prompt": "Hi"}', 400),
        (b'{"model": {"tiny": 1}, "prompt": "Hi"}', 400),
        (b'{"model": "tiny", "model": "other", "prompt": "Hi"}', 400),
        (b'["tiny"]', 400),
        (b'"tiny"', 400),
        (b"null", 400),
        (b"", 400),
        (b'{"model": "tiny"', 400),
        (b"\xff\xfe", 400),
        (b'{"model": "\\ud800"}', 400),
        (b"[" * 100_000, 400),
        (b'{"model": "other", "prompt": "' + b"a" * 5_000_000 + b'"}', 413),
    ],
)
def test_a_bad_body_is_refused_as_by_a_server_of_one_model(
    http: httpx.Client, content: bytes, status: int
) -> None:
    json_type = {"content-type": "application/json"}
    reply = http.post(COMPLETIONS, content=content, headers=json_type)
    assert reply.status_code == status, reply.text
    assert http.post(COMPLETIONS, content=content[:9000]).status_code == 415
    assert http.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 1}).status_code == 200


def test_what_only_asks_names_a_model_in_the_address(http: httpx.Client) -> None:
    assert http.get("/model_info").json()["served_model_name"] == "tiny"
    assert http.get("/model_info?model=other").json()["served_model_name"] == "other"
    assert http.get("/server_info?model=other").json()["max_model_len"] == 512
    assert http.post("/flush_cache?model=other").status_code == 200
    assert http.get("/docs").status_code == http.get("/").status_code == 200
    assert "/v1/chat/completions" in http.get("/openapi.json").json()["paths"]


def test_lists_name_all_models_what_is_loaded_and_where_programs_connect(
    both: ServerProcess, http: httpx.Client
) -> None:
    first, second = http.get("/v1/models").json()["data"]
    assert (first["id"], first["max_model_len"]) == ("tiny", 2048)
    assert (second["id"], second["max_model_len"]) == ("other", 512)
    assert first["status"] == second["status"] == {"value": "loaded"}
    assert first["endpoint"] == both.endpoint and second["endpoint"] != both.endpoint
    assert http.get("/v1/models/other").json() == second
    assert http.get("/v1/models/nope").status_code == 404
    spoken = {"anthropic-version": "2023-06-01"}
    assert [m["id"] for m in http.get("/v1/models", headers=spoken).json()["data"]] == [
        "tiny",
        "other",
    ]
    for path in ("/api/tags", "/api/ps"):
        told = http.get(path).json()["models"]
        assert [model["name"] for model in told] == ["tiny:latest", "other:latest"], told
        assert all(model["size"] > 0 for model in told)
    for name, length in (("tiny", 2048), ("other:latest", 512)):
        shown = http.post("/api/show", json={"model": name}).json()
        assert shown["model_info"]["llama.context_length"] == length


def test_a_program_reaches_each_model_at_its_endpoint(
    both: ServerProcess, http: httpx.Client
) -> None:
    for model in http.get("/v1/models").json()["data"]:
        with st.Runtime(model["endpoint"]) as runtime:
            assert runtime.get_server_info()["model"] == model["id"]
        assert model["endpoint"] in both.log


def test_a_response_is_continued_by_another_model_and_a_request_aborted_on_any(
    http: httpx.Client,
) -> None:
    asked = {"input": "Hi", "max_output_tokens": 16}
    first = http.post("/v1/responses", json={**asked, "model": "tiny"}).json()
    more = {**asked, "model": "other", "previous_response_id": first["id"]}
    assert http.post("/v1/responses", json=more).json()["model"] == "other"
    assert http.get(f"/v1/responses/{first['id']}").json()["model"] == "tiny"
    body = {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True, "model": "other"}
    with http.stream("POST", COMPLETIONS, json={**body, "stream": True}) as stream:
        lines = stream.iter_lines()
        first_event = json.loads(next(lines).removeprefix("data: "))
        aborted = http.post("/abort", json={"id": first_event["id"]}).json()["aborted"]
        assert aborted == 1 or any("length" in line for line in lines)


def test_metrics_have_each_models_figures(both: ServerProcess, http: httpx.Client) -> None:
    text = http.get("/metrics").text
    for name in ("tiny", "other"):
        for line in (
            f'stemma_engine_up{{model="{name}"}} 1.0',
            f'stemma_model_loaded{{model="{name}"}} 1.0',
            f'stemma_model_loads_total{{model="{name}"}} 1.0',
        ):
            assert line in text
        assert f'stemma_generated_tokens_total{{model="{name}"}}' in text
    assert text.count("# TYPE stemma_generated_tokens_total counter") == 1
    assert 'route="/v1/completions"' in text


def test_keys_are_needed_for_all_but_the_probes(both: ServerProcess) -> None:
    ask = {"prompt": "Hi", "max_tokens": 1, "model": "other"}
    assert httpx.post(both.url + COMPLETIONS, json=ask, timeout=PATIENCE_S).status_code == 401
    for path in ("/v1/models", "/api/tags", "/api/ps", "/metrics", "/tree?model=other"):
        assert both.status(path) == 401
    for path in ("/health", "/ready", "/live", "/version"):
        assert both.status(path) == 200


def test_a_keys_limits_hold_over_all_models(tmp_path: Path, other: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(file_entry("ann", KEY) + "requests_per_minute = 2\n")
    with served(tmp_path, *models_of(TINY, f"other={other}"), "--api-keys", str(keys)) as server:
        keyed = {"authorization": f"Bearer {KEY}"}
        for name, status in (("tiny", 200), ("other", 200), ("tiny", 429), ("other", 429)):
            body = {"prompt": "Hi", "max_tokens": 1, "model": name}
            reply = httpx.post(
                server.url + COMPLETIONS, json=body, headers=keyed, timeout=PATIENCE_S
            )
            assert reply.status_code == status, reply.text


# --- loading and unloading ------------------------------------------------------------------------


def test_models_are_loaded_on_demand_once_and_the_idle_one_used_last_makes_room(
    tmp_path: Path, other: Path
) -> None:
    models = models_of(TINY, TWIN, f"other={other}")
    with served(tmp_path, *models, "--models-max", "2") as server:
        assert states(server) == {"tiny": "loaded", TWIN_NAME: "unloaded", "other": "unloaded"}
        assert len(children(server.process.pid)) == 1
        with asking(*[lambda: server.generate(model=TWIN_NAME)] * 4) as replies:
            pass
        assert [(r.status_code, r.json()["model"]) for r in replies] == [(200, TWIN_NAME)] * 4
        assert metric(server, "stemma_model_loads_total", TWIN_NAME) == 1
        assert len(children(server.process.pid)) == 2
        assert server.generate(model="tiny").status_code == 200
        assert server.generate(model="other").status_code == 200
        assert states(server) == {"tiny": "loaded", TWIN_NAME: "unloaded", "other": "loaded"}
        assert len(children(server.process.pid)) == 2
        ps = httpx.get(f"{server.url}/api/ps", timeout=PATIENCE_S).json()["models"]
        assert [model["name"] for model in ps] == ["tiny:latest", "other:latest"]
        asked = httpx.get(f"{server.url}/server_info", params={"model": TWIN_NAME}, timeout=60)
        assert asked.status_code == 503 and "is not loaded" in asked.json()["error"]["message"]
        shown = httpx.post(f"{server.url}/api/show", json={"model": TWIN_NAME}, timeout=60)
        assert shown.status_code == 200 and "tools" in shown.json()["capabilities"]
        assert server.status("/health") == server.status("/ready") == 200
        listed = httpx.get(f"{server.url}/v1/models/{TWIN_NAME}", timeout=60).json()
        assert listed["status"] == {"value": "unloaded"} and listed["max_model_len"] == 2048


def test_a_model_with_a_request_is_not_unloaded_and_who_waits_for_room_is_told(
    tmp_path: Path, other: Path
) -> None:
    models = models_of(TINY, f"other={other}")
    with served(tmp_path, *models, "--models-max", "1") as server:
        with server.stream(LONG, n=4) as events:
            impatient = httpx.post(
                server.url + COMPLETIONS,
                json={"prompt": "Hi", "max_tokens": 1, "model": "other"},
                headers={"x-request-timeout-s": "0.5"},
                timeout=PATIENCE_S,
            )
            assert impatient.status_code == 503 and impatient.headers["retry-after"] == "5"
            assert "'tiny' have something to do" in impatient.json()["error"]["message"]
            assert impatient.json()["error"]["code"] == "model_not_loaded"
            unload = {"model": "tiny"}
            busy = httpx.post(f"{server.url}/models/unload", json=unload, timeout=PATIENCE_S)
            assert busy.status_code == 409, busy.text
            with asking(lambda: server.generate(model="other")) as replies:
                assert list(events)[-1] == {"done": True}
        assert replies[0].status_code == 200 and replies[0].json()["model"] == "other"
        assert states(server) == {"tiny": "unloaded", "other": "loaded"}


def test_a_model_with_a_program_is_not_unloaded(tmp_path: Path, other: Path) -> None:
    models = models_of(TINY, f"other={other}")
    with (
        served(tmp_path, *models, "--models-max", "1") as server,
        st.Runtime(server.endpoint) as runtime,
    ):
        state = _story.stream(backend=runtime)
        assert next(iter(state.text_iter("story")))
        with asking(lambda: server.generate(model="other")) as replies:
            assert len(state["story"]) > 100
        assert replies[0].status_code == 200, replies[0].text


@st.function
def _story(s: st.ProgramState) -> None:
    s += "Hi" + st.gen("story", max_tokens=LONG, ignore_eos=True)


def test_memory_bounds_what_is_loaded(tmp_path: Path, other: Path) -> None:
    models = models_of(TINY, f"other={other}", f"third={other}")
    with served(tmp_path, *models, "--models-memory-gb", "1.3") as server:
        for name in ("other", "third", "tiny"):
            assert server.generate(model=name).status_code == 200
            assert list(states(server).values()).count("loaded") == 2
            used = [metric(server, "stemma_model_memory_bytes", each) for each in states(server)]
            assert 0.8e9 < sum(used) < 1.3e9


def test_a_model_can_be_loaded_before_and_unloaded_after(tmp_path: Path, other: Path) -> None:
    with served(tmp_path, *models_of(TINY, f"other={other}")) as server:
        asked: dict[str, Any] = {"json": {"model": "other"}, "timeout": PATIENCE_S}
        loaded = httpx.post(f"{server.url}/models/load", **asked)
        assert loaded.status_code == 200 and states(server)["other"] == "loaded"
        with st.Runtime(loaded.json()["endpoint"]) as runtime:
            assert runtime.get_server_info()["model"] == "other"
        assert httpx.post(f"{server.url}/models/unload", **asked).status_code == 200
        assert states(server) == {"tiny": "loaded", "other": "unloaded"}
        assert len(children(server.process.pid)) == 1
        assert httpx.post(f"{server.url}/models/unload", **asked).status_code == 200
        unknown = httpx.post(f"{server.url}/models/load", json={"model": "nope"}, timeout=60)
        assert unknown.status_code == 404


def test_ollamas_keep_alive_unloads_an_idle_model(tmp_path: Path, other: Path) -> None:
    said = {"messages": CHAT["messages"], "stream": False, "options": {"num_predict": 2}}

    def ask(path: str = "/api/chat", **body: object) -> dict[str, Any]:
        reply = httpx.post(server.url + path, json=body, timeout=PATIENCE_S)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def expiries() -> list[str]:
        told = httpx.get(f"{server.url}/api/ps", timeout=PATIENCE_S).json()["models"]
        return [model["expires_at"][:4] for model in told]

    with served(tmp_path, *models_of(TINY, f"other={other}")) as server:
        assert ask("/api/chat", model="other:latest", keep_alive=0, **said)["done"]
        wait_until(lambda: states(server) == {"tiny": "loaded", "other": "unloaded"})
        ask("/api/chat", model="other", keep_alive="87600h", **said)
        never, later = expiries()
        assert never == "9999" and later < "2300"
        ask("/api/embed", model="other", input="Hi", keep_alive=-1)
        assert expiries() == ["9999", "9999"]
        for path in ("/api/generate", "/api/chat"):  # as `ollama stop` does
            assert ask(path, model="other", keep_alive=0)["done_reason"] == "unload"
            wait_until(lambda: states(server)["other"] == "unloaded")
        assert metric(server, "stemma_model_loads_total", "other") == 2, "that loads nothing"
        wrong = httpx.post(f"{server.url}/api/chat", json={"keep_alive": "soon", **said})
        assert wrong.status_code == 400 and "'soon' is not allowed" in wrong.json()["error"]


def test_under_isolation_only_an_admins_keep_alive_is_heeded(tmp_path: Path, other: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        file_entry("ann", KEY) + "is_admin = true\n" + file_entry("bob", "a-key-of-another-tenant")
    )
    flags = ("--api-keys", str(keys), "--isolate-cache")
    with served(tmp_path, *models_of(TINY, f"other={other}"), *flags) as server:

        def ask(key: str, **body: object) -> str:
            reply = httpx.post(
                f"{server.url}/api/generate",
                json={"model": "other", "keep_alive": 0, **body},
                headers={"authorization": f"Bearer {key}"},
                timeout=PATIENCE_S,
            )
            return str(reply.json()["done_reason"])

        admin = {"authorization": f"Bearer {KEY}"}
        assert ask("a-key-of-another-tenant") == "load"
        assert states(server, **admin)["other"] == "loaded"
        assert ask(KEY) == "unload"
        wait_until(lambda: states(server, **admin)["other"] == "unloaded")


def test_a_body_that_is_refused_loads_nothing(tmp_path: Path, other: Path) -> None:
    with served(tmp_path, *models_of(TINY, f"other={other}"), "--models-max", "1") as server:
        for path, body in ((COMPLETIONS, {"prompt": {}}), ("/api/chat", {"messages": 5})):
            asked = {"json": {**body, "model": "other"}, "timeout": PATIENCE_S}
            assert httpx.post(server.url + path, **asked).status_code == 400
        assert states(server) == {"tiny": "loaded", "other": "unloaded"}
        assert metric(server, "stemma_model_loads_total", "other") == 0


def test_what_is_asked_of_a_model_without_files_says_so(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with served(tmp_path, *models_of(TINY, f"bad={missing}")) as server:
        shown = httpx.post(f"{server.url}/api/show", json={"model": "bad"}, timeout=PATIENCE_S)
        assert shown.status_code == 503
        assert "the files of model 'bad' could not be read" in shown.json()["error"]


def test_an_adapter_belongs_to_the_model_it_was_loaded_for(tmp_path: Path, other: Path) -> None:
    adapter = make_adapter(tmp_path / "odd", EMBEDDED_MODEL, std=0.4)
    models = models_of(f"other={other}", TINY)
    store = ("--kv-store", str(tmp_path / "kv"), "--kv-store-gb", "0.1")
    with served(tmp_path, *models, "--enable-lora", "--strict-fields", *store) as server:
        asked = {"lora_name": "odd", "lora_path": str(adapter), "model": "tiny"}
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
            assert http.post("/load_lora_adapter", json=asked).status_code == 200
            plain = server.generate(8, model="tiny", temperature=0).json()["choices"][0]["text"]
            for name in ("tiny:odd", "odd"):
                told = server.generate(8, model=name, temperature=0).json()
                assert told["model"] == name and told["choices"][0]["text"] != plain
            assert server.generate(model="other:odd").status_code == 404
            listed = {m["id"]: m["parent"] for m in http.get("/v1/models").json()["data"]}
            assert listed == {"other": None, "tiny": None, "tiny:odd": "tiny"}
            assert http.get("/v1/models/odd").json()["id"] == "tiny:odd"
            tags = [model["name"] for model in http.get("/api/tags").json()["models"]]
            assert tags == ["other:latest", "tiny:latest", "tiny:odd"]
            assert http.post("/models/unload", json={"model": "tiny"}).status_code == 200
            assert "tiny:odd" not in states(server)
        assert len(list((tmp_path / "kv").iterdir())) == 2, "a folder for each model"


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_model_that_cannot_be_loaded_says_why_and_is_tried_again(
    tmp_path: Path, other: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(other, broken)
    weights = broken / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    missing = tmp_path / "missing"
    models = models_of(TINY, f"broken={broken}", f"missing={missing}")
    with served(tmp_path, *models, "--models-max", "2") as server:
        assert "model 'missing': " in server.log and "does not exist" in server.log
        for name, reason in (("broken", "model.safetensors"), ("missing", "does not exist")):
            reply = server.generate(model=name)
            assert reply.status_code == 503 and reply.headers["retry-after"], reply.text
            message = reply.json()["error"]["message"]
            assert f"model {name!r} cannot be loaded" in message and reason in message, message
            assert server.generate(model="tiny").status_code == 200
        assert states(server) == {"tiny": "loaded", "broken": "unloaded", "missing": "unloaded"}
        told = httpx.get(f"{server.url}/v1/models/broken", timeout=60).json()["status"]
        assert told["failed"] and "model.safetensors" in told["reason"]
        assert server.status("/health") == 200
        weights.write_bytes(content)
        shutil.copytree(other, missing)
        wait_until(lambda: server.generate(model="broken").status_code == 200)
        wait_until(lambda: server.generate(model="missing").status_code == 200)
        told = httpx.get(f"{server.url}/v1/models/missing", timeout=60).json()
        assert told["status"] == {"value": "loaded"} and told["max_model_len"] == 512


def test_a_client_that_hangs_up_while_its_model_loads_hurts_nobody(
    tmp_path: Path, other: Path
) -> None:
    with served(tmp_path, *models_of(TINY, f"other={other}")) as server:
        hang_up(server, "other", lambda: states(server)["other"] == "loading")
        assert server.generate(model="tiny").status_code == 200
        assert server.generate(model="other").status_code == 200
        assert metric(server, "stemma_model_loads_total", "other") == 1


def test_a_client_that_hangs_up_while_it_waits_for_room_has_nothing_unloaded(
    tmp_path: Path, other: Path
) -> None:
    models = models_of(TINY, f"other={other}")
    with served(tmp_path, *models, "--models-max", "1") as server:
        with server.stream(LONG, n=4) as events:
            waits = lambda: metric(server, "stemma_model_requests_waiting", "other")  # noqa: E731
            hang_up(server, "other", lambda: waits() == 1)
            wait_until(lambda: waits() == 0)
            list(events)
        assert server.generate(model="tiny").status_code == 200
        assert metric(server, "stemma_model_unloads_total", "tiny") == 0


def hang_up(server: ServerProcess, model: str, when: Callable[[], bool]) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    body = json.dumps({"prompt": "Hi", "max_tokens": 2, "model": model}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
        client.sendall(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(when)


def test_an_engine_that_is_killed_leaves_the_other_model_unharmed(
    tmp_path: Path, other: Path
) -> None:
    with served(tmp_path, *models_of(TINY, f"other={other}")) as server:
        (first,) = children(server.process.pid)
        assert server.generate(model="other").status_code == 200
        (second,) = set(children(server.process.pid)) - {first}
        with server.stream(LONG, model="tiny") as events:
            os.kill(second, signal.SIGKILL)
            assert list(events)[-1] == {"done": True}
        wait_until(lambda: server.generate(model="other").status_code == 200)
        server.wait_healthy()
        assert metric(server, "stemma_engine_restarts_total", "other") == 1
        assert metric(server, "stemma_engine_restarts_total", "tiny") == 0
        assert first in children(server.process.pid)


# --- the end --------------------------------------------------------------------------------------


def test_asked_to_stop_it_refuses_who_waits_ends_what_runs_and_leaves_nothing(
    tmp_path: Path, other: Path
) -> None:
    models = models_of(TINY, TWIN, f"other={other}")
    with served(tmp_path, *models, "--models-max", "2") as server:
        assert server.generate(model=TWIN_NAME).status_code == 200
        engines = children(server.process.pid)
        assert len(engines) == 2
        with server.stream(LONG) as one, server.stream(LONG, model=TWIN_NAME) as two:
            with asking(lambda: server.generate(model="other")) as replies:
                waiting = "stemma_model_requests_waiting"
                wait_until(lambda: metric(server, waiting, "other") == 1)
                server.process.send_signal(signal.SIGTERM)
                wait_until(lambda: server.status("/ready") == 503)
                assert server.status("/health") == server.status("/live") == 200
            assert replies[0].status_code == 503
            assert "being stopped" in replies[0].json()["error"]["message"]
            assert list(one)[-1] == list(two)[-1] == {"done": True}
        assert server.process.wait(PATIENCE_S) == 0, server.log
        assert not any(map(is_alive, engines))


def test_stopped_while_a_model_loads_it_leaves_nothing(tmp_path: Path, other: Path) -> None:
    with served(tmp_path, *models_of(TINY, f"other={other}")) as server:
        done = threading.Event()

        def ask() -> None:
            with contextlib.suppress(httpx.TransportError):
                server.generate(model="other")
            done.set()

        threading.Thread(target=ask, daemon=True).start()
        wait_until(lambda: len(children(server.process.pid)) == 2)
        engines = children(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0, server.log
        assert done.wait(PATIENCE_S)
        assert not any(map(is_alive, engines))
