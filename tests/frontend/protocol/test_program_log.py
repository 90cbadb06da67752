"""What a program's log makes of failures after which a branch goes on."""

from __future__ import annotations

import random
from typing import Any

import pytest

from stemma.frontend.protocol import wire
from stemma.frontend.protocol.program_log import ProgramLog

ROLES = ("role_begin", "role_end")


def fail(log: ProgramLog, seq: int) -> None:
    log.pass_on(0, seq, wire.FAILED, {"message": "no", "kind": "EngineError"})


def resumed(ops: list[list[Any]], first: int, *, drops_message: bool) -> list[list[Any]]:
    """The rule, op by op: what failed is gone, and so may be the message that was open then."""
    roles = [op for op in ops[:first] if op[0] in ROLES]
    if drops_message and roles and roles[-1][0] == "role_begin":
        first = roles[-1][2]
    return ops[:first] + [_undone(op) for op in ops[first:]]


def _undone(op: list[Any]) -> list[Any]:
    if op[0] == "resume":
        return ["pause", 0, op[2], None, None, ""]
    return op if op[0] in ("hint", "pause") else ["text", 0, op[2], None, ""]


@pytest.mark.parametrize("seed", range(50))
def test_a_branch_goes_on_as_if_what_failed_had_never_been(seed: int) -> None:
    rng, log = random.Random(seed), ProgramLog({})
    ops: list[list[Any]] = []
    for _ in range(8):
        kinds = rng.choices(["text", "gen", "hint", *ROLES], k=rng.randrange(1, 5))
        fresh = [[kind, 0, len(ops) + i, None, "x"] for i, kind in enumerate(kinds)]
        log.take(fresh)
        ops += fresh
        first = rng.randrange(ops.index(fresh[0]), len(ops))
        fail(log, first)
        drops_message = rng.random() < 0.6
        resume = ["resume", 0, len(ops), None, drops_message]
        log.take([resume])
        ops = resumed([*ops, resume], first, drops_message=drops_message)
        assert log.ops == ops


def test_what_a_gen_probably_will_say_is_passed_on_until_it_is_known() -> None:
    log = ProgramLog({})
    log.take([["gen", 0, 0, None, "x", {}]])
    guess = {"text": "yes", "chance": 0.5}
    assert log.pass_on(0, 0, wire.LIKELY, guess) == guess
    value = {"value": "no", "text": "no", "kept": {"ids": [1], "text": "no"}}
    assert log.pass_on(0, 0, wire.VALUE, dict(value)) is not None, "it was not taken for the value"
    assert log.pass_on(0, 0, wire.LIKELY, guess) is None, "by another engine, of what is known"


def test_going_on_costs_what_failed_and_not_all_that_was_said_before() -> None:
    looks: list[object] = []

    class Ops(list[list[Any]]):
        def __getitem__(self, index: Any) -> Any:
            looks.append(index)
            return super().__getitem__(index)

    log = ProgramLog({})
    log.take([["text", 0, seq, None, "x"] for seq in range(10_000)])
    log.take([["gen", 0, 10_000, None, "a", {}]])
    log.ops = Ops(log.ops)
    fail(log, 10_000)
    log.take([["resume", 0, 10_001, None, True]])
    assert len(looks) < 20 and not log.open_calls
