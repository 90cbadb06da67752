"""Exactness of whole programs: pauses, hints, leases, tiers and policies change nothing they say.

In float64 through the reference kernels, agents with pauses and forks run together in pools that
hold them all or a third of them; each says the same ids in all of these.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

import stemma as st
from stemma.frontend.client.backend import Backend
from stemma.frontend.client.client import Connection
from stemma.runtime.config import EngineConfig
from stemma.runtime.engine import LoadedModel
from stemma.runtime.gateway.gateway import Gateway

NUM_AGENTS = 6
NAMES = ("t0", "t1", "t2", "last")
ROOMY, TIGHT = 4096, 420  # tokens; an agent ends with about 170, of which 40 are everybody's
GEN: dict[str, Any] = {"temperature": 0.7, "ignore_eos": True, "max_tokens": 7}


@st.function
def agent(s: st.ProgramState, number: int, hints: bool) -> None:
    """Three turns with a tool between them, then two drafts, one of which is used."""
    s += "You have one tool and answer in a word. "
    if hints:
        s.pin(ttl_s=5)
    for turn in range(3):
        s += f"Agent {number}, turn {turn}: " + st.gen(f"t{turn}", **GEN)
        with s.pause(expected_s=0.01 * (number % 3), label="tool"):
            s.sync()
        if hints and turn == 0:
            s.retain(priority=number)
            s.demote()
        if hints and turn == 1:
            s.prefetch()
            s.share()
    drafts = s.fork(2)
    drafts += lambda i: f"draft {i} " + st.gen("draft", **GEN)
    drafts.join()
    s += "end " + st.gen("last", **GEN)


@contextmanager
def serving(checkpoint: Path, **options: Any) -> Iterator[Backend]:
    """A gateway in a thread of this process."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    config = EngineConfig(
        model=checkpoint, dtype="float64", kernels="reference", max_model_len=400, **options
    )
    loaded = LoadedModel(config)
    gateway = Gateway(loaded, ["inproc://programs"], context=context)
    thread = threading.Thread(target=gateway.run, daemon=True)
    thread.start()
    backend = Backend(Connection("inproc://programs", context=context))
    try:
        yield backend
        loaded.engine.flush_cache()
        kv_cache = loaded.engine.scheduler.kv_cache
        assert kv_cache.allocator.num_free == kv_cache.num_pages, "a page was lost"
    finally:
        backend.shutdown()
        gateway.stop()
        thread.join(10)
        assert not thread.is_alive()


def said_by(backend: Backend, *, hints: bool = False) -> list[list[Any]]:
    """All ids that each agent has generated; its drafts at the end."""
    instances = [{"number": i, "hints": hints} for i in range(NUM_AGENTS)]
    states = agent.run_batch(instances, seed=3, backend=backend)
    said = []
    for state in states:
        metas = [state.get_meta_info(name) for name in NAMES] + state.get_meta_info("draft")
        said.append([meta["output_ids"] for meta in metas])
    return said


@pytest.fixture(scope="module")
def truth(checkpoint: Path) -> Iterator[list[list[Any]]]:
    """With room for all, first come, first served, nothing leased."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    plain = {"schedule_policy": "fcfs", "disable_leases": True}
    with serving(checkpoint, max_total_tokens=ROOMY, **plain) as backend:
        yield said_by(backend)
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("hints", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"max_total_tokens": ROOMY},
        {"max_total_tokens": TIGHT},
        {"max_total_tokens": TIGHT, "schedule_policy": "lpm", "disable_leases": True},
        {"max_total_tokens": TIGHT, "host_kv_tokens": ROOMY, "chunked_prefill_size": 32},
        {"max_total_tokens": 432, "page_size": 16, "host_kv_tokens": 512},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
def test_programs_say_the_same_with_any_leases_hints_tiers_and_policies(
    checkpoint: Path, truth: list[list[Any]], options: dict[str, Any], hints: bool
) -> None:
    with serving(checkpoint, **options) as backend:
        assert said_by(backend, hints=hints) == truth


def test_programs_say_the_same_with_a_store_and_after_a_restart(
    checkpoint: Path, truth: list[list[Any]], tmp_path: Path
) -> None:
    for _ in range(2):
        with serving(checkpoint, max_total_tokens=ROOMY, kv_store=tmp_path) as backend:
            assert said_by(backend, hints=True) == truth
