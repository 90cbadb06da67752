"""Models of one server that come and go: on demand, for room, by kills and by hangups."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapters import make_adapter
from checkpoints import make_checkpoint
from model_servers import (
    CHAT,
    KEY,
    LONG,
    TINY,
    TWIN,
    TWIN_NAME,
    asking,
    metric,
    models_of,
    served,
    states,
)
from server_process import COMPLETIONS, ServerProcess, children, is_alive
from waiting import PATIENCE_S, wait_until

import stemma as st
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.server.access.api_keys import file_entry


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model, of a shorter context."""
    return make_checkpoint(tmp_path_factory.mktemp("other"), max_position_embeddings=512, seed=3)


@pytest.fixture(scope="module")
def server_with_room(
    tmp_path_factory: pytest.TempPathFactory, other: Path
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("room")
    with served(folder, *models_of(TINY, f"other={other}")) as server:
        yield server


@pytest.fixture
def roomy(server_with_room: ServerProcess) -> ServerProcess:
    """Room for both of its models; the second is not loaded."""
    control(server_with_room, "unload", "other")
    return server_with_room


@pytest.fixture(scope="module")
def server_of_one(tmp_path_factory: pytest.TempPathFactory, other: Path) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("one")
    models = models_of(TINY, f"other={other}")
    with served(folder, *models, "--models-max", "1") as server:
        yield server


@pytest.fixture
def narrow(server_of_one: ServerProcess) -> ServerProcess:
    """Room for one of its models, which is the first."""
    control(server_of_one, "load", "tiny")
    return server_of_one


@pytest.fixture(scope="module")
def server_of_two(tmp_path_factory: pytest.TempPathFactory, other: Path) -> Iterator[ServerProcess]:
    """Room for two of its three models; the first test finds it as it has started, the last one
    stops it."""
    models = models_of(TINY, TWIN, f"other={other}")
    flags = ("--models-max", "2", "--drain-s", str(PATIENCE_S))
    with served(tmp_path_factory.mktemp("two"), *models, *flags) as server:
        yield server


def num_loads(server: ServerProcess, model: str) -> float:
    return metric(server, "stemma_model_loads_total", model)


def control(server: ServerProcess, action: str, model: str) -> httpx.Response:
    asked = {"model": model}
    reply = httpx.post(f"{server.url}/models/{action}", json=asked, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    return reply


# --- loading and unloading ------------------------------------------------------------------------


def test_models_are_loaded_on_demand_once_and_the_idle_one_used_last_makes_room(
    server_of_two: ServerProcess,
) -> None:
    server = server_of_two
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
    narrow: ServerProcess,
) -> None:
    with narrow.stream(LONG) as events:
        impatient = httpx.post(
            narrow.url + COMPLETIONS,
            json={"prompt": "Hi", "max_tokens": 1, "model": "other"},
            headers={"x-request-timeout-s": "0.2"},
            timeout=PATIENCE_S,
        )
        assert impatient.status_code == 503 and impatient.headers["retry-after"] == "5"
        assert "'tiny' have something to do" in impatient.json()["error"]["message"]
        assert impatient.json()["error"]["code"] == "model_not_loaded"
        unload = {"model": "tiny"}
        busy = httpx.post(f"{narrow.url}/models/unload", json=unload, timeout=PATIENCE_S)
        assert busy.status_code == 409, busy.text
        with asking(lambda: narrow.generate(model="other")) as replies:
            assert list(events)[-1] == {"done": True}
    assert replies[0].status_code == 200 and replies[0].json()["model"] == "other"
    assert states(narrow) == {"tiny": "unloaded", "other": "loaded"}


def test_a_model_with_a_program_is_not_unloaded(narrow: ServerProcess) -> None:
    with st.Runtime(narrow.endpoint) as runtime:
        state = _story.stream(backend=runtime)
        assert next(iter(state.text_iter("story")))
        with asking(lambda: narrow.generate(model="other")) as replies:
            assert len(state["story"]) > 100
        assert replies[0].status_code == 200, replies[0].text


@st.function
def _story(s: st.ProgramState) -> None:
    s += "Hi" + st.gen("story", max_tokens=LONG, ignore_eos=True)


def test_memory_bounds_what_is_loaded(tmp_path: Path, other: Path) -> None:
    models = models_of(TINY, f"other={other}", f"third={other}")
    with served(tmp_path, *models, "--models-memory-gb", "1.1") as server:
        for name in ("other", "third", "tiny"):
            assert server.generate(model=name).status_code == 200
            assert list(states(server).values()).count("loaded") == 2
            used = [metric(server, "stemma_model_memory_bytes", each) for each in states(server)]
            assert 0.7e9 < sum(used) < 1.1e9


def test_a_model_can_be_loaded_before_and_unloaded_after(roomy: ServerProcess) -> None:
    asked: dict[str, Any] = {"json": {"model": "other"}, "timeout": PATIENCE_S}
    loaded = httpx.post(f"{roomy.url}/models/load", **asked)
    assert loaded.status_code == 200 and states(roomy)["other"] == "loaded"
    with st.Runtime(loaded.json()["endpoint"]) as runtime:
        assert runtime.get_server_info()["model"] == "other"
    assert httpx.post(f"{roomy.url}/models/unload", **asked).status_code == 200
    assert states(roomy) == {"tiny": "loaded", "other": "unloaded"}
    assert len(children(roomy.process.pid)) == 1
    assert httpx.post(f"{roomy.url}/models/unload", **asked).status_code == 200
    unknown = httpx.post(f"{roomy.url}/models/load", json={"model": "nope"}, timeout=60)
    assert unknown.status_code == 404


def test_ollamas_keep_alive_unloads_an_idle_model(roomy: ServerProcess) -> None:
    said = {"messages": CHAT["messages"], "stream": False, "options": {"num_predict": 2}}

    def ask(path: str = "/api/chat", **body: object) -> dict[str, Any]:
        reply = httpx.post(roomy.url + path, json=body, timeout=PATIENCE_S)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def expiries() -> list[str]:
        told = httpx.get(f"{roomy.url}/api/ps", timeout=PATIENCE_S).json()["models"]
        return [model["expires_at"][:4] for model in told]

    before = num_loads(roomy, "other")
    assert ask("/api/chat", model="other:latest", keep_alive=0, **said)["done"]
    wait_until(lambda: states(roomy) == {"tiny": "loaded", "other": "unloaded"})
    ask("/api/chat", model="other", keep_alive="87600h", **said)
    never, later = expiries()
    assert never == "9999" and later < "2300"
    ask("/api/embed", model="other", input="Hi", keep_alive=-1)
    assert expiries() == ["9999", "9999"]
    for path in ("/api/generate", "/api/chat"):  # as `ollama stop` does
        assert ask(path, model="other", keep_alive=0)["done_reason"] == "unload"
        wait_until(lambda: states(roomy)["other"] == "unloaded")
    assert num_loads(roomy, "other") == before + 2, "that loads nothing"
    wrong = httpx.post(f"{roomy.url}/api/chat", json={"keep_alive": "soon", **said})
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


def test_a_body_that_is_refused_loads_nothing(narrow: ServerProcess) -> None:
    before = num_loads(narrow, "other")
    for path, body in ((COMPLETIONS, {"prompt": {}}), ("/api/chat", {"messages": 5})):
        asked = {"json": {**body, "model": "other"}, "timeout": PATIENCE_S}
        assert httpx.post(narrow.url + path, **asked).status_code == 400
    assert states(narrow) == {"tiny": "loaded", "other": "unloaded"}
    assert num_loads(narrow, "other") == before


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
        shown = httpx.post(f"{server.url}/api/show", json={"model": "missing"}, timeout=60)
        assert shown.status_code == 503
        assert "the files of model 'missing' could not be read" in shown.json()["error"]
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


def test_a_client_that_hangs_up_while_its_model_loads_hurts_nobody(roomy: ServerProcess) -> None:
    before = num_loads(roomy, "other")
    hang_up(roomy, "other", lambda: states(roomy)["other"] == "loading")
    assert roomy.generate(model="tiny").status_code == 200
    assert roomy.generate(model="other").status_code == 200
    assert num_loads(roomy, "other") == before + 1


def test_a_client_that_hangs_up_while_it_waits_for_room_has_nothing_unloaded(
    narrow: ServerProcess,
) -> None:
    unloads = lambda: metric(narrow, "stemma_model_unloads_total", "tiny")  # noqa: E731
    before = unloads()
    with narrow.stream(LONG) as events:
        waits = lambda: metric(narrow, "stemma_model_requests_waiting", "other")  # noqa: E731
        hang_up(narrow, "other", lambda: waits() == 1)
        wait_until(lambda: waits() == 0)
        list(events)
    assert narrow.generate(model="tiny").status_code == 200
    assert unloads() == before


def hang_up(server: ServerProcess, model: str, when: Callable[[], bool]) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    body = json.dumps({"prompt": "Hi", "max_tokens": 2, "model": model}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
        client.sendall(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(when)


def test_an_engine_that_is_killed_leaves_the_other_model_unharmed(roomy: ServerProcess) -> None:
    (first,) = children(roomy.process.pid)
    assert roomy.generate(model="other").status_code == 200
    (second,) = set(children(roomy.process.pid)) - {first}
    with roomy.stream(LONG, model="tiny") as events:
        os.kill(second, signal.SIGKILL)
        assert list(events)[-1] == {"done": True}
    wait_until(lambda: roomy.generate(model="other").status_code == 200)
    roomy.wait_healthy()
    assert metric(roomy, "stemma_engine_restarts_total", "other") == 1
    assert metric(roomy, "stemma_engine_restarts_total", "tiny") == 0
    assert first in children(roomy.process.pid)


# --- the end --------------------------------------------------------------------------------------


def test_asked_to_stop_it_refuses_who_waits_ends_what_runs_and_leaves_nothing(
    server_of_two: ServerProcess,
) -> None:
    server = server_of_two
    for name in ("tiny", TWIN_NAME):
        assert server.generate(model=name).status_code == 200
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


def test_stopped_while_a_model_loads_it_leaves_nothing(roomy: ServerProcess) -> None:
    """The last test of that server, which ends here."""
    server = roomy
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
