"""Answers that are costly to write: other requests go on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from http_server import http_client, http_server
from waiting import PATIENCE_S

import stemma as st
from stemma.server.api.native import tokens
from stemma.server.api.openai.completions import TextReply
from stemma.server.protocol.json_route import LARGE_BYTES
from stemma.server.protocol.pieces import LOGPROBS_BYTES, Outcome


def test_the_server_answers_others_while_a_large_answer_is_written(
    embedded: st.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_writing, may_write = threading.Event(), threading.Event()
    whole = TextReply.whole

    def held(reply: TextReply, outcomes: Sequence[Outcome], hints: Any) -> dict[str, Any]:
        is_writing.set()
        assert may_write.wait(PATIENCE_S)
        return whole(reply, outcomes, hints)

    monkeypatch.setattr(TextReply, "whole", held)
    num_tokens = LARGE_BYTES // LOGPROBS_BYTES
    asked = {"prompt": "a", "max_tokens": num_tokens, "logprobs": 2, "ignore_eos": True}
    with http_server(embedded) as url, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(
            httpx.post, f"{url}/v1/completions", json=asked, timeout=2 * PATIENCE_S
        )
        assert is_writing.wait(PATIENCE_S)
        assert httpx.get(f"{url}/health", timeout=PATIENCE_S / 2).status_code == 200
        may_write.set()
        assert len(answer.result().json()["choices"][0]["logprobs"]["tokens"]) == num_tokens


def test_ids_are_written_in_slices_as_they_are_at_once(
    embedded: st.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"text": ["", "a", "The sea was calm."], "add_special_tokens": False}
    with http_client(embedded) as client:
        whole = client.post("/tokenize", json=asked).json()
        assert [len(ids) for ids in whole["tokens"]] == whole["count"]
        monkeypatch.setattr(tokens, "SLICE_TOKENS", 2)
        assert client.post("/tokenize", json=asked).json() == whole
