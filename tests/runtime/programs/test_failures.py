"""Programs of which something fails: what says so, and what is left alone; driven by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fakes import FakeQueue
from program_harness import (
    ProgramHarness,
    end,
    fork,
    gen,
    join,
    role,
    role_end,
    select,
    text,
    var,
)

from stemma.errors import InvalidProgram
from stemma.frontend.protocol import ir, wire
from stemma.frontend.protocol.interpreter import MAX_ERROR_CHARS


def test_a_failed_op_names_itself_and_its_source_line(harness: ProgramHarness) -> None:
    harness.on(0, text("q"), gen("x", source="a.py:3", temperature=-1.0), end=True)
    (failure,) = harness.events.of(wire.FAILED)
    assert failure[:2] == (0, 1)
    assert failure[2]["op"] == "x" and failure[2]["source"] == "a.py:3"
    assert failure[2]["kind"] == "InvalidRequest"
    assert "temperature=-1.0 is not allowed" in failure[2]["message"]
    assert harness.is_done


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": -1}, {"max_tokens": "5"}, {"temperature": "hot"}, {"top_p": 0.0},
        {"top_p": []}, {"top_k": 0}, {"seed": -1}, {"seed": 1.5}, {"stop": "abc"}, {"stop": ("",)},
        {"stop": (1,)}, {"stop_token_ids": 5}, {"stop_token_ids": ("a",)}, {"stop_token_ids": "ab"},
        {"logprobs": 1000}, {"logprobs": True}, {"ignore_eos": "no"}, {"ignore_eos": []},
        {"priority": 1001}, {"priority": 0.5}, {"priority": True},
        {"min_p": 2}, {"frequency_penalty": -3}, {"presence_penalty": "x"}, {"min_tokens": 10**6},
        {"repetition_penalty": 0}, {"logit_bias": 5}, {"logit_bias": ((1, 2, 3),)},
        {"logit_bias": ((1, 500.0),)}, {"n": 0}, {"n": 65}, {"n": "2"}, {"n": True}, {"n": 2.0},
    ],
    ids=str,
)  # fmt: skip
def test_senseless_parameters_fail_the_op_and_nothing_else(
    harness: ProgramHarness, params: dict[str, Any]
) -> None:
    harness.on(0, text("q"), lambda b, s: ir.Gen(b, s, None, "x", ir.GenParams(**params)), end=True)
    (name,) = params
    assert f"{name}=" in harness.failures[0] and harness.is_done


def test_a_priority_reaches_the_request(harness: ProgramHarness) -> None:
    harness.on(0, text("q"), gen("x", priority=-7))
    assert isinstance(harness.queue, FakeQueue)
    assert [request.priority for request in harness.queue.open] == [-7]
    harness.generate("a")
    harness.on(0, gen("y"), end=True)
    assert [request.priority for request in harness.queue.open] == [0]


def test_a_failed_branch_fails_its_join_and_spares_its_siblings(harness: ProgramHarness) -> None:
    ops = harness.ops(0, text("q"), fork(1, 2), join(1, 2), gen("after"))
    for child in (1, 2):
        ops += harness.ops(child, gen(f"v{child}", source=f"c{child}.py:9"), end())
    harness.send(*ops, end=True)
    assert isinstance(harness.queue, FakeQueue)
    harness.queue.fail(harness.queue.open[0], "boom")
    harness.generate("fine")
    assert harness.values == {(2, 0): "fine"}
    assert harness.failures[1] == "boom"
    assert harness.failures[0] == "a joined branch failed: v1: boom (at c1.py:9)"
    assert harness.is_done


def test_branches_of_a_fork_that_never_came_fail_with_its_cause(harness: ProgramHarness) -> None:
    ops = harness.ops(0, text("q"), gen("x", source="root.py:1"), fork(1))
    ops += harness.ops(1, fork(2), gen("y"))
    ops += harness.ops(2, gen("z"))
    harness.send(*ops)
    assert isinstance(harness.queue, FakeQueue)
    harness.queue.fail(harness.queue.open[0], "boom")
    harness.session.advance()
    expected = "the branch it forks from failed: x: boom (at root.py:1)"
    assert harness.failures == {0: "boom", 1: expected, 2: expected}
    late = harness.ops(1, fork(3)) + harness.ops(3, gen("w"))
    harness.send(*late, end=True)
    assert harness.failures[3] == expected, "also a fork that is sent after the failure"
    assert harness.is_done


def test_a_var_of_a_failed_branch_fails(harness: ProgramHarness) -> None:
    ops = harness.ops(0, text("q"), fork(1, 2))
    ops += harness.ops(1, var(2, 0), gen())
    ops += harness.ops(2, gen("x"))
    harness.send(*ops, end=True)
    assert isinstance(harness.queue, FakeQueue)
    harness.queue.fail(harness.queue.open[0], "boom")
    harness.session.advance()
    assert harness.failures[1] == "the value it appends was never made: x: boom"
    assert harness.is_done


def test_very_deep_forks_fail_without_recursion_or_endless_messages(
    harness: ProgramHarness,
) -> None:
    """Branch i forks branch i + 1, and joins it; branch 0 fails before it begins."""
    depth = 3000
    ops = harness.ops(0, text("q"), gen("x"), fork(1), join(1))
    for branch in range(1, depth):
        ops += harness.ops(branch, fork(branch + 1), join(branch + 1), end())
    ops += harness.ops(depth, gen(), end())
    random.Random(1).shuffle(ops)
    ops.sort(key=lambda op: op.seq)
    harness.send(*ops, end=True)
    assert isinstance(harness.queue, FakeQueue)
    harness.queue.fail(harness.queue.open[0], "boom")
    harness.session.advance()
    assert len(harness.failures) == depth + 1 and harness.is_done
    assert max(map(len, harness.failures.values())) < 200


def test_errors_that_quote_each_other_stay_short(harness: ProgramHarness) -> None:
    """The same chain, but the innermost branch fails: each join quotes the one below."""
    depth = 300
    ops = harness.ops(0, text("q"), fork(1), join(1))
    for branch in range(1, depth):
        ops += harness.ops(branch, fork(branch + 1), join(branch + 1), end())
    ops += harness.ops(depth, gen("x"), end())
    harness.send(*ops, end=True)
    assert isinstance(harness.queue, FakeQueue)
    harness.queue.fail(harness.queue.open[0], "boom")
    harness.session.advance()
    assert len(harness.failures) == depth + 1 and harness.is_done
    assert max(map(len, harness.failures.values())) <= MAX_ERROR_CHARS


STUCK: list[tuple[str, Callable[[ProgramHarness], Sequence[ir.Op]]]] = [
    ("a var of an op that never comes", lambda s: s.ops(0, text("q"), var(0, 9), gen())),
    ("a var of a branch that never comes", lambda s: s.ops(0, text("q"), var(5, 0))),
    ("a join of a branch that never ends", lambda s: s.ops(0, fork(1), join(1))),
    ("a join of itself", lambda s: s.ops(0, text("q"), join(0))),
    ("a branch that is never forked", lambda s: s.ops(4, text("q"), gen())),
    (
        "two branches that wait for each other",
        lambda s: [*s.ops(0, fork(1, 2)), *s.ops(1, var(2, 0)), *s.ops(2, var(1, 0))],
    ),
]


@pytest.mark.parametrize("make", [make for _, make in STUCK], ids=[name for name, _ in STUCK])
def test_a_stuck_program_fails_rather_than_hangs(
    harness: ProgramHarness, make: Callable[[ProgramHarness], Sequence[ir.Op]]
) -> None:
    harness.send(*make(harness))
    assert not harness.is_done and not harness.failures, "more ops could still come"
    harness.send(end=True)
    assert harness.is_done
    assert "it waits for something that never comes" in harness.failures.values()


WRONG: list[tuple[str, Callable[[ProgramHarness], Sequence[ir.Op]]]] = [
    ("already forked", lambda s: s.ops(0, text("q"), fork(1), fork(1))),
    ("its own child", lambda s: s.ops(0, text("q"), fork(0))),
    ("after its end", lambda s: s.ops(0, text("q"), end(), gen())),
    ("a role in a role", lambda s: s.ops(0, role("user"), role("user"))),
    ("no open role", lambda s: s.ops(0, text("q"), role_end())),
]


@pytest.mark.parametrize("make", [make for _, make in WRONG], ids=[name for name, _ in WRONG])
def test_a_wrong_op_fails_its_branch(
    harness: ProgramHarness, make: Callable[[ProgramHarness], Sequence[ir.Op]]
) -> None:
    harness.send(*make(harness), end=True)
    (failure,) = [item for item in harness.events.of(wire.FAILED) if item[0] == 0]
    assert failure[2]["kind"] == "InvalidProgram" and harness.is_done


@pytest.mark.parametrize("seq", [1, 5])
def test_ops_out_of_order_are_refused(harness: ProgramHarness, seq: int) -> None:
    with pytest.raises(InvalidProgram, match=f"seq={seq} is not allowed; allowed: 0 on 0"):
        harness.session.receive([ir.Text(0, seq, None, "a")], end=False)


def test_rejecting_a_program_aborts_its_calls_and_ends_it(harness: ProgramHarness) -> None:
    harness.on(0, text("q"), gen())
    harness.session.reject(InvalidProgram("senseless"))
    assert harness.failures == {0: "senseless"} and harness.is_done
    assert isinstance(harness.queue, FakeQueue)
    assert not harness.queue.open and harness.queue.ended == [harness.session.record]


def test_the_scheduler_hears_once_of_a_programs_end(harness: ProgramHarness) -> None:
    assert isinstance(harness.queue, FakeQueue)
    harness.on(0, text("q"), gen())
    harness.send(end=True)
    assert not harness.queue.ended
    harness.generate("a")
    assert harness.is_done and harness.queue.ended == [harness.session.record]
    harness.session.cancel()
    assert len(harness.queue.ended) == 1


def test_a_cancelled_program_aborts_its_calls_and_says_nothing_more(
    harness: ProgramHarness,
) -> None:
    ops = harness.ops(0, text("q"), fork(1, 2), gen())
    for child in (1, 2):
        ops += harness.ops(child, select("a", "b"))
    harness.send(*ops)
    assert isinstance(harness.queue, FakeQueue)
    assert len(harness.queue.open) == 5
    harness.session.cancel()
    harness.session.advance()
    assert not harness.queue.open and not harness.events.items
