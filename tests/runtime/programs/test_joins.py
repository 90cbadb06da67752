"""Joins of the first k branches, and branches that nobody reads."""

from __future__ import annotations

import copy
import time
from dataclasses import replace

import pytest
from program_stage import Stage, drop, end, fork, gen, join, text, var

from stemma.frontend.protocol import wire
from stemma.runtime.programs import session as session_module
from stemma.runtime.programs.branch import Branch
from stemma.runtime.programs.context import World


def three_tips(stage: Stage, *, first: int | None, mode: str = "gather_variable") -> None:
    """A fork of three gens, joined, and a gen behind the join."""
    stage.on(0, text("a"), fork(1, 2, 3))
    for branch in (1, 2, 3):
        stage.on(branch, text(str(branch)), gen("tip"), end())
    stage.on(0, join(1, 2, 3, mode=mode, first=first), gen("after"), end=True)


def kinds_of_failures(stage: Stage) -> dict[int, str]:
    return {branch: payload["kind"] for branch, _, payload in stage.events.of(wire.FAILED)}


def test_a_join_of_the_first_two_goes_on_with_them_and_stops_the_third(stage: Stage) -> None:
    three_tips(stage, first=2)
    stage.generate("C", index=2)
    assert len(stage.prompts) == 2
    stage.generate("A", index=0)
    assert stage.prompts == ["a"], "the loser has stopped, and the parent goes on"
    assert stage.values[0, 2] == [0, 2]
    assert kinds_of_failures(stage) == {2: "Stopped"}
    stage.generate("!")
    assert stage.is_done


def test_only_the_winners_are_appended(stage: Stage) -> None:
    three_tips(stage, first=1, mode="concate_and_append")
    stage.generate("B", index=1)
    assert stage.prompts == ["a2B"] and stage.values[0, 2] == [1]


def test_a_join_of_the_first_survives_failures_while_enough_are_left(stage: Stage) -> None:
    three_tips(stage, first=2)
    stage.queue.fail(stage.queue.open[0], "lost")
    stage.session.advance()
    assert len(stage.prompts) == 2
    stage.generate("B")
    stage.generate("C")
    assert stage.values[0, 2] == [1, 2] and kinds_of_failures(stage) == {1: "EngineError"}


def test_a_join_fails_once_too_few_are_left(stage: Stage) -> None:
    three_tips(stage, first=2)
    for _ in range(2):
        stage.queue.fail(stage.queue.open[0], "lost")
        stage.session.advance()
    assert "2 of 3 branches are needed, 2 failed: tip: lost" in stage.failures[0]


def test_what_only_a_dropped_branch_needs_stops_with_it(stage: Stage) -> None:
    stage.on(0, text("a"), fork(1, 2))
    stage.on(1, gen("slow"))
    stage.on(2, var(1, 0))
    stage.on(1, drop())
    assert stage.prompts == ["a"], "its value is still wanted"
    stage.on(2, drop())
    assert not stage.prompts and kinds_of_failures(stage) == {1: "Stopped", 2: "Stopped"}
    stage.on(0, gen("more"), end=True)
    stage.generate("A")
    assert stage.is_done


def test_the_branches_that_a_dropped_one_would_have_joined_stop_with_it(stage: Stage) -> None:
    stage.on(0, text("a"), fork(1, 2))
    stage.on(1, fork(3, 4))
    for branch in (3, 4):
        stage.on(branch, gen("slow"), end())
    stage.on(1, join(3, 4), gen("after"))
    stage.on(2, var(4, 0))
    stage.on(1, drop())
    assert stage.prompts == ["a"], "the value of one is wanted by another branch"
    stage.generate("B")
    assert stage.values[2, 0] == "B"
    assert kinds_of_failures(stage) == {1: "Stopped", 3: "Stopped", 4: "Stopped"}


def test_what_a_failed_branch_needed_is_free_to_be_dropped(stage: Stage) -> None:
    stage.on(0, text("a"), fork(1, 2))
    stage.on(1, gen("slow"))
    stage.on(2, gen("quick"), var(1, 0))
    stage.on(1, drop())
    stage.queue.fail(stage.queue.open[1], "lost")
    stage.session.advance()
    assert not stage.prompts and kinds_of_failures(stage) == {2: "EngineError", 1: "Stopped"}


def test_a_dropped_branch_that_only_a_stuck_one_waits_for_stops_with_that(stage: Stage) -> None:
    stage.on(0, text("a"), fork(1, 2))
    stage.on(1, var(2, 9))
    stage.on(2, var(1, 9))
    stage.on(2, drop(), end=True)
    assert stage.is_done
    assert kinds_of_failures(stage) == {1: "InvalidProgram", 2: "Stopped"}


def test_a_loser_may_have_any_number_of_forks_within_forks(stage: Stage) -> None:
    stage.on(0, text("a"), fork(1, 2))
    stage.on(1, gen("quick"), end())
    stage.on(2, gen("slow"), fork(3))
    for branch in range(3, 2000):
        stage.on(branch, fork(branch + 1))
    stage.on(0, join(1, 2, first=1), end=True)
    stage.generate("A")
    assert stage.is_done and len(kinds_of_failures(stage)) == 1999


def test_a_loser_that_was_never_forked_stops_nobody_else(stage: Stage) -> None:
    stage.on(0, text("a"), fork(1, 2))
    stage.on(1, text("b"), end())
    stage.on(2, gen("apart"))
    stage.on(0, join(1, 7, first=1), gen("after"), end=True)
    assert stage.prompts == ["a", "a"] and kinds_of_failures(stage) == {7: "Stopped"}


def test_stopping_many_losers_takes_time_in_proportion(stage: Stage) -> None:
    losers = range(2, 6000)
    stage.on(0, text("a"), fork(1, *losers))
    stage.on(1, gen("quick"), end())
    for branch in losers:
        stage.on(branch, var(0, 99))
    stage.on(0, join(1, *losers, first=1), gen("after"))
    start = time.perf_counter()
    stage.generate("A")
    assert time.perf_counter() - start < 2.0, "of 0.1 s; what grows with the square takes 10 s"
    assert len(kinds_of_failures(stage)) == len(losers) and stage.prompts == ["a"]


def test_the_losers_forks_stop_too(stage: Stage) -> None:
    stage.on(0, text("a"), fork(1, 2))
    stage.on(1, gen("quick"), end())
    stage.on(2, fork(3, 4))
    stage.on(3, gen("slow"))
    stage.on(4, gen("slow"), fork(5))
    stage.on(0, join(1, 2, first=1), end=True)
    stage.generate("A")
    assert not stage.prompts and stage.is_done
    assert kinds_of_failures(stage) == dict.fromkeys((2, 3, 4, 5), "Stopped")


def test_a_dropped_branch_stops_at_once(stage: Stage) -> None:
    stage.on(0, text("a"), fork(1, 2))
    stage.on(1, gen("x"), gen("y"))
    stage.on(2, gen("x"))
    stage.on(1, drop())
    assert len(stage.prompts) == 1 and kinds_of_failures(stage) == {1: "Stopped"}
    stage.generate("B")
    stage.on(0, gen("z"), end=True)
    stage.generate("Z")
    assert stage.is_done


def test_a_dropped_branch_goes_on_while_somebody_needs_its_value(stage: Stage) -> None:
    stage.on(0, text("a"), fork(1))
    stage.on(1, gen("x"), gen("y"))
    stage.on(0, var(1, 0), gen("z"))
    stage.on(1, drop())
    assert stage.prompts == ["a"]
    stage.generate("X")
    assert stage.prompts == ["aX"], "its second gen stopped when the first was there"
    assert kinds_of_failures(stage) == {1: "Stopped"}


def test_a_dropped_branch_goes_on_until_its_children_have_begun(stage: Stage) -> None:
    stage.on(0, text("a"), fork(1))
    stage.on(1, gen("x"), fork(2), gen("y"))
    stage.on(2, gen("z"))
    stage.on(1, drop())
    stage.generate("X")
    assert stage.prompts == ["aX"] and kinds_of_failures(stage) == {1: "Stopped"}


def test_dropping_parent_and_child_stops_both(stage: Stage) -> None:
    stage.on(0, text("a"), fork(1))
    stage.on(1, gen("x"), fork(2), gen("y"))
    stage.on(2, gen("z"), drop())
    stage.on(1, drop())
    assert not stage.prompts


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_joined_branch_is_not_dropped_by_a_drop(stage: Stage, first: int) -> None:
    """The client's object may be collected while the join is still under way."""
    stage.on(0, text("a"), fork(1, 2, 3))
    for branch in (1, 2, 3):
        stage.on(branch, gen("tip"))
    stage.on(0, join(1, 2, 3, first=first))
    for branch in (1, 2, 3):
        stage.on(branch, drop())
    assert len(stage.prompts) == 3
    for _ in range(first):
        stage.generate("t")
    assert len(stage.values[0, 2]) == first


def test_a_branch_that_was_never_forked_fails_from_its_first_op_on(stage: Stage) -> None:
    stage.on(0, text("a"), text("b"), gen("x"), fork(1))
    stage.on(1, gen("y"))
    stage.queue.fail(stage.queue.open[0], "lost")
    stage.session.advance()
    (failed,) = [(seq, p) for branch, seq, p in stage.events.of(wire.FAILED) if branch == 1]
    assert failed[0] == 0 and "lost" in failed[1]["message"]


def test_branches_forked_from_nothing_are_joined_without_their_bos(world: World) -> None:
    tokenizer = copy.copy(world.tokenizer)
    tokenizer.bos_ids = (256,)
    stage = Stage(replace(world, tokenizer=tokenizer))
    stage.on(0, fork(1, 2))
    for branch in (1, 2):
        stage.on(branch, text(str(branch)), end())
    stage.on(0, join(1, 2, mode="concate_and_append"), gen("x"))
    assert list(stage.queue.open[0].prompt) == [256, *b"12"]


def test_the_first_failure_fails_the_join_at_once(stage: Stage) -> None:
    three_tips(stage, first=None)
    stage.queue.fail(stage.queue.open[1], "lost")
    stage.session.advance()
    assert "a joined branch failed" in stage.failures[0]
    assert not stage.prompts and stage.is_done, "the client says no more: nobody reads the others"


def test_siblings_of_a_failed_branch_go_on_while_the_client_may_read_them(stage: Stage) -> None:
    stage.on(0, text("a"), fork(1, 2))
    for branch in (1, 2):
        stage.on(branch, gen("tip"), end())
    stage.on(0, join(1, 2))
    stage.queue.fail(stage.queue.open[0], "lost")
    stage.session.advance()
    assert "a joined branch failed" in stage.failures[0] and len(stage.prompts) == 1
    stage.send(end=True)
    assert not stage.prompts and stage.is_done


def test_forks_of_a_long_prefix_are_bounded(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_FORKED_TOKENS", 100)
    stage.on(0, text("a" * 30), fork(1, 2, 3))
    stage.on(0, fork(4))
    assert "120 tokens together; at most 100" in stage.failures[0]


def test_a_text_that_fits_no_prompt_is_refused_before_it_is_tokenized(world: World) -> None:
    stage = Stage(replace(world, max_text_chars=10))
    stage.on(0, text("a" * 11), gen())
    assert "a text of 11 characters; 10 are more than any prompt can hold" in stage.failures[0]


def test_joins_cost_no_more_a_branch_the_more_there_are(stage: Stage) -> None:
    """In looks at branches, not in seconds."""
    num_looks = 0

    class Counted(Branch):
        @property
        def is_ended(self) -> bool:
            nonlocal num_looks
            num_looks += 1
            return self.end_number is not None

    children = range(1, 401)
    stage.session._branches.update({n: Counted(n) for n in children})
    stage.on(0, text("a"), fork(*children))
    for branch in children:
        stage.on(branch, gen("x"), end())
    stage.on(0, join(*children), end=True)
    while stage.prompts:
        stage.generate("x")
    assert stage.is_done and num_looks < 30 * len(children)
