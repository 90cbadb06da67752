"""Tenants' shares of what several replicas serve, as numbers."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from cluster_threads import Cluster, clustered
from waiting import wait_until

import stemma as st
from stemma.cluster.__main__ import _router
from stemma.cluster.replica import Replica
from stemma.cluster.settings import ClusterSettings
from stemma.errors import StemmaError
from stemma.flags import add_flags, from_flags
from stemma.frontend.client.backend import Backend
from stemma.runtime.config import add_engine_flags
from stemma.runtime.programs.calls import GenCall
from stemma.runtime.sessions.process import parse, process_parser

GEN: dict[str, Any] = {"temperature": 0.7, "ignore_eos": True}
QUANTUM = 64  # as many tokens a row as there are on an engine of 128 rows, or fewer
NUM_ROWS = 8
NUM_TOKENS = 3000  # in which shares are counted


@st.function
def story(s: st.ProgramState, number: int) -> None:
    s += f"Story {number}: " + st.gen("a", max_tokens=200, **GEN)


def tell(backend: Backend, number: int) -> None:
    """As many stories at once; the test ends before they do."""
    with contextlib.suppress(StemmaError):
        story.run_batch([{"number": n} for n in range(number)], seed=1, backend=backend)


@pytest.fixture
def num_tokens(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Generated tokens by tenant, on all engines of this process."""
    counts: Counter[str] = Counter()
    lock, on_token = threading.Lock(), GenCall.on_token

    def counted(call: GenCall, request: Any, result: Any) -> Any:
        with lock:
            counts[request.program.tenant] += 1
        return on_token(call, request, result)

    monkeypatch.setattr(GenCall, "on_token", counted)
    return counts


@pytest.mark.parametrize("placement", ["program", "round_robin"])
def test_one_that_floods_two_replicas_has_no_more_than_another_that_wants_its_share(
    checkpoint: Path, num_tokens: Counter[str], placement: str
) -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        options = {"max_running_requests": NUM_ROWS, "max_total_tokens": 8192}
        with clustered(checkpoint, 2, placement, **options) as (cluster, _):
            shares = shares_beside_a_flood(cluster, num_tokens)
    finally:
        torch.set_num_threads(num_threads)
    assert 0.475 < shares < 0.525, f"{shares:.3f} of all tokens"


def shares_beside_a_flood(cluster: Cluster, num_tokens: Counter[str]) -> float:
    """What the one has that asks for less, of all tokens while both want more."""
    for engine in cluster.engines.values():
        engine.loaded.engine.scheduler.shares._quantum = QUANTUM
    flood, other = (cluster.connect(tenant=name) for name in ("flood", "other"))
    with ThreadPoolExecutor(2) as clients:
        try:
            clients.submit(tell, flood, 160)
            wait_until(lambda: num_tokens["flood"] > 100)
            clients.submit(tell, other, 32)
            wait_until(lambda: num_tokens["other"] > 100)
            before = num_tokens.copy()
            wait_until(lambda: num_tokens.total() - before.total() >= NUM_TOKENS)
            after = num_tokens - before
        finally:
            flood.shutdown()
            other.shutdown()
    return after["other"] / after.total()


def test_the_router_knows_what_tenants_weigh_that_its_engines_are_told() -> None:
    parser = process_parser("test", None)
    add_flags(parser, ClusterSettings)
    add_engine_flags(parser)
    flags = ["--endpoint", "inproc://none", "--replicas", "2", "--tenant-weights", "big=4"]
    args = parse(parser, flags)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    router = _router(args, from_flags(ClusterSettings, args), context)
    router.add(Replica(2, lambda: pytest.fail("it is not started"), context=context, connect_s=1.0))
    assert [each.load.weights for each in router._replicas] == [{"big": 4.0}] * 3
