"""The scripted server of OpenAI's API, as new for each test, and clients of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai_stand_in import StandIn, standing_in
from waiting import wait_until

import stemma as st
from stemma.frontend.openai import http_client


@pytest.fixture(scope="module")
def shared_server() -> Iterator[StandIn]:
    with standing_in() as state:
        yield state


@pytest.fixture
def server(shared_server: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The shared server as new, and no delays between attempts; it is left with nothing open."""
    fresh = StandIn(shared_server.url)
    vars(shared_server).update(vars(fresh))
    monkeypatch.setattr(http_client, "FIRST_DELAY_S", 0.001)
    yield shared_server
    wait_until(lambda: shared_server.num_open == 0)


@pytest.fixture
def connect(server: StandIn) -> Iterator[Callable[..., st.OpenAI]]:
    opened: list[st.OpenAI] = []

    def make(model: str = "some-chat", **options: Any) -> st.OpenAI:
        backend = st.OpenAI(model, base_url=server.url, **{"api_key": "key", **options})
        opened.append(backend)
        return backend

    yield make
    for backend in opened:
        backend.shutdown()
