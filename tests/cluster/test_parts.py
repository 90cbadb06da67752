"""Branches of one program on several replicas: it says what it says on one."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster_programs import GEN
from cluster_threads import Cluster, clustered
from engine_thread import serving
from waiting import PATIENCE_S, wait_until

import stemma as st
from stemma.cluster.placement.spread import ForkedWork, Home
from stemma.frontend.client.backend import Backend
from stemma.frontend.protocol import ir, wire
from stemma.frontend.protocol.program_log import MAX_LOST
from stemma.runtime.programs.session import ProgramSession


class RandomSpread:
    """Every branch anywhere."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.num_away = 0

    def __call__(self, work: ForkedWork, home: Home, others: Sequence[Home]) -> Sequence[Home]:
        assert work.prefix_tokens > 0 and len(work.rows) == len(work.prompt_tokens)
        chosen = [self.rng.choice((home, *others)) for _ in work.rows]
        self.num_away += sum(each is not home for each in chosen)
        return chosen


@pytest.fixture(autouse=True)
def no_refusal(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A part that an engine refuses goes on at home, which hides a defect of ours."""
    yield
    assert "is refused" not in caplog.text


@st.function
def planned(s: st.ProgramState, number: int) -> None:
    """All of it is one capture: forks behind a call, forks within forks, variables, joins."""
    s += f"Plan {number}: " + st.gen("plan", max_tokens=7, **GEN)
    drafts = s.fork(4)
    for i, draft in enumerate(drafts):
        draft += f" draft {i} " + st.gen("d", max_tokens=3 + 2 * i, **GEN)
        if i == 1:
            halves = draft.fork(2)
            halves += lambda j: f" half {j} " + st.gen("h", max_tokens=4 + j, **GEN)
            halves.join("concate_and_append")
            draft += " so " + st.select("s", ["yes", "no"])
        if i == 3:
            draft += " as " + drafts[2].var("d") + " says " + st.gen("e", max_tokens=4, **GEN)
    drafts.join("concate_and_append")
    s += " end " + st.gen("end", max_tokens=6, stop="e", **GEN)


@st.function
def watched(s: st.ProgramState, number: int) -> None:
    """Values are read in between, and a second fork rests on the first."""
    s += f"Watch {number}: "
    for turn in range(2):
        branches = s.fork(3)
        branches += lambda i: f" part {i} " + st.gen("a", max_tokens=5 + i, **GEN)
        said = [branch["a"] for branch in branches]
        branches[0] += " more " + st.gen("b", max_tokens=4, **GEN)
        branches.join("gather_variable")
        s += f" turn {turn} {said[1]} " + st.gen(f"t{turn}", max_tokens=5, **GEN)


@st.function
def caught(s: st.ProgramState, number: int) -> None:
    """Branches fail, and go on."""
    s += f"Try {number}: " + st.gen("a", max_tokens=4, **GEN)
    branches = s.fork(4)
    for i, branch in enumerate(branches):
        branch += f" part {i} " + st.gen("a", max_tokens=3, **GEN) + st.gen("bad", regex="(")
        with pytest.raises(st.ProgramError, match="not closed"):
            branch["bad"]
        branch += " then " + st.gen("b", max_tokens=4, **GEN)
    branches.join("concate_and_append")
    s += " end " + st.gen("end", max_tokens=4, **GEN)


def said_by(backend: Backend, num: int = 5) -> list[str]:
    numbers = [{"number": n} for n in range(num)]
    states = [
        *planned.run_batch(numbers, seed=5, backend=backend),
        *watched.run_batch(numbers, seed=6, backend=backend),
        *caught.run_batch(numbers, seed=7, backend=backend),
    ]
    return [state.text() for state in states]


@pytest.fixture(scope="module")
def truth(checkpoint: Path) -> list[str]:
    with serving(checkpoint, max_total_tokens=8192) as backend:
        return said_by(backend)


def all_away(work: ForkedWork, home: Home, others: Sequence[Home]) -> Sequence[Home]:
    return [others[0]] * len(work.rows)


@contextmanager
def spread_out(
    checkpoint: Path, seed: int, num_replicas: int = 2, **options: Any
) -> Iterator[tuple[Cluster, Backend, RandomSpread]]:
    spread = RandomSpread(seed)
    with clustered(checkpoint, num_replicas, spread=spread, **options) as (cluster, backend):
        yield cluster, backend, spread
        wait_until(lambda: not any(each.parts for each in cluster.replicas))
        assert all(each.load.num_calls == 0 for each in cluster.replicas)
        assert all(abs(each.load.expected_tokens) < 1e-6 for each in cluster.replicas)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_programs_say_the_same_wherever_their_branches_run(
    checkpoint: Path, truth: list[str], num_replicas: int
) -> None:
    with spread_out(checkpoint, num_replicas, num_replicas) as (_, backend, spread):
        assert said_by(backend) == truth
        assert spread.num_away > 20


@pytest.mark.parametrize("seed", [0, pytest.param(range(1, 100), marks=pytest.mark.slow)])
def test_programs_say_the_same_when_replicas_end_at_random(
    checkpoint: Path,
    truth: list[str],
    seed: int | range,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stemma.cluster.replica.BACKOFF_S", (0.0,))
    for number in [seed] if isinstance(seed, int) else seed:
        with spread_out(checkpoint, number, random.Random(number).choice((2, 3))) as spread:
            cluster, backend, _ = spread
            is_over = threading.Event()
            rng = random.Random(number)
            killer = threading.Thread(target=cluster.end_at_random, args=(rng, is_over))
            killer.start()
            try:
                assert said_by(backend) == truth, number
            finally:
                is_over.set()
                killer.join()


def test_streams_of_branches_come_whole(checkpoint: Path) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "Streams: "
        branches = s.fork(3)
        branches += lambda i: f" {i} " + st.gen("a", max_tokens=20 + i, **GEN)
        branches.join("concate_and_append")
        s += " end " + st.gen("b", max_tokens=6, **GEN)

    with serving(checkpoint, max_total_tokens=8192) as alone:
        whole = program.run(seed=4, backend=alone).text()
    with spread_out(checkpoint, 5) as (_, backend, spread):
        state = program.run(seed=4, backend=backend, stream=True)
        assert "".join(state.text_iter()) == state.text() == whole
        assert spread.num_away


def test_a_race_ends_with_enough_wherever_they_ran(checkpoint: Path) -> None:
    @st.function
    def race(s: st.ProgramState) -> None:
        s += "Race: "
        runners = s.fork(4)
        runners += lambda i: f"{i} " + st.gen("x", max_tokens=4 if i % 2 else 250, **GEN)
        runners.join(st.first(2, "concate_and_append"))
        s += " end " + st.gen("y", max_tokens=5, **GEN)

    with serving(checkpoint, max_total_tokens=8192) as alone:
        wanted = [race.run(seed=seed, backend=alone).text() for seed in range(3)]
    with spread_out(checkpoint, 1, 3) as (_, backend, spread):
        assert [race.run(seed=seed, backend=backend).text() for seed in range(3)] == wanted
        assert spread.num_away


def test_a_branch_that_fails_elsewhere_fails_its_join_and_no_other(checkpoint: Path) -> None:
    @st.function
    def program(s: st.ProgramState, bad: int) -> None:
        s += "Some: "
        branches = s.fork(4)
        for i, branch in enumerate(branches):
            limit = 10_000 if i == bad else 5
            branch += f" {i} " + st.gen("x", max_tokens=limit, regex="(" if i == bad else None)
        branches.join("concate_and_append")
        s += st.gen("y", max_tokens=4, **GEN)

    with spread_out(checkpoint, 3) as (_, backend, spread):
        for bad in range(4):
            with pytest.raises(st.ProgramError, match="a joined branch failed"):
                program.run(bad=bad, seed=1, backend=backend)
        assert spread.num_away


def test_a_program_has_used_what_its_parts_have(checkpoint: Path) -> None:
    with serving(checkpoint, max_total_tokens=8192) as alone:
        wanted = used_by(alone)
    with spread_out(checkpoint, 7) as (_, backend, spread):
        assert used_by(backend) == wanted
        assert spread.num_away


def used_by(backend: Backend) -> dict[str, int]:
    """What a program of three branches reports in the end."""
    params = ir.GenParams(max_tokens=5, ignore_eos=True)
    branches = (1, 2, 3)
    ops = [ir.Text(0, 0, None, "Used: "), ir.Fork(0, 1, None, branches)]
    for branch in branches:
        ops += [ir.Gen(branch, 0, None, "x", params), ir.End(branch, 1, None)]
    return carried_out(backend, [*ops, ir.Join(0, 2, None, branches)]).used


class Sink:
    """What becomes of a program."""

    def __init__(self) -> None:
        self.used: dict[str, int] = {}
        self.failures: list[dict[str, Any]] = []
        self.is_done = threading.Event()

    def handle_event(self, branch: int, seq: int, kind: str, payload: Any) -> None:
        if kind == wire.FAILED:
            self.failures.append(payload)
        elif kind == wire.DONE:
            self.used = payload
            self.is_done.set()

    def handle_disconnect(self, error: st.EngineError) -> None:
        raise AssertionError(error)


def carried_out(backend: Backend, ops: Sequence[ir.Op]) -> Sink:
    """The whole of a program, in one message."""
    sink, connection = Sink(), backend.connection
    program = connection.open_program(sink, {"seed": 3})
    for op in ops:
        connection.send_op(program, op)
    connection.flush(program, end=True)
    assert sink.is_done.wait(PATIENCE_S)
    return sink


@pytest.mark.parametrize("children", [(2, 5), (0, 5), (1, 5), (5, 5), (3,)])
def test_forks_of_what_exists_end_their_program_and_no_other(
    checkpoint: Path, children: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    params = ir.GenParams(max_tokens=5, ignore_eos=True)
    ops: list[ir.Op] = [ir.Text(0, 0, None, "Forks: "), ir.Fork(0, 1, None, (1, 2, 3))]
    for branch in (1, 2, 3):
        ops += [ir.Gen(branch, 0, None, "x", params), ir.Fork(branch, 1, None, children)]
        ops += [ir.Gen(branch, 2, None, "y", params)]
    ops += [ir.Gen(5, 0, None, "z", params), ir.Var(5, 1, None, 9, 9), ir.Join(0, 2, None, (1, 9))]
    with spread_out(checkpoint, 1) as (_, backend, spread):
        assert all(carried_out(backend, ops).failures for _ in range(4)) and spread.num_away
        assert said_by(backend, 1)
    caplog.clear()  # engines may refuse what breaks the rules


def test_a_client_that_leaves_ends_its_parts(checkpoint: Path) -> None:
    may_go_on = threading.Event()

    @st.function
    def waiting(s: st.ProgramState) -> None:
        s += "Long: "
        branches = s.fork(4)
        branches += lambda i: f" {i} " + st.gen("a", max_tokens=300, **GEN)
        branches[0]["a"]
        may_go_on.wait(PATIENCE_S)

    with spread_out(checkpoint, 0) as (cluster, backend, spread):
        other = cluster.connect()
        running = [waiting.run(seed=n, backend=other, stream=True) for n in range(3)]
        wait_until(lambda: any(each.parts for each in cluster.replicas))
        other.shutdown()
        wait_until(lambda: not any(each.parts for each in cluster.replicas))
        may_go_on.set()
        assert len(running) == 3 and spread.num_away
        assert said_by(backend, 1)


@pytest.fixture
def apart(checkpoint: Path) -> Iterator[tuple[Cluster, Backend]]:
    """Two replicas; all branches of a fork run on the other one."""
    with clustered(checkpoint, spread=all_away) as (cluster, backend):
        yield cluster, backend
        wait_until(lambda: not any(each.parts for each in cluster.replicas))


def test_a_branch_that_failed_elsewhere_goes_on_there(apart: tuple[Cluster, Backend]) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "Tries: "
        one, other = s.fork(2)
        one += " one " + st.gen("a", max_tokens=3, **GEN)
        other += " other " + st.gen("bad", max_tokens=5, regex="(")
        with pytest.raises(st.ProgramError):
            other["bad"]
        other += " again " + st.gen("good", max_tokens=5, **GEN)
        s += other.var("good") + st.gen("z", max_tokens=3, **GEN)
        s["z"]

    assert " again " not in program.run(seed=1, backend=apart[1]).text()


def test_what_is_known_is_not_computed_again_elsewhere(
    apart: tuple[Cluster, Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stemma.cluster.replica.BACKOFF_S", (0.0,))
    cluster, backend = apart
    may_go_on = threading.Event()

    @st.function
    def program(s: st.ProgramState) -> None:
        s += "Known: "
        branches = s.fork(2)
        branches += lambda i: f" {i} " + st.gen("x", n=2 - i, max_tokens=40, **GEN)
        for branch in branches:
            branch["x"]
        (home,) = [each for each in cluster.replicas if each.programs]
        cluster.kill(home.number)
        cluster.wait_lost(home.number)
        cluster.wait_ready()
        may_go_on.set()
        branches += st.gen("y", max_tokens=2, **GEN)
        branches.join("concate_and_append")

    before = {n: engine.loaded.engine for n, engine in cluster.engines.items()}
    program.run(seed=1, backend=backend)
    engines = {*before.values(), *(each.loaded.engine for each in cluster.engines.values())}
    made = sum(engine.scheduler.stats.num_generated_tokens for engine in engines)
    assert may_go_on.is_set() and made == 3 * 40 + 2 * 2


def test_one_loss_counts_once_however_many_parts(
    apart: tuple[Cluster, Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stemma.cluster.replica.BACKOFF_S", (0.0,))
    cluster, backend = apart

    @st.function
    def program(s: st.ProgramState) -> None:
        s += "Many: "
        every = [s.fork(2) for _ in range(MAX_LOST)]
        for branches in every:
            branches += st.gen("a", max_tokens=100, **GEN)
        s += st.gen("z", max_tokens=3, **GEN)
        s["z"]
        (away,) = [each for each in cluster.replicas if each.parts]
        cluster.kill(away.number)
        cluster.wait_lost(away.number)
        for branches in every:
            branches.join("concate_and_append")

    assert program.run(seed=1, backend=backend).text()


HOSTILE = {
    "a var of what never was": [
        ["text", 0, 0, None, "x"], ["fork", 0, 1, None, [5]], ["var", 5, 0, None, 5, -3],
        ["fork", 5, 1, None, [1, 2]], ["var", 5, 2, None, 5, -3], ["text", 5, 3, None, "a"],
    ],
    "ops out of order": [["text", 0, 0, None, "x"], ["fork", 0, 7, None, [1, 2]]],
    "a fork of another part's branch": [
        ["text", 0, 0, None, "x"], ["fork", 0, 1, None, [1, 2]], ["text", 1, 0, None, "a"],
        ["text", 2, 0, None, "a"], ["fork", 0, 2, None, [3, 4]], ["text", 3, 0, None, "a"],
        ["fork", 1, 1, None, [3, 9]], ["gen", 9, 0, None, "y", {"max_tokens": 3}],
    ],
    "joins without end": [
        ["text", 0, 0, None, "x"], ["fork", 0, 1, None, [1, 2]],
        ["join", 0, 2, None, [1, 1, 2, 7, 7], "gather_variable", 1],
        ["fork", 0, 3, None, [3, 4]], ["gen", 3, 0, None, "y", {"max_tokens": 3}],
    ],
}  # fmt: skip


@pytest.mark.parametrize("ops", HOSTILE.values(), ids=HOSTILE.keys())
def test_ops_that_break_the_rules_harm_only_their_program(
    apart: tuple[Cluster, Backend], ops: list[list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    cluster, backend = apart
    hostile = cluster.connect()
    sink, connection = Sink(), hostile.connection
    program = connection.open_program(sink, {"seed": 1})
    for op in ops:
        connection._outbox.add(program, wire.encode_op(op))
    connection.flush(program, end=True)
    assert sink.is_done.wait(PATIENCE_S)
    operator = cluster.connect()
    operator.connection.call("restart_replica", replica=0)
    wait_until(lambda: cluster.replicas[0].num_starts == 2)
    cluster.wait_ready()
    assert said_by(backend, 1)
    for each in (hostile, operator):
        each.shutdown()
    caplog.clear()  # engines may refuse what breaks the rules


def test_what_is_given_must_be_what_can_be_passed_on(apart: tuple[Cluster, Backend]) -> None:
    cluster, backend = apart
    hostile = cluster.connect()
    sink, connection = Sink(), hostile.connection
    program = connection.open_program(sink, {"seed": 1})
    deep = b"[" * 600 + b"]" * 600
    connection._outbox.give(program, b'[[0,0,{"ids":[],"text":"","x":%b}]]' % deep)
    connection._outbox.add(program, b'["gen",0,0,null,"y",{"max_tokens":3}]')
    connection.flush(program, end=True)
    assert sink.is_done.wait(PATIENCE_S)
    assert sink.failures[0]["kind"] == "InvalidProgram"
    assert said_by(backend, 1)
    hostile.shutdown()


def test_who_has_lost_a_race_stops_though_others_beside_it_go_on(checkpoint: Path) -> None:
    """All of it was sent before: what still runs of a part is told by its number alone."""

    @st.function
    def race(s: st.ProgramState) -> None:
        s += "Race: "
        runners = s.fork(3)
        runners += lambda i: f"{i} " + st.gen("r", max_tokens=(3, 900, 900)[i], **GEN)
        runners[:2].join(st.first(1))
        runners[2:].join()

    long = {"max_model_len": 1000, "max_total_tokens": 8192}
    with clustered(checkpoint, spread=all_away, **long) as (cluster, run):
        race.run(seed=1, backend=run)
        num_made = [
            engine.loaded.engine.describe()["stats"]["num_generated_tokens"]
            for engine in cluster.engines.values()
        ]
        assert 903 <= max(num_made) < 1500, num_made
        assert min(num_made) == 0


def test_hints_of_branches_are_carried_out_where_these_run(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @st.function
    def hinted(s: st.ProgramState) -> None:
        s += "Hints: " + st.gen("a", max_tokens=3, **GEN)
        branches = s.fork(2)
        for branch in branches:
            branch += " on " + st.gen("b", max_tokens=4, **GEN)
            branch.pin(ttl_s=1)
            branch += " and " + st.gen("c", max_tokens=4, **GEN)
        branches.join("concate_and_append")
        s.pin(ttl_s=1)

    done: list[tuple[ProgramSession, int]] = []
    carried_out = ProgramSession._hinted

    def noted(session: ProgramSession, branch: Any, op: Any) -> Any:
        done.append((session, branch.number))
        return carried_out(session, branch, op)

    with serving(checkpoint, max_total_tokens=8192) as alone:
        wanted = hinted.run(seed=1, backend=alone).text()
    monkeypatch.setattr(ProgramSession, "_hinted", noted)
    with clustered(checkpoint, spread=all_away) as (_, backend):
        assert hinted.run(seed=1, backend=backend).text() == wanted
    assert sorted(number for _, number in done) == [0, 1, 2]
    sessions = {number: session for session, number in done}
    assert sessions[1] is sessions[2] is not sessions[0]
