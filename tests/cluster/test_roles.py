"""Replicas that compute long prompts for the others: programs run on the rest, whose output is that
of one engine, also when engines end and while roles change."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
from cluster_threads import Cluster, clustered
from engine_thread import serving
from waiting import wait_until

import stemma as st
from stemma.cluster.settings import ClusterSettings
from stemma.errors import InvalidRequest
from stemma.frontend.backend import Backend
from stemma.runtime.schedule.cache.coming_prefixes import ComingPrefixes

OPTIONS: dict[str, Any] = {
    "max_total_tokens": 8192, "max_model_len": None, "chunked_prefill_size": 256,
}  # fmt: skip
TEXT = "The quick brown fox jumps over the lazy dog. " * 12


@st.function
def story(s: st.ProgramState, number: int) -> None:
    s += f"Story {number}: " + TEXT
    s += st.gen("a", max_tokens=8, temperature=0.7, ignore_eos=True)
    s += " And then: "
    s += st.gen("b", max_tokens=8, temperature=0.7, ignore_eos=True)


def said_by(backend: Backend, first: int) -> list[Any]:
    arguments = [{"number": first + n} for n in range(8)]
    states = story.run_batch(arguments, seed=1, backend=backend)
    return [[s.get_meta_info(name)["output_ids"] for name in ("a", "b")] for s in states]


def endpoints(folder: Path, number: int) -> list[str]:
    return [f"ipc://{folder}/kv-{n}" for n in range(number)]


def set_role(cluster: Cluster, number: int, role: str) -> None:
    operator = cluster.connect()
    try:
        operator._channel.call("set_role", replica=number, role=role)
    finally:
        operator.shutdown()


@pytest.fixture(scope="module")
def truth(checkpoint: Path) -> list[list[Any]]:
    with serving(checkpoint, **OPTIONS) as alone:
        return [said_by(alone, 10 * each) for each in range(2)]


def have_found_each_other(cluster: Cluster) -> bool:
    found = [
        engine.loaded.engine.scheduler.kv_cache.coming.receiver.describe()["num_able_peers"]
        for number, engine in cluster.engines.items()
        if cluster.replicas[number].role == "decode"
    ]
    num_prefill = sum(each.role == "prefill" for each in cluster.replicas)
    return all(each == num_prefill for each in found)


def test_programs_run_on_decode_replicas_whose_prompts_others_compute(
    checkpoint: Path, tmp_path: Path, truth: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # It pays whatever times a busy machine measures: of a queue there, of a message.
    monkeypatch.setattr(ComingPrefixes, "_delay_s", lambda *_: 0.0)
    own = {"prefill_endpoints": endpoints(tmp_path, 2), "num_prefill": 1, **OPTIONS}
    with clustered(checkpoint, 2, **own) as (cluster, backend):
        wait_until(lambda: have_found_each_other(cluster))
        assert said_by(backend, 0) == truth[0]
        assert cluster.router.num_placed == {0: 8, 1: 0}
        told = backend.get_server_info()
        assert [each["role"] for each in told["replicas"]] == ["decode", "prefill"]
        assert told["coming"]["num_restored_tokens"] >= 8 * len(TEXT)
        assert told["stats"]["num_finished"] == 16, "a prompt for another engine is no call"
        set_role(cluster, 1, "decode")
        set_role(cluster, 0, "prefill")
        wait_until(lambda: have_found_each_other(cluster))
        assert said_by(backend, 10) == truth[1]
        assert cluster.router.num_placed == {0: 8, 1: 8}
        restored = cluster.engines[1].loaded.engine.scheduler.kv_cache.coming
        assert restored is not None and restored.num_restored_tokens >= len(TEXT)
        with pytest.raises(InvalidRequest, match="no other replica runs programs"):
            set_role(cluster, 1, "prefill")
        with pytest.raises(InvalidRequest, match="one of both, prefill, decode"):
            set_role(cluster, 0, "draft")
        cluster.restart(0)
        cluster.wait_ready()
        assert cluster.engines[0].loaded.role == "prefill", "its role is lost with its process"


@pytest.mark.parametrize("seed", range(2))
def test_engines_of_any_role_end_amid_programs(
    checkpoint: Path, tmp_path: Path, truth: list[list[Any]], seed: int
) -> None:
    own = {"prefill_endpoints": endpoints(tmp_path, 3), "num_prefill": 1, **OPTIONS}
    with clustered(checkpoint, 3, **own) as (cluster, backend):
        is_over = threading.Event()
        wait_until(lambda: have_found_each_other(cluster))
        rng = random.Random(seed)
        killer = threading.Thread(target=cluster.end_at_random, args=(rng, is_over))
        killer.start()
        try:
            assert [said_by(backend, 0), said_by(backend, 10)] == truth
        finally:
            is_over.set()
            killer.join()


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"replicas": 2, "prefill_replicas": 2}, "fewer than --replicas"),
        ({"replicas": 2, "prefill_replicas": 1, "max_replicas": 3}, "none with max_replicas"),
    ],
)
def test_prefill_replicas_that_cannot_be_are_refused(fields: dict[str, int], allowed: str) -> None:
    with pytest.raises(InvalidRequest, match=f"prefill_replicas=.*{allowed}"):
        ClusterSettings(**fields)
