"""What the router shows of its replicas, over real engines."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from cluster_caches import is_right, texts_in
from cluster_threads import Cluster, clustered
from waiting import wait_until

import stemma as st
from stemma.frontend.client.backend import Backend

GEN: dict[str, Any] = {"temperature": 0.7, "ignore_eos": True}
SYSTEM = "You are a helpful agent of the house. "


@st.function
def agent(s: st.ProgramState, number: int) -> None:
    s += f"{SYSTEM}Task {number}: " + st.gen("a", max_tokens=6, **GEN)


def run(backend: Backend, count: int = 6) -> None:
    agent.run_batch([{"number": n} for n in range(count)], backend=backend)


def replicas(backend: Backend, **args: Any) -> list[dict[str, Any]]:
    return list(backend._channel.call("fleet", **args)["replicas"])


def sums(backend: Backend, method: str = "metrics") -> dict[str, int]:
    return dict(backend._channel.call(method)["stats"])


def num_bytes(texts: set[tuple[str, bytes]]) -> int:
    """Of a tree of these texts."""
    return len({(name, text[:end]) for name, text in texts for end in range(1, len(text) + 1)})


def test_one_tree_tells_what_each_replica_has(checkpoint: Path) -> None:
    with clustered(checkpoint, 2, "round_robin") as (cluster, backend):
        run(backend)
        wait_until(lambda: is_right(cluster))
        tree = backend.tree()
        assert tree["is_whole"] and [each["replica"] for each in tree["replicas"]] == [0, 1]
        assert tree["cached_tokens"] == sum(each["cached_tokens"] for each in tree["replicas"])
        shared = next(row for row in tree["nodes"] if row["text"].startswith(SYSTEM))
        assert set(shared["holders"]) == {"0", "1"}
        for number in (0, 1):
            held = [row for row in tree["nodes"] if str(number) in row["holders"]]
            assert sum(row["num_bytes"] for row in held) == num_bytes(texts_in(cluster, number))
            assert {row["parent"] for row in held} - {None} <= {row["id"] for row in held}
            alone = backend.tree(number)
            assert "replicas" not in alone and alone["nodes"][0]["lock_ref"] == 0
        assert len(backend._channel.call("tree", max_nodes=1)["nodes"]) == 2
        assert not backend._channel.call("tree", namespace="nobody's")["nodes"]
        with pytest.raises(st.StemmaError, match="max_nodes=-1"):
            backend._channel.call("tree", max_nodes=-1)
        backend.flush_cache()
        wait_until(lambda: not backend.tree()["nodes"])


def test_no_sum_falls_when_a_replica_is_lost_or_started_anew(checkpoint: Path) -> None:
    with clustered(checkpoint, 2, "round_robin") as (cluster, backend):
        before = dict.fromkeys(sums(backend), 0)
        for change in (lambda: None, lambda: cluster.kill(0), lambda: cluster.restart(1)):
            run(backend)
            seen = sums(backend)
            assert all(seen[name] >= count for name, count in before.items())
            change()
            away = sums(backend)
            assert all(away[name] >= count for name, count in seen.items())
            cluster.wait_ready()
            assert sums(backend, "info") == sums(backend)
            assert (
                sum(each["stats"]["num_steps"] for each in replicas(backend))
                == sums(backend)["num_steps"]
            )
            before = seen
        requests = backend._channel.call("metrics")["requests"]
        assert requests["num_ended"]["length"] == 18
        assert sum(requests["histograms"]["latency"]["counts"]) == 18


def test_what_became_of_programs_is_counted_by_replica(checkpoint: Path) -> None:
    with clustered(checkpoint, 2, "round_robin") as (cluster, backend):
        run(backend, 4)
        assert [each["programs"]["num_placed"] for each in replicas(backend)] == [2, 2]
        cluster.kill(0)
        cluster.wait_lost(0)
        cluster.wait_ready()
        first, second = replicas(backend)
        assert (first["num_losses"], first["num_restarts"], first["num_starts"]) == (1, 1, 2)
        assert (second["num_losses"], second["num_restarts"]) == (0, 0)
        cluster.restart(1)
        cluster.wait_ready()
        assert [each["num_restarts"] for each in replicas(backend)] == [1, 1]
        assert [each["num_losses"] for each in replicas(backend)] == [1, 0]


def test_programs_that_are_lost_are_rehoused_and_those_of_who_leaves_move(
    checkpoint: Path,
) -> None:
    with clustered(checkpoint, 2, "round_robin") as (cluster, backend):

        @st.function
        def waits(s: st.ProgramState) -> None:
            s += SYSTEM + st.gen("a", max_tokens=4, **GEN)
            s["a"]
            home = _home(cluster)
            cluster.kill(home)
            cluster.wait_lost(home)
            s += " And " + st.gen("b", max_tokens=4, **GEN)
            s["b"]
            cluster.wait_ready()
            cluster.restart(_home(cluster))
            s += " or " + st.gen("c", max_tokens=4, **GEN)

        waits.run(backend=backend)
        cluster.wait_ready()
        told = [each["programs"] for each in replicas(backend)]
        totals = {name: sum(each[name] for each in told) for name in told[0]}
        assert totals == {"num_placed": 3, "num_moved": 1, "num_lost": 1, "num_rehoused": 1}


def _home(cluster: Cluster) -> int:
    (home,) = (each.number for each in cluster.replicas if each.programs)
    return home


def test_a_replica_that_is_stopped_holds_up_no_answer(checkpoint: Path) -> None:
    with clustered(checkpoint, 2) as (cluster, backend):
        run(backend, 2)
        before = sums(backend)
        engine, may_go_on = cluster.engines[0], threading.Event()
        asked = engine.gateway._control._methods["info"]
        engine.gateway._control._methods["info"] = lambda: may_go_on.wait() and asked()
        told: list[dict[str, Any]] = []
        asker = threading.Thread(target=lambda: told.append(backend.get_server_info()))
        asker.start()
        try:
            wait_until(lambda: len(cluster.router._calls._asked) == 1)  # the other has answered
            assert replicas(backend, asks=False)[0]["state"] == "ready"
            engine.is_stopped = lambda: True  # type: ignore[method-assign]
            asker.join()
            with pytest.raises(st.EngineError, match=r"replica 0 .* its process is stopped"):
                backend.tree(0)
        finally:
            engine.is_stopped = lambda: False  # type: ignore[method-assign]
            may_go_on.set()
        first, second = told[0]["replicas"]
        assert (first["state"], second["state"]) == ("stopped", "ready")
        assert "free_tokens" not in first and "free_tokens" in second
        assert told[0]["stats"] == before
        wait_until(lambda: replicas(backend)[0]["state"] == "ready")


def test_the_fleet_is_told_of_while_no_replica_answers(checkpoint: Path) -> None:
    with clustered(checkpoint, 2) as (cluster, backend):
        run(backend, 2)
        before = sums(backend)["num_generated_tokens"]
        for replica in cluster.replicas:
            replica._start = _refuse(replica._start)
        for number in (0, 1):
            cluster.kill(number)
        wait_until(lambda: all(each["state"] == "lost" for each in replicas(backend)))
        told = replicas(backend)
        assert sum(each["stats"]["num_generated_tokens"] for each in told) == before
        assert all(each["why"] for each in told)
        with pytest.raises(st.EngineError, match="no replica is ready"):
            backend.tree()
        with pytest.raises(st.EngineError, match="replica 0 is not ready"):
            backend.tree(0)
        _refusals.clear()
        cluster.wait_ready()
        assert sums(backend)["num_generated_tokens"] == before


_refusals: set[int] = set()


def _refuse(start: Any) -> Any:
    """Cannot be started until `_refusals` is empty."""
    _refusals.add(id(start))

    def refused() -> Any:
        if id(start) in _refusals:
            raise OSError("not yet")
        return start()

    return refused
