"""Joins of the first k branches, and branches that nobody reads."""

from __future__ import annotations

import copy
import time
from dataclasses import replace

import pytest
from program_harness import ProgramHarness, drop, end, fork, gen, join, resume, text, var

from stemma.frontend.protocol import wire
from stemma.runtime.programs import session as session_module
from stemma.runtime.programs.context import ProgramContext
from stemma.runtime.programs.engine_branch import EngineBranch
from stemma.runtime.programs.kept import Kept


def three_tips(
    harness: ProgramHarness, *, first: int | None, mode: str = "gather_variable"
) -> None:
    """A fork of three gens, joined, and a gen behind the join."""
    harness.on(0, text("a"), fork(1, 2, 3))
    for branch in (1, 2, 3):
        harness.on(branch, text(str(branch)), gen("tip"), end())
    harness.on(0, join(1, 2, 3, mode=mode, first=first), gen("after"), end=True)


def kinds_of_failures(harness: ProgramHarness) -> dict[int, str]:
    return {branch: payload["kind"] for branch, _, payload in harness.events.of(wire.FAILED)}


def test_a_join_of_the_first_two_goes_on_with_them_and_stops_the_third(
    harness: ProgramHarness,
) -> None:
    three_tips(harness, first=2)
    harness.generate("C", index=2)
    assert len(harness.prompts) == 2
    harness.generate("A", index=0)
    assert harness.prompts == ["a"], "the loser has stopped, and the parent goes on"
    assert harness.values[0, 2] == [0, 2]
    assert kinds_of_failures(harness) == {2: "Stopped"}
    harness.generate("!")
    assert harness.is_done


def test_only_the_winners_are_appended(harness: ProgramHarness) -> None:
    three_tips(harness, first=1, mode="concate_and_append")
    harness.generate("B", index=1)
    assert harness.prompts == ["a2B"] and harness.values[0, 2] == [1]


def test_a_join_of_the_first_survives_failures_while_enough_are_left(
    harness: ProgramHarness,
) -> None:
    three_tips(harness, first=2)
    harness.queue.fail(harness.queue.open[0], "lost")
    harness.session.advance()
    assert len(harness.prompts) == 2
    harness.generate("B")
    harness.generate("C")
    assert harness.values[0, 2] == [1, 2] and kinds_of_failures(harness) == {1: "EngineError"}


def test_a_join_fails_once_too_few_are_left(harness: ProgramHarness) -> None:
    three_tips(harness, first=2)
    for _ in range(2):
        harness.queue.fail(harness.queue.open[0], "lost")
        harness.session.advance()
    assert "2 of 3 branches are needed, 2 failed: tip: lost" in harness.failures[0]


def test_what_only_a_dropped_branch_needs_stops_with_it(harness: ProgramHarness) -> None:
    harness.on(0, text("a"), fork(1, 2))
    harness.on(1, gen("slow"))
    harness.on(2, var(1, 0))
    harness.on(1, drop())
    assert harness.prompts == ["a"], "its value is still wanted"
    harness.on(2, drop())
    assert not harness.prompts and kinds_of_failures(harness) == {1: "Stopped", 2: "Stopped"}
    harness.on(0, gen("more"), end=True)
    harness.generate("A")
    assert harness.is_done


def test_the_branches_that_a_dropped_one_would_have_joined_stop_with_it(
    harness: ProgramHarness,
) -> None:
    harness.on(0, text("a"), fork(1, 2))
    harness.on(1, fork(3, 4))
    for branch in (3, 4):
        harness.on(branch, gen("slow"), end())
    harness.on(1, join(3, 4), gen("after"))
    harness.on(2, var(4, 0))
    harness.on(1, drop())
    assert harness.prompts == ["a"], "the value of one is wanted by another branch"
    harness.generate("B")
    assert harness.values[2, 0] == "B"
    assert kinds_of_failures(harness) == {1: "Stopped", 3: "Stopped", 4: "Stopped"}


def test_what_a_failed_branch_needed_is_free_to_be_dropped(harness: ProgramHarness) -> None:
    harness.on(0, text("a"), fork(1, 2))
    harness.on(1, gen("slow"))
    harness.on(2, gen("quick"), var(1, 0))
    harness.on(1, drop())
    harness.queue.fail(harness.queue.open[1], "lost")
    harness.session.advance()
    assert not harness.prompts and kinds_of_failures(harness) == {2: "EngineError", 1: "Stopped"}


def test_a_dropped_branch_that_only_a_stuck_one_waits_for_stops_with_that(
    harness: ProgramHarness,
) -> None:
    harness.on(0, text("a"), fork(1, 2))
    harness.on(1, var(2, 9))
    harness.on(2, var(1, 9))
    harness.on(2, drop(), end=True)
    assert harness.is_done
    assert kinds_of_failures(harness) == {1: "InvalidProgram", 2: "Stopped"}


def test_a_loser_may_have_any_number_of_forks_within_forks(harness: ProgramHarness) -> None:
    harness.on(0, text("a"), fork(1, 2))
    harness.on(1, gen("quick"), end())
    harness.on(2, gen("slow"), fork(3))
    for branch in range(3, 2000):
        harness.on(branch, fork(branch + 1))
    harness.on(0, join(1, 2, first=1), end=True)
    harness.generate("A")
    assert harness.is_done and len(kinds_of_failures(harness)) == 1999


def test_a_loser_that_was_never_forked_stops_nobody_else(harness: ProgramHarness) -> None:
    harness.on(0, text("a"), fork(1, 2))
    harness.on(1, text("b"), end())
    harness.on(2, gen("apart"))
    harness.on(0, join(1, 7, first=1), gen("after"), end=True)
    assert harness.prompts == ["a", "a"] and kinds_of_failures(harness) == {7: "Stopped"}


def test_stopping_many_losers_takes_time_in_proportion(harness: ProgramHarness) -> None:
    losers = range(2, 6000)
    harness.on(0, text("a"), fork(1, *losers))
    harness.on(1, gen("quick"), end())
    for branch in losers:
        harness.on(branch, var(0, 99))
    harness.on(0, join(1, *losers, first=1), gen("after"))
    start = time.thread_time()
    harness.generate("A")
    assert time.thread_time() - start < 2.0, "of 0.1 s; what grows with the square takes 10 s"
    assert len(kinds_of_failures(harness)) == len(losers) and harness.prompts == ["a"]


def test_the_losers_forks_stop_too(harness: ProgramHarness) -> None:
    harness.on(0, text("a"), fork(1, 2))
    harness.on(1, gen("quick"), end())
    harness.on(2, fork(3, 4))
    harness.on(3, gen("slow"))
    harness.on(4, gen("slow"), fork(5))
    harness.on(0, join(1, 2, first=1), end=True)
    harness.generate("A")
    assert not harness.prompts and harness.is_done
    assert kinds_of_failures(harness) == dict.fromkeys((2, 3, 4, 5), "Stopped")


def test_a_dropped_branch_stops_at_once(harness: ProgramHarness) -> None:
    harness.on(0, text("a"), fork(1, 2))
    harness.on(1, gen("x"), gen("y"))
    harness.on(2, gen("x"))
    harness.on(1, drop())
    assert len(harness.prompts) == 1 and kinds_of_failures(harness) == {1: "Stopped"}
    harness.generate("B")
    harness.on(0, gen("z"), end=True)
    harness.generate("Z")
    assert harness.is_done


def test_a_dropped_branch_goes_on_while_somebody_needs_its_value(harness: ProgramHarness) -> None:
    harness.on(0, text("a"), fork(1))
    harness.on(1, gen("x"), gen("y"))
    harness.on(0, var(1, 0), gen("z"))
    harness.on(1, drop())
    assert harness.prompts == ["a"]
    harness.generate("X")
    assert harness.prompts == ["aX"], "its second gen stopped when the first was there"
    assert kinds_of_failures(harness) == {1: "Stopped"}


def test_a_dropped_branch_goes_on_until_its_children_have_begun(harness: ProgramHarness) -> None:
    harness.on(0, text("a"), fork(1))
    harness.on(1, gen("x"), fork(2), gen("y"))
    harness.on(2, gen("z"))
    harness.on(1, drop())
    harness.generate("X")
    assert harness.prompts == ["aX"] and kinds_of_failures(harness) == {1: "Stopped"}


def test_dropping_parent_and_child_stops_both(harness: ProgramHarness) -> None:
    harness.on(0, text("a"), fork(1))
    harness.on(1, gen("x"), fork(2), gen("y"))
    harness.on(2, gen("z"), drop())
    harness.on(1, drop())
    assert not harness.prompts


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_joined_branch_is_not_dropped_by_a_drop(harness: ProgramHarness, first: int) -> None:
    """The client's object may be collected while the join is still under way."""
    harness.on(0, text("a"), fork(1, 2, 3))
    for branch in (1, 2, 3):
        harness.on(branch, gen("tip"))
    harness.on(0, join(1, 2, 3, first=first))
    for branch in (1, 2, 3):
        harness.on(branch, drop())
    assert len(harness.prompts) == 3
    for _ in range(first):
        harness.generate("t")
    assert len(harness.values[0, 2]) == first


def test_a_branch_that_was_never_forked_fails_from_its_first_op_on(harness: ProgramHarness) -> None:
    harness.on(0, text("a"), text("b"), gen("x"), fork(1))
    harness.on(1, gen("y"))
    harness.queue.fail(harness.queue.open[0], "lost")
    harness.session.advance()
    (failed,) = [(seq, p) for branch, seq, p in harness.events.of(wire.FAILED) if branch == 1]
    assert failed[0] == 0 and "lost" in failed[1]["message"]


def test_branches_forked_from_nothing_are_joined_without_their_bos(context: ProgramContext) -> None:
    tokenizer = copy.copy(context.tokenizer)
    tokenizer.bos_ids = (256,)
    harness = ProgramHarness(replace(context, tokenizer=tokenizer))
    harness.on(0, fork(1, 2))
    for branch in (1, 2):
        harness.on(branch, text(str(branch)), end())
    harness.on(0, join(1, 2, mode="concate_and_append"), gen("x"))
    assert list(harness.queue.open[0].prompt) == [256, *b"12"]


def test_the_first_failure_fails_the_join_at_once(harness: ProgramHarness) -> None:
    three_tips(harness, first=None)
    harness.queue.fail(harness.queue.open[1], "lost")
    harness.session.advance()
    assert "a joined branch failed" in harness.failures[0]
    assert not harness.prompts and harness.is_done, (
        "the client says no more: nobody reads the others"
    )


def test_siblings_of_a_failed_branch_go_on_while_the_client_may_read_them(
    harness: ProgramHarness,
) -> None:
    harness.on(0, text("a"), fork(1, 2))
    for branch in (1, 2):
        harness.on(branch, gen("tip"), end())
    harness.on(0, join(1, 2))
    harness.queue.fail(harness.queue.open[0], "lost")
    harness.session.advance()
    assert "a joined branch failed" in harness.failures[0] and len(harness.prompts) == 1
    harness.send(end=True)
    assert not harness.prompts and harness.is_done


def test_forks_of_a_long_prefix_are_bounded(
    harness: ProgramHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "MAX_FORKED_TOKENS", 100)
    harness.on(0, text("a" * 30), fork(1, 2, 3))
    harness.on(0, fork(4))
    assert "120 tokens together; at most 100" in harness.failures[0]


def test_a_text_that_fits_no_prompt_is_refused_before_it_is_tokenized(
    context: ProgramContext,
) -> None:
    longest = context.tokenizer.longest_token_chars
    harness = ProgramHarness(replace(context, max_text_chars=10 * longest))
    harness.on(0, text("a" * (10 * longest + 1)), gen())
    assert "too long: at least 11 tokens > 9 maximum" in harness.failures[0]


def test_joins_cost_no_more_a_branch_the_more_there_are(harness: ProgramHarness) -> None:
    """In looks at branches, not in seconds."""
    num_looks = 0

    class Counted(EngineBranch):
        @property
        def is_ended(self) -> bool:
            nonlocal num_looks
            num_looks += 1
            return self.end_number is not None

    children = range(1, 401)
    harness.session._branches.update({n: Counted(n) for n in children})
    harness.on(0, text("a"), fork(*children))
    for branch in children:
        harness.on(branch, gen("x"), end())
    harness.on(0, join(*children), end=True)
    while harness.prompts:
        harness.generate("x")
    assert harness.is_done and num_looks < 30 * len(children)


def test_a_branch_that_failed_elsewhere_goes_on_though_all_of_it_comes_at_once(
    harness: ProgramHarness,
) -> None:
    """As where branches run on several engines: this one learns of a failure and of what its client
    did then before it takes its next step."""
    ops = harness.ops(0, text("a"), fork(1, 2))
    lost = harness.ops(1, text("1"), gen("bad"), fork(3))
    later = harness.ops(1, resume(), text("on"), fork(4), gen("tip"), end())
    ops += [*lost, *later, *harness.ops(4, text("deep"), gen("tip"), end())]
    ops += harness.ops(2, text("2"), end())
    ops += harness.ops(0, join(1, 2, mode="concate_and_append"), gen("after"))
    harness.session.give({(1, 1): Kept(failed=("no", "InvalidGrammar"))})
    harness.send(*ops, end=True)
    assert harness.failures == {1: "no", 3: "the branch it forks from failed: bad: no"}
    assert sorted(harness.prompts) == ["a1on", "a1ondeep"]
    harness.generate("T", index=harness.prompts.index("a1on"))
    harness.generate("D", index=harness.prompts.index("a1ondeep"))
    assert harness.prompts == ["a1onT2"]
    harness.generate("!")
    assert harness.is_done
