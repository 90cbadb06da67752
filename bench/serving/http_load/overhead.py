"""What HTTP and ZeroMQ add to one request: a served engine against the same engine in this process.

Both hold the same model and take the same prompt, which is cached after the first. In this process
the same program is carried out with no socket between. The two take turns, so that what disturbs
the machine disturbs both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ....frontend.protocol import ir, wire
from ..runners.http_client import HttpClient
from .server import MeasuredServer

PROMPT = "Once upon a time there was a small house by the sea, and in it"
LENGTHS = (1, 8, 64)  # max_tokens
TARGET_MS = 2.0


def measure(server: MeasuredServer, repeats: int) -> list[dict[str, Any]]:
    """A row per length: medians and their difference."""
    here, there = InProcess(), partial(_over_http, HttpClient(server.url))
    assert here.complete(8) == there(8), "they do not do the same"
    return [_row(length, there, here.complete, repeats) for length in LENGTHS]


def _row(
    length: int, over_http: Callable[[int], object], direct: Callable[[int], object], repeats: int
) -> dict[str, Any]:
    there, here = [], []
    for _ in range(repeats):
        here.append(_ms_of(direct, length))
        there.append(_ms_of(over_http, length))
    added = statistics.median(there) - statistics.median(here)
    return {
        "max_tokens": length,
        "in process, ms": statistics.median(here),
        "over HTTP, ms": statistics.median(there),
        "added p50, ms": added,
        "added least, ms": min(there) - min(here),
        "target, ms": TARGET_MS,
        "share of target": added / TARGET_MS,
    }


def _ms_of(request: Callable[[int], object], length: int) -> float:
    started = time.perf_counter()
    request(length)
    return (time.perf_counter() - started) * 1e3


def _over_http(client: HttpClient, length: int) -> str:
    body = {"prompt": PROMPT, "max_tokens": length, "temperature": 0, "ignore_eos": True}
    text: str = client.post("/v1/completions", body)["choices"][0]["text"]
    return text


class InProcess:
    """The engine in this process, running programs without a socket between."""

    def __init__(self) -> None:
        from ....runtime.config import EngineConfig
        from ....runtime.execute.threads import configure_threads, default_num_threads
        from ....runtime.loaded_model import LoadedModel

        config = EngineConfig()
        configure_threads(default_num_threads(Path(config.model)), config.spin_us)
        loaded = LoadedModel(config)
        self._engine = loaded.engine
        self._world = loaded.context()
        self._values: list[Any] = []

    def complete(self, length: int) -> str:
        """The text of a completion, as `over_http` returns it."""
        from ....runtime.programs.session import ProgramSession

        ready: list[ProgramSession] = []
        session = ProgramSession(
            self._world, self._emit, ready.append, seed=1, instance=0, is_streaming=False
        )
        params = ir.GenParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        ops = [ir.Text(0, 0, None, PROMPT), ir.Gen(0, 1, None, "completion", params)]
        session.receive(ops, end=True)
        session.advance()
        while self._engine.has_work:
            self._engine.step()
            while ready:
                ready.pop().advance()
        text: str = self._values.pop()["text"]
        return text

    def _emit(self, branch: int, seq: int, kind: str, payload: Any) -> None:
        if kind == wire.VALUE:
            self._values.append(payload)
