"""A router over real engines: clients see what one engine says, whatever becomes of the engines."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_programs import GEN, said_by, story
from cluster_threads import Cluster, clustered
from engine_thread import serving
from waiting import PATIENCE_S, wait_until

import stemma as st
from stemma.cluster.placement.policies import PLACEMENTS
from stemma.cluster.replica import RoutedProgram
from stemma.frontend.client.backend import Backend
from stemma.frontend.protocol import wire
from stemma.frontend.protocol.program_log import MAX_LOST, ProgramLog


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The products are tiny: threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def truth(checkpoint: Path) -> list[str]:
    with serving(checkpoint, max_total_tokens=8192) as backend:
        return said_by(backend)


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> str:
    """What the story is."""
    with serving(checkpoint, max_total_tokens=8192) as backend:
        return str(story.run(seed=1, backend=backend)["a"])


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_programs_say_the_same_wherever_they_run(
    checkpoint: Path, truth: list[str], num_replicas: int, placement: str
) -> None:
    with clustered(checkpoint, num_replicas, placement) as (cluster, backend):
        assert said_by(backend) == truth
        assert sum(cluster.router.num_placed.values()) == len(truth)
        if placement == "round_robin":
            assert max(cluster.router.num_placed.values()) <= -(-len(truth) // num_replicas)


@pytest.mark.parametrize("seed", [0, 1, pytest.param(range(2, 200), marks=pytest.mark.slow)])
def test_programs_say_the_same_when_engines_are_killed_at_random(
    checkpoint: Path, truth: list[str], seed: int | range
) -> None:
    for number in [seed] if isinstance(seed, int) else seed:
        rng = random.Random(number)
        with clustered(checkpoint, rng.choice((2, 3))) as (cluster, backend):
            for _ in range(2):
                is_over = threading.Event()
                killer = threading.Thread(target=cluster.end_at_random, args=(rng, is_over))
                killer.start()
                try:
                    assert said_by(backend) == truth, number
                finally:
                    is_over.set()
                    killer.join()
            assert sum(replica.num_starts for replica in cluster.replicas) > len(cluster.replicas)


def test_engines_that_end_while_a_program_waits_or_goes_on_are_not_held_against_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stemma.cluster.replica.BACKOFF_S", (0.0,))

    @st.function
    def chat(s: st.ProgramState, cluster: Cluster | None) -> None:
        for turn in range(2):
            s += f"Turn {turn}: " + st.gen(f"t{turn}", max_tokens=9, **GEN)
            with s.pause(expected_s=0.0, label="user"):
                s[f"t{turn}"]
                for _ in range(MAX_LOST + 1 if cluster else 0):
                    [busy] = [replica.number for replica in cluster.replicas if replica.programs]
                    cluster.kill(busy)
                    cluster.wait_lost(busy)
                    cluster.wait_ready()

    with clustered(checkpoint) as (cluster, backend):
        truth = chat.run(None, seed=1, backend=backend).text()
        assert chat.run(cluster, seed=1, backend=backend).text() == truth


def test_programs_that_wait_go_where_there_is_less_to_do(checkpoint: Path) -> None:
    may_go_on = threading.Event()

    @st.function
    def chat(s: st.ProgramState, number: int) -> None:
        for turn in range(2):
            s += f"{number}, turn {turn}: " + st.gen(f"t{turn}", max_tokens=9, **GEN)
            with s.pause(expected_s=0.0, label="user"):
                s[f"t{turn}"]
                assert may_go_on.wait(PATIENCE_S)

    def say(backend: Backend) -> list[str]:
        states = chat.run_batch([{"number": n} for n in range(24)], seed=3, backend=backend)
        return [state.text() for state in states]

    may_go_on.set()
    with serving(checkpoint, max_total_tokens=8192) as backend:
        truth = say(backend)
    may_go_on.clear()
    with clustered(checkpoint) as (cluster, backend), ThreadPoolExecutor(1) as user:
        said = user.submit(say, backend)
        try:
            wait_until(lambda: sum(each.is_at_rest for each in programs_of(cluster)) == 24)
            cluster.restart(1)  # the other one has all of them now
            wait_until(lambda: len(cluster.replicas[1].programs) > 0)
        finally:
            may_go_on.set()
        assert said.result() == truth


def test_a_replica_that_dies_as_it_leaves_for_good_is_not_started_again(
    checkpoint: Path, whole: str
) -> None:
    with clustered(checkpoint) as (cluster, backend):
        parts = story.run(seed=1, backend=backend, stream=True).text_iter("a")
        text = next(parts)
        [busy] = [replica for replica in cluster.replicas if replica.programs]
        busy.leave(time.monotonic() + PATIENCE_S, for_good=True)
        cluster.kill(busy.number)
        assert text + "".join(parts) == whole
        assert busy not in cluster.replicas and len(cluster.replicas) == 1


def programs_of(cluster: Cluster) -> list[RoutedProgram]:
    return [each for replica in cluster.replicas for each in list(replica.programs.values())]


def test_engines_count_that_end_in_a_row_amid_a_call() -> None:
    log = ProgramLog({})
    log.lose(is_asked=False)
    assert log.num_lost == 0, "it had made no call"
    log.take([["gen", 0, 0, None, "a", {}], ["gen", 0, 1, None, "b", {}]])
    log.lose(is_asked=False)
    log.lose(is_asked=True)
    log.lose(is_asked=False)
    assert log.num_lost == 2
    log.pass_on(0, 0, wire.VALUE, {"value": "x", "kept": {"ids": [1], "text": "x"}})
    assert log.num_lost == 0
    log.lose(is_asked=False)
    log.pass_on(0, 1, wire.DELTA, "y")
    assert log.num_lost == 0


def test_a_stream_goes_on_where_it_was_when_its_engine_is_killed(
    checkpoint: Path, whole: str
) -> None:
    with clustered(checkpoint) as (cluster, backend):
        state = story.run(seed=1, backend=backend, stream=True)
        parts: list[str] = []
        for part in state.text_iter("a"):
            parts.append(part)
            if len(parts) in (5, 25):
                [busy] = [replica for replica in cluster.replicas if replica.programs]
                cluster.kill(busy.number)
                wait_until(lambda: not busy.programs)  # noqa: B023
        assert "".join(parts) == whole == state["a"]
        wait_until(lambda: sum(replica.num_starts for replica in cluster.replicas) == 4)


def test_tokens_and_logprobs_of_a_stream_come_once(checkpoint: Path) -> None:
    @st.function
    def story(s: st.ProgramState) -> None:
        s += "Once " + st.gen("a", max_tokens=60, logprobs=1, **GEN)

    with serving(checkpoint, max_total_tokens=8192) as backend:
        wanted = story.run(seed=1, backend=backend).get_meta_info("a")
    with clustered(checkpoint) as (cluster, backend):
        state = story.run(seed=1, backend=backend, stream=True)
        logprobs: list[Any] = []
        for index, _ in enumerate(state.text_iter("a")):
            if index == 10:
                busy = [replica for replica in cluster.replicas if replica.programs]
                cluster.kill(busy[0].number)
        logprobs = state.get_meta_info("a")["logprobs"]
        assert [entry["token_id"] for entry in logprobs] == wanted["output_ids"]


def test_a_branch_that_failed_and_went_on_does_so_elsewhere(checkpoint: Path) -> None:
    @st.function
    def tries(s: st.ProgramState, gate: Any) -> None:
        s += "One " + st.gen("a", max_tokens=5, **GEN)
        try:
            s += " two " + st.gen("bad", max_tokens=10_000, regex="(", **GEN)
            s["bad"]
        except st.ProgramError:
            pass
        gate(s["a"])
        s += " three " + st.gen("b", max_tokens=5, **GEN)

    with serving(checkpoint, max_total_tokens=8192) as backend:
        wanted = tries.run(gate=str, seed=2, backend=backend).text()
    with clustered(checkpoint) as (cluster, backend):

        def gate(_: str) -> None:
            (busy,) = [replica for replica in cluster.replicas if replica.programs]
            cluster.kill(busy.number)
            wait_until(lambda: not busy.programs)

        assert tries.run(gate=gate, seed=2, backend=backend).text() == wanted


def test_a_race_that_was_won_stays_so(checkpoint: Path) -> None:
    @st.function
    def race(s: st.ProgramState, gate: Any) -> None:
        s += "Go "
        runners = s.fork(3)
        runners += lambda i: f"{i} " + st.gen("x", max_tokens=30 - 12 * i, **GEN)
        runners.join(st.first(1, "concate_and_append"))
        gate(s.text())
        s += " end " + st.gen("y", max_tokens=5, **GEN)

    with clustered(checkpoint) as (cluster, backend):
        seen: list[str] = []

        def gate(text: str) -> None:
            seen.append(text)
            (busy,) = [replica for replica in cluster.replicas if replica.programs]
            cluster.kill(busy.number)
            wait_until(lambda: not busy.programs)

        assert race.run(gate=gate, seed=2, backend=backend).text().startswith(seen[0])


def test_a_race_whose_losers_had_ended_too_keeps_its_winner(checkpoint: Path) -> None:
    @st.function
    def race(s: st.ProgramState, gate: Any) -> None:
        s += "Go "
        runners = s.fork(3)
        runners += lambda i: f"{i} " + st.gen("x", max_tokens=30 - 12 * i, **GEN)
        for runner in runners:
            runner["x"]
        runners.join(st.first(1, "concate_and_append"))
        gate(s.text())
        s += " end " + st.gen("y", max_tokens=5, **GEN)

    with serving(checkpoint, max_total_tokens=8192) as backend:
        wanted = race.run(gate=str, seed=2, backend=backend).text()
    with clustered(checkpoint) as (cluster, backend):
        moved = race.run(gate=lambda _: move(cluster), seed=2, backend=backend)
        assert moved.text() == wanted


def test_samples_of_a_stream_stay_apart_and_failures_stay_failures(checkpoint: Path) -> None:
    @st.function
    def samples(s: st.ProgramState) -> None:
        s += "Some " + st.gen("x", n=3, max_tokens=60, **GEN)

    @st.function
    def lost(s: st.ProgramState, gate: Any) -> None:
        branches = s.fork(2)
        branches[0] += "a " + st.gen("x", max_tokens=4, **GEN)
        branches[1] += "b " + st.gen("x", max_tokens=4, regex="(")
        with pytest.raises(st.ProgramError):
            branches[1]["x"]
        gate(branches[0]["x"])
        branches.join()
        s += "end " + st.gen("y", max_tokens=4, **GEN)

    with serving(checkpoint, max_total_tokens=8192) as backend:
        wanted = samples.run(seed=4, backend=backend)["x"]
    with clustered(checkpoint) as (cluster, backend):
        state = samples.run(seed=4, backend=backend, stream=True)
        for index, _ in enumerate(state.text_iter("x")):
            if index == 15:
                move(cluster)
        assert state["x"] == wanted
        with pytest.raises(st.ProgramError, match="joined branch failed"):
            lost.run(gate=lambda _: move(cluster), backend=backend).text()


def move(cluster: Cluster) -> None:
    """Kill the engine that the one program runs on."""
    (busy,) = [replica for replica in cluster.replicas if replica.programs]
    before = busy.num_starts
    cluster.kill(busy.number)
    wait_until(lambda: busy.num_starts > before)
    cluster.wait_ready()


def test_programs_wait_where_no_engine_is_left_and_go_on_with_the_next(
    checkpoint: Path, truth: list[str]
) -> None:
    with clustered(checkpoint, 1) as (cluster, backend):
        killer = threading.Timer(0.05, cluster.kill, (0,))
        killer.start()
        assert said_by(backend) == truth
        killer.join()


def test_replicas_are_started_anew_one_by_one_under_load(
    checkpoint: Path, truth: list[str]
) -> None:
    with clustered(checkpoint, 2) as (cluster, backend):
        said: list[list[str]] = []
        user = threading.Thread(target=lambda: said.extend(said_by(backend) for _ in range(3)))
        user.start()
        for number in (0, 1):
            wait_until(lambda: any(replica.programs for replica in cluster.replicas))
            backend._channel.call("restart_replica", replica=number)
            cluster.wait_ready()
        user.join()
        assert said == [truth] * 3
        assert [replica.num_starts for replica in cluster.replicas] == [2, 2]
        with pytest.raises(st.InvalidRequest, match="replica=2"):
            backend._channel.call("restart_replica", replica=2)


def test_a_cancelled_program_is_cancelled_where_it_runs(checkpoint: Path) -> None:
    @st.function
    def long(s: st.ProgramState) -> None:
        s += "Long " + st.gen("a", max_tokens=300, **GEN)

    with clustered(checkpoint) as (cluster, backend):
        state = long.run(backend=backend, stream=True)
        next(state.text_iter("a"))
        del state
        wait_until(lambda: not any(replica.programs for replica in cluster.replicas))


def test_a_client_that_leaves_takes_its_programs_along(checkpoint: Path) -> None:
    @st.function
    def long(s: st.ProgramState) -> None:
        s += "Long " + st.gen("a", max_tokens=300, **GEN)

    with clustered(checkpoint) as (cluster, _):
        other = cluster.connect()
        states = [long.run(backend=other, stream=True) for _ in range(4)]
        for state in states:
            next(state.text_iter("a"))
        assert sum(len(replica.programs) for replica in cluster.replicas) == 4
        other.shutdown()
        wait_until(lambda: not any(replica.programs for replica in cluster.replicas))
        assert all(replica.load.num_calls == 0 for replica in cluster.replicas)


def test_what_is_asked_beside_programs_is_asked_of_all(checkpoint: Path) -> None:
    with clustered(checkpoint, max_total_tokens=1000) as (cluster, backend):
        said_by(backend, 4)
        info = backend.get_server_info()
        assert info["total_tokens"] == 2000 and info["vocab_size"] == 260
        assert [each["replica"] for each in info["replicas"]] == [0, 1]
        cached = info["total_tokens"] - info["free_tokens"]
        assert cached > 0 and backend.flush_cache() == cached
        call = backend._channel.call
        assert call("detokenize", ids=call("tokenize", text="Hello")) == "Hello"
        for number in (0, 1):
            assert "nodes" in call("tree", replica=number)
        with pytest.raises(st.InvalidRequest, match="replica=7"):
            call("tree", replica=7)
        with pytest.raises(st.EngineError, match="method="):
            call("nonsense")
        cluster.kill(0)
        assert call("metrics")["requests"]


def test_a_program_that_cannot_be_read_ends_and_harms_no_other(checkpoint: Path) -> None:
    with clustered(checkpoint) as (_, backend):
        connection: Any = backend._channel
        connection._queue("ops", programs=[{"program": 999, "ops": [["gen", 0]], "create": {}}])
        assert len(said_by(backend, 2)) == 2
