"""What clients call the history of a call, from their requests to those of the scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_thread import serving
from http_server import http_server

import stemma as st
from stemma.frontend.client.backend import Backend
from stemma.runtime.programs.call_factory import CallFactory
from stemma.runtime.schedule.request import Request
from stemma.server.access.api_keys import file_entry, new_key

ALICE, BOB = new_key(), new_key()
HELLO = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
FORMAT = {"type": "json_object"}


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Backend]:
    with serving(checkpoint) as backend:
        yield backend


@pytest.fixture(scope="module")
def url(engine: Backend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(file_entry("alice", ALICE) + file_entry("bob", BOB))
    with http_server(engine, api_keys=str(path)) as url:
        yield url


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """All requests that the engine's scheduler gets."""
    requests: list[Request] = []
    submit = CallFactory._submit

    def note(self: CallFactory, call: Any, given: Any) -> None:
        requests.extend(given)
        submit(self, call, given)

    monkeypatch.setattr(CallFactory, "_submit", note)
    return requests


@pytest.fixture
def ask(url: str, submitted: list[Request]) -> Any:
    def ask(path: str, body: dict[str, Any], key: str = ALICE) -> Request:
        headers = {"authorization": f"Bearer {key}"}
        reply = httpx.post(f"{url}/v1/{path}", json=body, headers=headers, timeout=120)
        assert reply.status_code == 200, reply.text
        return submitted[-1]

    return ask


@pytest.mark.parametrize("field", ["session_id", "prompt_cache_key"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", HELLO),
        ("completions", {"prompt": "Hi", "max_tokens": 1}),
        ("responses", {"input": "Hi", "max_output_tokens": 1}),
    ],
)
def test_a_name_is_a_history_of_its_key(
    ask: Any, field: str, path: str, body: dict[str, Any]
) -> None:
    named = [ask(path, {**body, field: "first"}).history for _ in range(2)]
    others = [
        ask(path, body).history,
        ask(path, {**body, field: "second"}).history,
        ask(path, {**body, field: "first", "cache_salt": "salt"}).history,
        ask(path, {**body, field: "first"}, BOB).history,
        ask(path, body, BOB).history,
    ]
    assert named[0] == named[1] and len({named[0], *others}) == 6
    assert not any("first" in str(part) for part in named[0]), "only a digest travels"


def test_a_session_goes_before_a_cache_key(ask: Any) -> None:
    session = ask("chat/completions", {**HELLO, "session_id": "s"}).history
    both = {**HELLO, "session_id": "s", "prompt_cache_key": "k"}
    assert ask("chat/completions", both).history == session


@pytest.mark.parametrize("field", ["session_id", "prompt_cache_key"])
def test_a_name_that_is_no_short_text_is_refused(url: str, field: str) -> None:
    headers = {"authorization": f"Bearer {ALICE}"}
    for value in (3, ["a"], "x" * 1025):
        body = {**HELLO, field: value}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == field


def test_calls_are_alike_by_their_system_message_tools_and_form(ask: Any) -> None:
    def chat(**fields: Any) -> object:
        return ask("chat/completions", {**HELLO, **fields}).op_key

    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    told = [{"role": "system", "content": "Be brief."}, *HELLO["messages"]]  # type: ignore[misc]
    asked = [told[0], {"role": "user", "content": "Something else"}]
    assert chat() is None
    assert chat(messages=told) == chat(messages=asked) is not None
    keys = [
        chat(messages=told),
        chat(response_format=FORMAT),
        chat(tools=tools, tool_choice="required"),
    ]
    keys.append(ask("completions", {"prompt": "a", "max_tokens": 1, "regex": "a"}).op_key)
    assert None not in keys and len(set(keys)) == len(keys)
    assert ask("completions", {"prompt": "Hi", "max_tokens": 1}).op_key is None


def test_a_programs_ops_are_known_by_their_lines(engine: Backend, submitted: list[Request]) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        for _ in range(2):
            s += "Q" + st.gen("a", max_tokens=1)
        s += st.gen("a", max_tokens=1)

    program.run(backend=engine)
    program.run(backend=engine)
    keys = [request.op_key for request in submitted]
    assert keys == [keys[0], keys[0], keys[2]] * 2 and keys[0] != keys[2]
    assert all(__file__ in key[0] and key[1] == "a" for key in keys)  # type: ignore[index]
    assert len({request.history for request in submitted}) == 1
