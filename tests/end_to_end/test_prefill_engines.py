"""Prefill and decode apart: nothing is lost and nothing leaks when either is killed, and what is
said is what one engine says. What is killed is a process of its own."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from engine_thread import engine_in_thread, serving
from nixl_worker import skip_without_nixl
from waiting import wait_until

import stemma as st
from stemma.frontend.backend import Backend
from stemma.runtime.memory.peers.kv_receiver import KVReceiver

OPTIONS: dict[str, Any] = {"dtype": "float64", "max_total_tokens": 16384, "num_threads": 1}
TEXT = "The quick brown fox jumps over the lazy dog. " * 30
NUM_BATCHES = 3


@st.function
def story(s: st.ProgramState, number: int) -> None:
    s += f"Story {number}: " + TEXT
    s += st.gen("a", max_tokens=8, temperature=0.7, ignore_eos=True)


def said_by(backend: Backend, first: int) -> list[Any]:
    """Of four stories that nobody has read before."""
    arguments = [{"number": first + n} for n in range(4)]
    states = story.run_batch(arguments, seed=1, backend=backend)
    return [s.get_meta_info("a")["output_ids"] for s in states]


def told(backend: Backend) -> dict[str, Any]:
    return dict(backend.get_server_info())


def assert_nothing_held(backend: Backend, of: str) -> None:
    """No stream is left, nor memory of one; no page is lost."""
    wait_until(lambda: not told(backend)[of].get("num_held_requests"))
    wait_until(lambda: not told(backend)[of].get("num_requests"))
    info = told(backend)
    assert not info[of].get("num_bytes_held") and not info[of].get("num_coming")
    backend.flush_cache()
    info = told(backend)
    assert info["free_tokens"] == info["total_tokens"]


@pytest.fixture(scope="module")
def truth(checkpoint: Path) -> list[list[Any]]:
    with serving(checkpoint, max_total_tokens=16384, max_model_len=None) as alone:
        return [said_by(alone, 10 * each) for each in range(NUM_BATCHES)]


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/kv"


@pytest.fixture
def engines(checkpoint: Path) -> Iterator[Any]:
    """Starts engines in processes, that end with the test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(st.Engine(checkpoint, **OPTIONS | options))


@pytest.fixture
def in_threads(checkpoint: Path) -> Iterator[Any]:
    """Starts engines that end with the test and are not killed."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(
            engine_in_thread(checkpoint, **OPTIONS | options)
        )


def kill(engine: st.Engine) -> None:
    os.kill(engine.pid, signal.SIGKILL)


@pytest.mark.parametrize("transport", ["auto", "zmq", "nixl"])
def test_prefill_engines_are_killed_and_nobody_notices(
    engines: Any,
    in_threads: Any,
    endpoint: str,
    truth: list[list[Any]],
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first before a stream has begun, the second once a part of one has come, of many that
    its small steps send; the next one listens at the same place."""
    if transport == "nixl":
        skip_without_nixl()
    doomed: dict[str, st.Engine] = {}

    def before(moment: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def killing(*args: Any) -> Any:
            if (engine := doomed.pop(moment, None)) is not None:
                kill(engine)
            return method(*args)

        return killing

    monkeypatch.setattr(KVReceiver, "ask", before("stream", KVReceiver.ask))
    monkeypatch.setattr(KVReceiver, "_write", before("piece", KVReceiver._write))
    decode = in_threads(role="decode", prefill_engines=[endpoint], kv_transport=transport)
    for number, moment in enumerate(["stream", "piece", None]):
        prefill = engines(
            role="prefill",
            prefill_endpoint=endpoint,
            kv_transport=transport,
            chunked_prefill_size=64,
        )
        wait_until(lambda: told(decode)["coming"]["num_able_peers"] == 1)
        num_failed = told(decode)["coming"]["num_failed"]
        if moment is not None:
            doomed[moment] = prefill
        assert said_by(decode, 10 * number) == truth[number]
        assert not doomed
        assert moment is None or told(decode)["coming"]["num_failed"] > num_failed
    assert_nothing_held(prefill, "prefills")
    coming = told(decode)["coming"]
    assert (coming["num_written_bytes"] > 0) == (transport != "zmq")
    assert_nothing_held(decode, "coming")


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({"tp_size": 2}, {}),
        ({}, {"tp_size": 2}),
        ({"pp_size": 2, "page_size": 16}, {"cp_size": 2}),
        ({"cp_size": 2}, {"pp_size": 2, "tp_size": 2}),
    ],
    ids=str,
)
def test_engines_that_are_divided_otherwise_compute_for_each_other(
    in_threads: Any,
    endpoint: str,
    truth: list[list[Any]],
    there: dict[str, int],
    here: dict[str, int],
) -> None:
    """All of the KV goes from engine to engine, which divides it as it does its own."""
    prefill = in_threads(role="prefill", prefill_endpoint=endpoint, **there)
    decode = in_threads(role="decode", prefill_engines=[endpoint], **here)
    wait_until(lambda: told(decode)["coming"]["num_able_peers"] == 1)
    assert said_by(decode, 0) == truth[0]
    assert told(decode)["coming"]["num_restored_tokens"] > 0
    assert told(decode)["coming"]["num_failed"] == 0
    assert_nothing_held(prefill, "prefills")
    assert_nothing_held(decode, "coming")


def test_a_decode_engine_is_killed_and_its_prefills_end(
    engines: Any, in_threads: Any, endpoint: str, truth: list[list[Any]]
) -> None:
    prefill = in_threads(role="prefill", prefill_endpoint=endpoint)
    decode = engines(role="decode", prefill_engines=[endpoint])
    wait_until(lambda: told(decode)["coming"]["num_able_peers"] == 1)

    def be_lost() -> None:
        with pytest.raises(st.StemmaError):
            for first in count(100, 10):  # however fast it is, it is killed amid work
                said_by(decode, first)

    def sends() -> bool:
        prefills = told(prefill)["prefills"]
        return bool(prefills["num_sent_bytes"] and prefills["num_streams"])

    doomed = threading.Thread(target=be_lost)
    doomed.start()
    wait_until(sends)
    kill(decode)
    doomed.join()
    assert_nothing_held(prefill, "prefills")
    again = in_threads(role="decode", prefill_engines=[endpoint])
    wait_until(lambda: told(again)["coming"]["num_able_peers"] == 1)
    assert said_by(again, 0) == truth[0]
    assert told(again)["coming"]["num_failed"] == 0
