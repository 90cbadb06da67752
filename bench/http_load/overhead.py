"""What HTTP and ZeroMQ add to one request: a served engine against the same engine in this process.

Both hold the same model and take the same prompt, which is cached after the first. In this process
a request is tokenized, stepped to its end and made text, with no socket and no program around it.
The two take turns, so that what disturbs the machine disturbs both.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..runners.http_client import HttpClient
from ..step import Ignore
from .server import MeasuredServer

if TYPE_CHECKING:
    from ...runtime.engine import LoadedModel

PROMPT = "Once upon a time there was a small house by the sea, and in it"
LENGTHS = (1, 8, 64)  # max_tokens
TARGET_MS = 2.0


def measure(server: MeasuredServer, repeats: int) -> list[dict[str, Any]]:
    """A row a length: medians and their difference."""
    from ...runtime.config import EngineConfig
    from ...runtime.engine import LoadedModel
    from ...runtime.threads import configure_threads, default_num_threads

    config = EngineConfig()
    configure_threads(default_num_threads(config.model), config.spin_us)
    loaded, client = LoadedModel(config), HttpClient(server.url)
    return [
        _row(length, partial(_over_http, client), partial(_in_process, loaded), repeats)
        for length in LENGTHS
    ]


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


def _over_http(client: HttpClient, length: int) -> object:
    body = {"prompt": PROMPT, "max_tokens": length, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", body)["choices"][0]["text"]


def _in_process(loaded: LoadedModel, length: int) -> str:
    from ...runtime.request import Request
    from ...runtime.sampling_params import SamplingParams

    engine = loaded.engine
    prompt = array("i", loaded.tokenizer.encode(PROMPT))
    sampling = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
    request = Request(engine.next_request_id(), prompt, sampling, Ignore())
    engine.submit(request)
    while engine.has_work:
        engine.step()
    return loaded.tokenizer.decode(list(request.output_ids))
