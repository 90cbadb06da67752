"""Who may ask for how much over HTTP, and what one caller can learn of another: nothing."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from engine_thread import engine_in_thread
from http_server import http_client, http_server
from raw_http import RawClient

import stemma as st
from stemma.server.access import request_body
from stemma.server.access.api_keys import file_entry, new_key
from stemma.server.generation.service import Service

JSON = {"content-type": "application/json"}
ALICE, BOB, ROOT = (new_key() for _ in range(3))


@pytest.fixture
def http(embedded: st.Engine) -> Iterator[httpx.Client]:
    with http_client(embedded) as client:
        yield client


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    entries = (file_entry(*item) for item in (("alice", ALICE), ("bob", BOB), ("root", ROOT)))
    path.write_text("".join(entries) + "is_admin = true\n")
    return path


@pytest.fixture(scope="module")
def isolated(embedded: st.Engine, key_file: Path) -> Iterator[str]:
    with http_server(embedded, api_keys=str(key_file), isolate_cache=True) as url:
        yield url


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def complete(url: str, key: str, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    reply = httpx.post(f"{url}/v1/completions", json=body, headers=bearer(key), timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


BEGIN = 1  # tokens that all prompts begin with: each namespace has its own of them


def error_of(reply: httpx.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["x-request-id"] and "Traceback" not in reply.text
    return dict(reply.json()["error"])


# --- keys -----------------------------------------------------------------------------------------


def test_without_a_key_only_probes_are_answered(isolated: str) -> None:
    assert httpx.get(f"{isolated}/health").status_code == 200
    for method, path in (("GET", "/v1/models"), ("GET", "/openapi.json"), ("POST", "/kv_hints")):
        reply = httpx.request(method, isolated + path)
        assert error_of(reply, 401)["code"] == "invalid_api_key"
        assert reply.headers["www-authenticate"].startswith("Bearer")
    for headers in (bearer(ALICE[:-1]), {"x-api-key": "nobody's"}, {"authorization": "Basic eDp5"}):
        error_of(httpx.get(f"{isolated}/v1/models", headers=headers), 401)
    for headers in (bearer(ALICE), {"x-api-key": ALICE}, {"authorization": f"bearer  {ALICE}"}):
        assert httpx.get(f"{isolated}/v1/models", headers=headers).status_code == 200


def test_openais_client_says_what_is_wrong_with_a_key(isolated: str) -> None:
    client = openai.OpenAI(base_url=f"{isolated}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="not known"):
        client.models.list()
    with openai.OpenAI(base_url=f"{isolated}/v1", api_key=BOB) as client:
        assert client.completions.create(model="default", prompt="a", max_tokens=1).choices


def test_a_tenant_is_whom_the_key_says_and_no_header(isolated: str, embedded: st.Engine) -> None:
    seen = requests_seen(embedded, isolated, {**bearer(ALICE), "x-stemma-tenant": "bob"})
    assert seen == {"alice"}


def requests_seen(engine: st.Engine, url: str, headers: dict[str, str]) -> set[Any]:
    """Tenants under which programs are created meanwhile."""
    connection, seen = engine.connection, set()
    open_program = connection.open_program
    with pytest.MonkeyPatch.context() as patch:

        def spy(sink: Any, create: dict[str, object]) -> int:
            seen.add(create.get("tenant"))
            return open_program(sink, create)

        patch.setattr(connection, "open_program", spy)
        body = {"prompt": "x", "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=headers).status_code == 200
    return seen


# --- every answer ---------------------------------------------------------------------------------


def test_every_answer_names_its_request(http: httpx.Client) -> None:
    for path in ("/v1/models", "/nowhere", "/health"):
        assert http.get(path).headers["x-request-id"].startswith("req-")
    given = {"x-request-id": "trace-17.a:b"}
    assert http.get("/v1/models", headers=given).headers["x-request-id"] == "trace-17.a:b"
    for bad in ("a b", "x" * 200, "<script>"):
        headers = {"x-request-id": bad}
        assert http.get("/v1/models", headers=headers).headers["x-request-id"].startswith("req-")


def test_what_nobody_has_foreseen_is_a_500_that_says_nothing(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(service: Service, name: str | None, lora_path: str | None) -> None:
        raise RuntimeError("a secret of the house")

    monkeypatch.setattr(Service, "served", fail)
    reply = http.post("/v1/completions", json={"prompt": "x"})
    error = error_of(reply, 500)
    assert error["type"] == "server_error" and "secret" not in reply.text
    assert reply.headers["x-request-id"] in caplog.text and "a secret" in caplog.text


def test_statuses_are_those_of_http(http: httpx.Client) -> None:
    assert error_of(http.get("/v1/nothing"), 404)["type"] == "not_found_error"
    reply = http.get("/v1/completions")
    assert error_of(reply, 405)["code"] == "method_not_allowed" and reply.headers["allow"] == "POST"
    error = error_of(http.post("/v1/completions", json={"prompt": "x", "model": "gpt-9"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    error = error_of(http.post("/v1/completions", json={"prompt": "word " * 9000}), 400)
    assert error["code"] == "context_length_exceeded"
    assert error_of(http.post("/v1/completions", json={}), 400)["param"] == "prompt"


# --- bodies ---------------------------------------------------------------------------------------


def test_unknown_fields_are_told_of_or_refused(embedded: st.Engine, http: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi", "mood": "good"}],
        "max_tokens": 1,
        "surprise\n": 1,
    }
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200
    told = reply.headers["x-stemma-warnings"]
    assert "'messages.0.mood' ignored" in told and "surprise" in told
    fine = {"messages": body["messages"][:0] + [{"role": "user", "content": "x"}], "max_tokens": 1}
    assert "x-stemma-warnings" not in http.post("/v1/chat/completions", json=fine).headers
    with http_client(embedded, strict_fields=True) as strict:
        del body["surprise\n"]
        error = error_of(strict.post("/v1/chat/completions", json=body), 400)
        assert (error["param"], error["code"]) == ("messages.0.mood", "unknown_parameter")
        assert strict.post("/v1/chat/completions", json=fine).status_code == 200


def test_a_schema_and_what_it_says_is_not_searched(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"foo": {"type": "boolean"}}, "x-any": {"y": 1}}
    body = {"prompt": "x", "max_tokens": 2, "json_schema": schema}
    reply = http.post("/v1/completions", json=body)
    assert "x-stemma-warnings" not in reply.headers, reply.headers


def test_bodies_are_bounded_whether_their_size_is_announced_or_not(embedded: st.Engine) -> None:
    large = json.dumps({"prompt": "x" * 300_000, "max_tokens": 1}).encode()

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(large), 10_000):
            yield large[start : start + 10_000]

    with http_client(embedded, max_body_mb=0.2) as http:
        assert error_of(http.post("/v1/completions", content=large, headers=JSON), 413)
        try:
            reply = http.post("/v1/completions", content=chunks(), headers=JSON)
        except httpx.WriteError:  # it was refused while it was being sent
            pass
        else:
            assert error_of(reply, 413)["code"] == "request_too_large"
        small = {"prompt": "x" * 100, "max_tokens": 1}
        assert http.post("/v1/completions", json=small).status_code == 200


def test_a_body_that_does_not_come_is_given_up(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "GRACE_S", 0.1)

    client = RawClient(str(http.base_url))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sock.sendall(head + b'Content-Length: 15\r\n\r\n{"prompt": ')
    assert b" 408 " in client.read_until(b"\r\n")
    client.close()


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "json"])
def test_what_a_foreign_page_may_send_unasked_is_no_request(
    http: httpx.Client, embedded: st.Engine, kind: str | None
) -> None:
    before = embedded.get_server_info()["stats"]["num_prompt_tokens"]
    headers = {} if kind is None else {"content-type": kind}
    body = b'{"prompt": "x", "max_tokens": 1}'
    reply = http.post("/v1/completions", content=body, headers=headers)
    assert error_of(reply, 415)["code"] == "unsupported_media_type"
    assert embedded.get_server_info()["stats"]["num_prompt_tokens"] == before


def test_pages_of_other_sites_and_rebound_names_are_turned_away(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for headers in (
        {"origin": "https://evil.example"},
        {"host": "evil.example"},
        {"host": "evil.example", "origin": "http://evil.example"},
        {"sec-fetch-site": "cross-site"},
    ):
        reply = http.post("/v1/completions", json=body, headers=headers)
        assert error_of(reply, 403)["type"] == "permission_error"
        assert "access-control-allow-origin" not in reply.headers
    image = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    error_of(http.get("/flush_cache", headers=image), 403)
    assert http.get("/", headers=image).status_code == 200, "a link to the page may be followed"
    own = {"origin": str(http.base_url).rstrip("/"), "sec-fetch-site": "same-origin"}
    assert http.post("/v1/completions", json=body, headers=own).status_code == 200


def test_an_allowed_origin_may_ask_and_read_the_answer_whatever_it_is(
    embedded: st.Engine,
) -> None:
    origin = {"origin": "https://chat.example"}
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    settings: dict[str, Any] = {"cors_origins": ("https://chat.example",), "api_key": (ALICE,)}
    with http_client(embedded, **settings) as http:
        reply = http.options("/v1/completions", headers={**origin, **ask})
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "https://chat.example"
        reply = http.get("/v1/models", headers=origin)
        error_of(reply, 401)
        assert reply.headers["access-control-allow-origin"] == "https://chat.example"
        assert "x-request-id" in reply.headers["access-control-expose-headers"]
        other = {"origin": "https://evil.example", **ask}
        assert (
            "access-control-allow-origin" not in http.options("/v1/models", headers=other).headers
        )


# --- limits ---------------------------------------------------------------------------------------


def test_what_a_request_may_ask_for_is_bounded_and_the_bound_is_named(
    embedded: st.Engine,
) -> None:
    with http_client(embedded, max_tokens_limit=8) as http:
        for field in ("max_tokens", "max_completion_tokens"):
            body = {"messages": [{"role": "user", "content": "hi"}], field: 9}
            message = error_of(http.post("/v1/chat/completions", json=body), 400)["message"]
            assert "9" in message and "[0, 8]" in message
        body = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
        reply = http.post("/v1/chat/completions", json=body).json()
        assert reply["usage"]["completion_tokens"] == 8, "what nobody asks for is cut"
        many = {"prompt": ["x"] * 100, "n": 64, "max_tokens": 1}
        assert "2048" in error_of(http.post("/v1/completions", json=many), 400)["message"]


def hold(url: str, began: threading.Event, let_go: threading.Event, **fields: Any) -> None:
    body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True, **fields}
    body |= {"temperature": 3.0, "seed": 1}
    headers = bearer(ALICE)
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as reply:
        chunks = reply.iter_bytes()  # kept: once it is collected the response is closed
        next(chunks)
        began.set()
        let_go.wait(120)


def test_a_full_queue_is_a_429_until_there_is_room(
    embedded: st.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Service, "max_running", property(lambda service: 1))
    body = {"prompt": "y", "max_tokens": 1}
    with http_client(embedded, max_queued_requests=3) as http:
        began, let_go = threading.Event(), threading.Event()
        args = (str(http.base_url).rstrip("/"), began, let_go)
        holder = threading.Thread(target=hold, args=args, kwargs={"n": 2})
        holder.start()
        assert began.wait(120)
        for headers in ({}, {"x-forwarded-for": "192.0.2.1"}, {"x-stemma-tenant": "another"}):
            reply = http.post("/v1/completions", json=body, headers=headers)
            error = error_of(reply, 429)
            assert error["code"] == "queue_full" and int(reply.headers["retry-after"]) >= 1
        let_go.set()
        holder.join()
        deadline = time.monotonic() + 120
        while (reply := http.post("/v1/completions", json=body)).status_code == 429:
            assert time.monotonic() < deadline, "what a client has left is never given back"
            time.sleep(0.02)
        assert reply.status_code == 200


@pytest.mark.parametrize(
    ("num_queued", "num_asked", "num_let_in"),
    [(256, 6, 3), pytest.param(4096, 66, 33, marks=pytest.mark.slow)],
)
def test_a_key_that_floods_the_queue_leaves_room_for_another(
    embedded: st.Engine, key_file: Path, num_queued: int, num_asked: int, num_let_in: int
) -> None:
    """As many samples as may run and wait, in requests of 64, and then 15 of another key."""
    flood = {"prompt": "x", "n": 64, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    mine = {"prompt": "y", "max_tokens": 2, "ignore_eos": True}
    statuses: list[int] = []
    let_go = threading.Event()
    with http_server(embedded, api_keys=str(key_file), max_queued_requests=num_queued) as url:
        path = f"{url}/v1/completions"

        def ask() -> None:
            headers = bearer(ALICE)
            with httpx.stream("POST", path, json=flood, headers=headers, timeout=60) as reply:
                statuses.append(reply.status_code)
                let_go.wait(60)

        flooders = [threading.Thread(target=ask) for _ in range(num_asked)]
        for flooder in flooders:
            flooder.start()
        try:
            while statuses.count(429) < num_asked - num_let_in:
                assert any(each.is_alive() for each in flooders), statuses
                time.sleep(0.01)
            replies = [
                httpx.post(path, json=mine, headers=bearer(BOB), timeout=60) for _ in range(15)
            ]
        finally:
            let_go.set()
            for flooder in flooders:
                flooder.join()
    assert sorted(statuses) == [200] * num_let_in + [429] * (num_asked - num_let_in)
    assert [reply.status_code for reply in replies] == [200] * 15


def test_a_key_has_limits_of_its_own(embedded: st.Engine, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    limits = "requests_per_minute = 4\ntokens_per_minute = 40\nmax_priority = 5\n"
    path.write_text(file_entry("alice", ALICE) + limits + file_entry("bob", BOB))
    body = {"prompt": "a b c", "max_tokens": 8, "ignore_eos": True}
    with http_client(embedded, ALICE, api_keys=str(path)) as http:
        error = error_of(http.post("/v1/completions", json={**body, "priority": 6}), 403)
        assert error["param"] == "priority"
        reply = http.post("/v1/completions", json=body)
        assert reply.headers["x-ratelimit-limit-requests"] == "4"
        assert reply.headers["x-ratelimit-remaining-requests"] == "2"
        assert reply.headers["x-ratelimit-remaining-tokens"] == "40"
        used = reply.json()["usage"]["total_tokens"]
        reply = http.post("/v1/completions", json={**body, "max_tokens": 60})
        assert int(reply.headers["x-ratelimit-remaining-tokens"]) == pytest.approx(40 - used, abs=2)
        reply = http.post("/v1/completions", json=body)
        error = error_of(reply, 429)
        assert error["type"] == "tokens" and error["code"] == "rate_limit_exceeded"
        assert int(reply.headers["retry-after"]) >= 1
        assert http.get("/v1/models").status_code == 200, "to look is not to ask"
        others = http.post("/v1/completions", json=body, headers=bearer(BOB))
        assert others.status_code == 200 and "x-ratelimit-limit-requests" not in others.headers


def test_a_key_runs_so_many_requests_at_a_time(embedded: st.Engine, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(file_entry("alice", ALICE) + "max_concurrent = 1\n")
    with http_client(embedded, ALICE, api_keys=str(path)) as http:
        began, let_go = threading.Event(), threading.Event()
        args = (str(http.base_url).rstrip("/"), began, let_go)
        holder = threading.Thread(target=hold, args=args)
        holder.start()
        assert began.wait(120)
        error_of(http.post("/v1/completions", json={"prompt": "y"}), 429)
        let_go.set()
        holder.join()
        deadline = time.monotonic() + 120
        while http.post("/v1/completions", json={"prompt": "y"}).status_code == 429:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_an_output_that_cannot_be_there_in_time_is_a_503_with_the_reason(
    http: httpx.Client,
) -> None:
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True}
    http.post("/v1/completions", json={**body, "max_tokens": 64})  # what a step takes is known now
    error = error_of(http.post("/v1/completions", json={**body, "deadline_s": 0.02}), 503)
    assert error["type"] == error["code"] == "deadline_exceeded" and "deadline" in error["message"]
    headers = {"x-request-timeout-s": "0.02"}
    error = error_of(http.post("/v1/completions", json=body, headers=headers), 503)
    assert error["type"] == "deadline_exceeded"
    body |= {"max_tokens": 1, "deadline_s": 60}
    assert http.post("/v1/completions", json=body).status_code == 200
    for bad in ("-1", "nan", "soon"):
        headers = {"x-request-timeout-s": bad}
        error = error_of(http.post("/v1/completions", json=body, headers=headers), 400)
        assert error["param"] == "x-request-timeout-s"


# --- isolation ------------------------------------------------------------------------------------


def test_what_one_key_has_asked_is_no_faster_for_another(isolated: str) -> None:
    cases: tuple[dict[str, Any], ...] = ({}, {"n": 3}, {"cache_salt": "x"})
    for number, fields in enumerate(cases):
        prompt = f"{number} secrets of the house are kept in the third drawer, under the letters."
        assert cached(complete(isolated, ALICE, prompt)) <= BEGIN
        again = complete(isolated, ALICE, prompt)
        assert cached(again) == again["usage"]["prompt_tokens"] - 1
        assert cached(complete(isolated, BOB, prompt, **fields)) <= BEGIN, fields


def test_forks_share_their_prompt_within_the_namespace(isolated: str, embedded: st.Engine) -> None:
    prompt = "Forks of a prompt that nobody else has asked about, not even once."
    before = embedded.get_server_info()["stats"]["num_cached_tokens"]
    answer = complete(isolated, ALICE, prompt, n=4)
    after = embedded.get_server_info()["stats"]["num_cached_tokens"]
    assert after - before == 3 * (answer["usage"]["prompt_tokens"] - 1) + cached(answer)


def test_a_salt_parts_requests_of_one_key_too(isolated: str) -> None:
    prompt = "What a user of one key asks, with a salt that only this user knows."
    complete(isolated, ALICE, prompt, cache_salt="one")
    assert cached(complete(isolated, ALICE, prompt, cache_salt="two")) <= BEGIN
    assert cached(complete(isolated, ALICE, prompt)) <= BEGIN
    assert cached(complete(isolated, ALICE, prompt, cache_salt="one")) > 0
    assert cached(complete(isolated, BOB, prompt, cache_salt="one")) <= BEGIN


def test_an_answer_of_one_key_is_replayed_to_no_other(isolated: str) -> None:
    """Its very ids, where they are not what its text is tokenized to, would tell of it."""
    user = {"role": "user", "content": "Say something odd."}
    fields: dict[str, Any] = {"temperature": 4.0, "seed": 5, "max_tokens": 24, "ignore_eos": True}

    def chat(key: str, messages: list[Any]) -> dict[str, Any]:
        body = {"messages": messages, **fields}
        url = f"{isolated}/v1/chat/completions"
        return dict(httpx.post(url, json=body, headers=bearer(key), timeout=60).json())

    first = chat(ALICE, [user])
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    turns = [user, said, {"role": "user", "content": "Why?"}]
    mine, other = chat(ALICE, turns), chat(BOB, turns)
    # up to the end of what was said, and not only of the prompt before it
    assert cached(mine) >= first["usage"]["total_tokens"] - 1
    assert cached(other) <= BEGIN
    assert mine["usage"]["prompt_tokens"] != other["usage"]["prompt_tokens"], (
        "or this shows nothing"
    )


def hint(url: str, key: str, kind: str, target: dict[str, Any]) -> int:
    """How many tokens it found."""
    action = {"action_id": "a", "action_type": kind, "payload": {"target": target, "ttl_ms": 5000}}
    reply = httpx.post(f"{url}/kv_hints", json={"actions": [action]}, headers=bearer(key))
    return int(reply.json()["outcomes"][0]["num_tokens"])


def test_hints_of_one_key_find_nothing_of_another(isolated: str) -> None:
    prompt = "A prefix that its owner would like to keep for a while."
    answer = complete(isolated, ALICE, prompt)
    for target in ({"prompt": prompt}, {"response_id": answer["id"]}):
        assert hint(isolated, BOB, "pin", target) <= BEGIN
        assert hint(isolated, BOB, "demote", target) <= BEGIN
        assert hint(isolated, ALICE, "pin", target) >= answer["usage"]["prompt_tokens"]
    assert cached(complete(isolated, ALICE, prompt)) > 0


def test_what_shows_all_is_for_admins(isolated: str) -> None:
    for path in ("/metrics", "/tree", "/server_info", "/watch"):
        assert error_of(httpx.get(isolated + path, headers=bearer(ALICE)), 403)
    assert error_of(httpx.post(f"{isolated}/flush_cache", headers=bearer(ALICE)), 403)
    assert httpx.get(f"{isolated}/tree/", headers=bearer(ROOT)).status_code != 403


def test_an_admin_watches_every_namespace(isolated: str) -> None:
    complete(isolated, ALICE, "A tale of pines and kites", cache_salt="sea")
    with httpx.stream("GET", f"{isolated}/watch", headers=bearer(ROOT), timeout=120) as reply:
        assert any("pines and kites" in line for line in reply.iter_lines())


def test_a_namespace_sees_its_own_tree_alone(isolated: str, embedded: st.Engine) -> None:
    complete(isolated, ALICE, "alice was here")
    complete(isolated, BOB, "bob was here")
    texts = [
        "".join(node["text"] for node in embedded.connection.call("tree", namespace=name)["nodes"])
        for name in ("key/alice", "key/bob", "key/carol")
    ]
    assert "alice was here" in texts[0] and "bob" not in texts[0]
    assert "bob was here" in texts[1] and texts[2] == ""


def test_a_grammar_is_compiled_for_each_key(isolated: str, embedded: st.Engine) -> None:
    """How long it takes would tell who has used it before."""
    complete(isolated, ALICE, "x", regex="alice|bob|carol")
    compiled = embedded.get_server_info()["grammars"]["num_compiled"]
    complete(isolated, ALICE, "x", regex="alice|bob|carol")
    assert embedded.get_server_info()["grammars"]["num_compiled"] == compiled
    complete(isolated, BOB, "x", regex="alice|bob|carol")
    assert embedded.get_server_info()["grammars"]["num_compiled"] == compiled + 1


def test_neither_host_nor_disk_tells_one_key_of_another(
    checkpoint: Path, key_file: Path, tmp_path: Path
) -> None:
    """What has left the device is found again by its own key, from the tier that has it."""
    prompt = "".join(f"Line {number} of a long document. " for number in range(30))
    options: dict[str, Any] = {"max_total_tokens": 2048, "num_threads": 1, "dtype": "float32"}
    tiers: dict[str, Any] = {"host_kv_tokens": 32_768, "kv_store": tmp_path / "store"}

    def push_off(url: str) -> None:
        for word in ("other", "further"):
            complete(url, ROOT, f"{word} things " * 90)

    with engine_in_thread(checkpoint, **options, **tiers) as engine:
        with http_server(engine, api_keys=str(key_file), isolate_cache=True) as url:
            complete(url, ALICE, prompt)
            push_off(url)
            assert cached(complete(url, BOB, prompt)) <= BEGIN
            push_off(url)
            assert cached(complete(url, ALICE, prompt)) > 200


# --- what is hostile ------------------------------------------------------------------------------

DEEP = '{"a":' * 900 + "1" + "}" * 900
HOSTILE = {
    "stop": json.dumps([f"s{number}" for number in range(10_000)]),
    "n": "1000000000",
    "temperature": "NaN",
    "top_p": "1e999",
    "seed": "9" * 40,
    "priority": "9" * 40,
    "max_tokens": "-1",
    "top_k": "-7",
    "logit_bias": '{"-5": 1}',
    "prompt": '["\\ud800"]',
    "json_schema": DEEP,
    "regex": '"' + "(" * 500 + '"',
    "ebnf": '"root ::= never_defined"',
    "kv_hints": DEEP,
    "stream_options": "[]",
    "cache_salt": '"' + "x" * 100_000 + '"',
}


@pytest.mark.parametrize("field", HOSTILE)
def test_a_hostile_field_is_a_400_and_leaves_nothing_behind(
    http: httpx.Client, embedded: st.Engine, field: str
) -> None:
    rest = "" if field == "prompt" else '"prompt": "x", '
    body = f'{{{rest}"{field}": {HOSTILE[field]}}}'
    error = error_of(http.post("/v1/completions", content=body, headers=JSON), 400)
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 1000
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_chat_of_thousands_of_messages_is_refused_at_once(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}] * 5000, "max_tokens": 1}
    began = time.process_time()  # the server is a thread of this process
    assert error_of(http.post("/v1/chat/completions", json=body), 400)["param"] == "messages"
    assert time.process_time() - began < 5


def test_huge_and_odd_headers_do_no_harm(http: httpx.Client) -> None:
    for name, value in (
        (b"x-request-id", b"\xff\xfe"),
        (b"authorization", b"Bearer \xff\xfe"),
        (b"x-stemma-tenant", b"\xff" * 300),
        (b"origin", b"\xff"),
    ):
        reply = http.post("/v1/tokenize", json={"text": "x"}, headers={name: value})
        assert reply.status_code in (200, 400, 403, 413), (name, reply.text)
    try:
        reply = http.get("/v1/models", headers={"x-large": "x" * 500_000})
    except httpx.TransportError:  # by a parser with a bound of its own
        return
    assert reply.status_code in (400, 431)


def test_who_never_ends_its_headers_is_cut_off(http: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", http.base_url.port or 80), timeout=120) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nx-endless: ")
        with pytest.raises(OSError):
            for _ in range(200):
                raw.sendall(b"x" * 65_536)
                time.sleep(0.001)


def test_a_program_that_could_not_be_sent_is_no_longer_there(
    http: httpx.Client, embedded: st.Engine
) -> None:
    before = embedded.get_server_info()["num_programs"]
    for path, body in (
        ("/v1/completions", {"prompt": [[1], [2**70]]}),
        ("/score", {"input_ids": [2**70], "choices": ["a", "b"]}),
    ):
        reply = http.post(path, content=json.dumps(body), headers=JSON)
        error_of(reply, 400)
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})  # behind what was sent
    assert embedded.get_server_info()["num_programs"] <= before


def test_every_body_is_read_strictly(http: httpx.Client) -> None:
    """Routes that take a body are made by `json_routes`; this finds one that is not."""
    document = http.get("/openapi.json").json()
    with_body = [
        path for path, ops in document["paths"].items() if "requestBody" in ops.get("post", {})
    ]
    assert len(with_body) > 3
    for path in with_body:
        path = path.replace("{", "").replace("}", "")
        assert error_of_any(http.post(path, content=b'{"a": NaN}', headers=JSON)).startswith(
            "the body is no valid JSON"
        ), path


def error_of_any(reply: httpx.Response) -> str:
    """The message, in OpenAI's error object or Anthropic's; Ollama's is a text."""
    error = reply.json()["error"]
    return error if isinstance(error, str) else str(error["message"])


def test_the_document_tells_of_errors_and_keys(http: httpx.Client, isolated: str) -> None:
    open_document = http.get("/openapi.json").json()
    document = httpx.get(f"{isolated}/openapi.json", headers=bearer(ALICE)).json()
    assert "security" not in open_document and {"bearer": []} in document["security"]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"] and "4XX" in operation["responses"], path
    body = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "cache_salt", "n", "kv_hints"} <= set(body)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": [10**30], "echo": True}, "prompt"),
        ("/v1/completions", {"prompt": [-1], "echo": True}, "prompt"),
        ("/v1/completions", {"prompt": [72] * 700_000, "echo": True}, "prompt"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"9" * 30: 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [10**30]}, "stop_token_ids"),
        ("/v1/completions", {"prompt": [[1], ["a"]]}, "prompt.1.0"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages.0.content.0.text",
        ),
    ],
)
def test_a_wrong_value_is_named_wherever_it_is(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    error = error_of(http.post(path, json={"max_tokens": 1, **fields}), 400)
    assert error["param"] == param


def test_more_values_than_ever_fit_are_no_matter_of_trying_again(embedded: st.Engine) -> None:
    with http_client(embedded, max_queued_requests=0) as http:
        error = error_of(http.post("/v1/embeddings", json={"input": ["x"] * 2048}), 400)
        assert "at most" in error["message"]
        assert http.post("/v1/embeddings", json={"input": "x"}).status_code == 200


def test_a_part_that_is_no_text_is_refused_by_its_type(http: httpx.Client) -> None:
    content = [{"type": "image", "source": {"type": "url", "url": "http://example.com"}}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    message = error_of(http.post("/v1/messages", json=body), 400)["message"]
    assert message.startswith("messages.0.content.0.type=") and 'reads "text" only' in message
