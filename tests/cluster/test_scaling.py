"""More replicas when there is more to do for long enough, fewer when there is less."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster_threads import clustered
from waiting import PATIENCE_S, wait_until

import stemma as st
from stemma.cluster.scaling import FleetLoad, Scaler
from stemma.cluster.settings import ClusterSettings
from stemma.errors import InvalidRequest


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("load", "wanted"),
    [
        (FleetLoad(0, 0.0, 8.0, 1000.0), 1),
        (FleetLoad(17, 0.0, 8.0, 1000.0), 3),
        (FleetLoad(2, 2000.0, 8.0, 1000.0), 3),
        (FleetLoad(2, 2000.0, 8.0, 0.0), 1),
    ],
)
def test_the_queue_counts_and_the_working_set(load: FleetLoad, wanted: int) -> None:
    assert load.num_wanted() == wanted


def test_it_follows_what_was_wanted_all_the_time() -> None:
    clock = Clock()
    scaler = Scaler(1, 4, up_s=30.0, down_s=600.0, clock=clock)
    decided = []
    for time_s, num_calls in ((0, 40), (10, 24), (29, 40), (30, 40), (31, 9), (200, 17), (640, 1)):
        clock.now_s = time_s
        num_replicas = decided[-1] if decided else 1
        decided.append(scaler.decide(num_replicas, FleetLoad(num_calls, 0.0, 8.0, 0.0)))
    assert decided == [1, 1, 1, 3, 3, 3, 3], "3 were wanted at 200 s"
    clock.now_s = 1239
    assert scaler.decide(3, FleetLoad(1, 0.0, 8.0, 0.0)) == 3
    clock.now_s = 1240
    assert scaler.decide(3, FleetLoad(1, 0.0, 8.0, 0.0)) == 1


def test_what_was_wanted_before_the_last_change_counts_no_more() -> None:
    """Else a fleet that grew to two could not grow to three, nor one of two shrink."""
    clock = Clock()
    scaler = Scaler(1, 3, up_s=0.0, down_s=10.0, clock=clock)
    assert scaler.decide(1, wants(2)) == 2
    assert scaler.decide(2, wants(3)) == 3
    assert scaler.decide(3, wants(2)) == 3
    clock.now_s = 11.0
    assert scaler.decide(3, wants(1)) == 2
    clock.now_s = 12.0
    assert scaler.decide(2, wants(1)) == 2
    clock.now_s = 23.0
    assert scaler.decide(2, wants(1)) == 1


def wants(num: int) -> FleetLoad:
    return FleetLoad(8 * num, 0.0, 8.0, 0.0)


def test_replicas_come_with_the_load_and_leave_with_it(checkpoint: Path) -> None:
    may_end = threading.Event()

    @st.function
    def agent(s: st.ProgramState, number: int) -> None:
        s += f"Agent {number} is told much. " * 5 + st.gen("a", max_tokens=9, ignore_eos=True)
        with s.pause(expected_s=0.0, label="tool"):
            s["a"]
            assert may_end.wait(PATIENCE_S)
        s += " and " + st.gen("b", max_tokens=9, ignore_eos=True)

    def say() -> list[str]:
        states = agent.run_batch([{"number": n} for n in range(8)], seed=3, backend=backend)
        return [state.text() for state in states]

    scaler = Scaler(1, 3, up_s=0.0, down_s=0.0)
    with clustered(checkpoint, 1, scaler=scaler, max_total_tokens=512) as (cluster, backend):
        may_end.set()
        truth = say()
        may_end.clear()
        with ThreadPoolExecutor(1) as user:
            said = user.submit(say)
            try:
                wait_until(lambda: len(cluster.replicas) == 3)
                cluster.wait_ready()
            finally:
                may_end.set()
            assert said.result() == truth
        wait_until(lambda: len(cluster.replicas) == 1)
        assert say() == truth


def test_bounds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_replicas=2 is not allowed; allowed: --replicas"):
        ClusterSettings(replicas=3, max_replicas=2)
    with pytest.raises(InvalidRequest, match="max_replicas=2"):
        ClusterSettings(engines=("ipc:///x",), max_replicas=2)
