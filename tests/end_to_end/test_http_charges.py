"""What a key is charged: the prompt and what was generated, once, however a request ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import http_server

import stemma as st
from stemma.server.access.api_keys import file_entry, new_key
from stemma.server.access.rates import KeyUsage

ALICE = new_key()
HEADERS = {"authorization": f"Bearer {ALICE}"}
LONG = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
WAIT_S = 60.0  # for what must come


@pytest.fixture
def charges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every charge, as it is made."""
    made: list[int] = []
    charge = KeyUsage.charge

    def spy(usage: KeyUsage, num_tokens: int, now_s: float) -> None:
        charge(usage, num_tokens, now_s)
        made.append(num_tokens)

    monkeypatch.setattr(KeyUsage, "charge", spy)
    return made


@pytest.fixture(scope="module")
def url(embedded: st.Engine) -> Iterator[str]:
    with http_server(embedded, api_key=(ALICE,)) as address:
        yield address


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, headers=HEADERS, timeout=WAIT_S)


def generated(engine: st.Engine) -> int:
    """Tokens that all requests were given, since the engine started."""
    return int(engine.get_server_info()["stats"]["num_generated_tokens"])


def idle(engine: st.Engine) -> bool:
    return engine.connection.call("vitals")["num_programs"] == 0


def hang_up_in_a_stream(url: str, num_events: int = 20, **fields: Any) -> None:
    body = {**LONG, "stream": True, **fields}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, headers=HEADERS, timeout=WAIT_S
    ) as reply:
        assert reply.status_code == 200, reply.read()
        lines = reply.iter_lines()
        for _ in range(num_events):
            next(lines)


@pytest.mark.parametrize("n", [1, 4])
def test_an_answer_is_charged_once_with_its_prompt(url: str, charges: list[int], n: int) -> None:
    reply = post(url, "/v1/completions", **{**LONG, "max_tokens": 5}, n=n)
    usage = reply.json()["usage"]
    assert usage["completion_tokens"] == 5 * n
    assert charges == [usage["total_tokens"]]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_that_hangs_up_is_charged_for_what_was_generated(
    embedded: st.Engine, url: str, charges: list[int], n: int
) -> None:
    prompt = len(post(url, "/tokenize", prompt=LONG["prompt"]).json()["tokens"])
    before = generated(embedded)
    hang_up_in_a_stream(url, n=n)
    wait_until(lambda: idle(embedded) and bool(charges))
    assert charges == [prompt + generated(embedded) - before]
    assert charges[0] < 1500 * n


def test_an_answer_that_nobody_waits_for_is_charged(
    embedded: st.Engine, url: str, charges: list[int]
) -> None:
    before = generated(embedded)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=LONG, headers=HEADERS, timeout=0.3)
    wait_until(lambda: idle(embedded) and bool(charges))
    (charge,) = charges
    assert 0 < charge - (generated(embedded) - before) < 20, "and the prompt"


def test_an_aborted_request_is_charged_for_its_output_so_far(
    embedded: st.Engine, url: str, charges: list[int]
) -> None:
    answers: list[httpx.Response] = []
    ask = threading.Thread(
        target=lambda: answers.append(post(url, "/v1/completions", **LONG, rid="mine"))
    )
    ask.start()
    wait_until(lambda: post(url, "/abort", rid="mine").json().get("aborted") == 1)
    ask.join(WAIT_S)
    assert charges == [answers[0].json()["usage"]["total_tokens"]]


def test_a_request_that_runs_out_of_time_is_charged(
    embedded: st.Engine, url: str, charges: list[int]
) -> None:
    before = generated(embedded)
    headers = {**HEADERS, "x-request-timeout-s": "0.4"}
    reply = httpx.post(f"{url}/v1/completions", json=LONG, headers=headers, timeout=WAIT_S)
    assert reply.status_code in (200, 503)
    wait_until(lambda: idle(embedded))
    if generated(embedded) == before:  # it was refused at once
        assert not charges or charges == [0]
    else:
        wait_until(lambda: bool(charges))
        assert charges[0] >= generated(embedded) - before > 0


def test_values_are_charged_by_their_prompts(url: str, charges: list[int]) -> None:
    usage = post(url, "/v1/embeddings", input=["a b c", "d"]).json()["usage"]
    assert sum(charges) == usage["total_tokens"] and len(charges) == 2


def test_what_is_refused_is_free(url: str, charges: list[int]) -> None:
    assert post(url, "/v1/completions", **{**LONG, "temperature": -1}).status_code == 400
    assert post(url, "/v1/completions", **{**LONG, "prompt": "word " * 9000}).status_code == 400
    assert sum(charges) == 0


def test_a_limit_of_tokens_holds_for_who_hangs_up(
    embedded: st.Engine, tmp_path: Path, charges: list[int]
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(file_entry("alice", ALICE) + "tokens_per_minute = 20\n")
    with http_server(embedded, api_keys=str(path)) as url:
        hang_up_in_a_stream(url, num_events=80)  # 40 with text, each of a token at least
        wait_until(lambda: sum(charges) >= 40)
        reply = post(url, "/v1/completions", prompt="x", max_tokens=1)
        assert reply.status_code == 429, reply.text
        assert "20 tokens a minute" in reply.json()["error"]["message"]
        assert int(reply.headers["retry-after"]) > 30
