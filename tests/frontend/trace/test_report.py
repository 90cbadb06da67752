"""Reports: times on one axis, the critical path, who follows whom, totals, and their text."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as strats
from scripted_channel import ScriptedChannel, open_scripted

import stemma as st
from stemma.frontend.protocol import ir
from stemma.frontend.trace.graph import Graph
from stemma.frontend.trace.moments import Moments, Span, busy_s
from stemma.frontend.trace.observer import recorded_programs
from stemma.frontend.trace.report import Report, report_of, report_of_all

HERE = Path(__file__).name


def meta(start_s: float, queue_s: float, prefill_s: float, decode_s: float, **more: Any) -> Any:
    """What a runtime says of a call."""
    times = {"start_s": start_s, "queue_s": queue_s, "prefill_s": prefill_s, "decode_s": decode_s}
    tokens = {"prompt_tokens": 100, "cached_tokens": 60, "completion_tokens": 8}
    latency = {"latency_s": queue_s + prefill_s + decode_s, "finish_reason": "stop"}
    return {**times, **latency, **tokens, **more}


METAS = {
    "plan": meta(0.0, 0.01, 0.04, 0.05),
    "short": meta(0.1, 0.0, 0.01, 0.01),
    "long": meta(0.1, 0.02, 0.08, 0.3, evicted={"agent #3": 40}, preemptions=2, host_tokens=30),
    "end": meta(
        0.5, 0.0, 0.01, 0.09, forced_tokens=5, disk_tokens=4, drafted_tokens=7, accepted_tokens=6
    ),
}


def run_fork_join(channel: ScriptedChannel) -> st.ProgramState:
    s = open_scripted(channel, "planner")
    s += "Plan: " + st.gen("plan")
    forks = s.fork(2)
    forks[0].append(st.gen("short"))
    forks[1].append(st.gen("long"))
    forks.join()
    s += st.gen("end")
    s.end()
    return s


def calls_by_name(report: Report) -> dict[str, Any]:
    return {call.name: call for call in report.calls}


def test_a_call_has_its_times_tokens_and_source_line() -> None:
    report = run_fork_join(ScriptedChannel(METAS)).report()
    calls = calls_by_name(report)
    long = calls["long"]
    assert (long.queue_s, long.prefill_s, long.decode_s) == (0.02, 0.08, 0.3)
    assert long.duration_s == pytest.approx(0.4)
    assert (long.prompt_tokens, long.cached_tokens, long.generated_tokens) == (100, 60, 8)
    assert (long.host_tokens, long.disk_tokens, long.forced_tokens) == (30, None, None)
    assert long.evicted == {"agent #3": 40} and long.preemptions == 2
    assert long.path == "main.1" and calls["plan"].path == "main"
    assert long.source is not None and HERE in long.source
    assert calls["end"].start_s - calls["plan"].start_s == pytest.approx(0.5), "the runtime's clock"


def test_the_critical_path_is_the_chain_that_ended_last() -> None:
    report = run_fork_join(ScriptedChannel(METAS)).report()
    assert [c.name for c in report.calls if c.is_critical] == ["plan", "long", "end"]
    assert report.programs[0].critical_s == pytest.approx(0.1 + 0.4 + 0.1)
    assert report.totals.critical_s == report.programs[0].critical_s


def test_a_call_follows_the_last_one_before_its_fork() -> None:
    report = run_fork_join(ScriptedChannel(METAS)).report()
    follows = [None if c.follows is None else report.calls[c.follows].name for c in report.calls]
    assert dict(zip(calls_by_name(report), follows)) == {
        "plan": None,
        "short": "plan",
        "long": "plan",
        "end": "plan",
    }


def test_lanes_begin_at_their_fork_and_end_at_their_join() -> None:
    report = run_fork_join(ScriptedChannel(METAS)).report()
    calls = calls_by_name(report)
    root, short, long = report.programs[0].lanes
    assert [lane.depth for lane in (root, short, long)] == [0, 1, 1]
    assert short.parent == 0 and short.joins and not root.joins
    assert short.start_s == long.start_s == pytest.approx(calls["plan"].end_s)
    assert short.end_s == long.end_s == pytest.approx(calls["long"].end_s), "both wait for long"


def test_totals_sum_over_calls_and_leave_out_what_nobody_sent() -> None:
    totals = run_fork_join(ScriptedChannel(METAS)).report().totals
    assert (totals.num_calls, totals.num_programs, totals.num_failed) == (4, 1, 0)
    assert (totals.prompt_tokens, totals.cached_tokens, totals.hit_rate) == (400, 240, 0.6)
    assert (totals.forced_tokens, totals.evicted_tokens, totals.preemptions) == (5, 40, 2)
    assert (totals.drafted_tokens, totals.accepted_tokens) == (7, 6)
    assert totals.parallelism == pytest.approx((0.1 + 0.02 + 0.4 + 0.1) / 0.6)
    bare = run_fork_join(ScriptedChannel()).report().totals
    assert bare.prompt_tokens is bare.hit_rate is bare.queue_s is bare.forced_tokens is None


def test_todays_meta_without_a_start_is_placed_by_its_arrival() -> None:
    old = {"queue_s": 0.01, "time_to_first_token_s": 0.03, "latency_s": 0.05, "prompt_tokens": 9}
    s = open_scripted(ScriptedChannel({"x": old}))
    time.sleep(0.06)
    s += "a" + st.gen("x")
    s.end()
    (call,) = s.report().calls
    assert call.prefill_s == pytest.approx(0.02) and call.decode_s == pytest.approx(0.02)
    assert call.duration_s == pytest.approx(0.05) and call.end_s is not None
    assert call.end_s >= 0.06
    assert call.cached_tokens is None


def test_samples_are_one_call_with_summed_tokens() -> None:
    samples = [meta(0.0, 0.0, 0.1, 0.1), meta(0.0, 0.0, 0.1, 0.4, evicted={"a": 1})]
    s = open_scripted(ScriptedChannel({"x": samples}))
    s += "a" + st.gen("x", n=2)
    s.end()
    (call,) = s.report().calls
    assert call.num_samples == 2 and call.generated_tokens == 16 and call.evicted == {"a": 1}
    assert call.duration_s == pytest.approx(0.5) and call.decode_s == 0.4


def test_a_failed_call_and_what_never_ran_are_told_apart() -> None:
    s = open_scripted(ScriptedChannel(METAS, failing=("plan",)))
    s += st.gen("plan")
    s.end()
    report = s.report()
    assert report.calls[0].error == "no <b>luck</b>" and report.calls[0].error_kind == "EngineError"
    assert report.calls[0].start_s == report.calls[0].end_s is not None, "a mark on the timeline"
    assert 'class="call failed"' in report.to_html()
    assert report.programs[0].error is not None and report.totals.num_failed == 1
    unsent = open_scripted(ScriptedChannel(METAS))
    unsent += st.gen("plan")
    (call,) = unsent.report().calls
    assert call.start_s is None and call.error is None
    assert "did not run" in unsent.report().to_text()
    unsent.cancel()


def test_the_authors_own_time_goes_into_no_call() -> None:
    """An op sent late was held back by the author's code, who read another branch's value."""
    fork, late = ir.Fork(0, 0, None, (1,)), ir.Gen(0, 2, None, "c")
    graph = Graph("p", [fork, ir.Gen(0, 1, None, "a"), ir.Gen(1, 0, None, "b"), late])
    calls = {(0, 1): Span(0.0, 0.2), (1, 0): Span(0.0, 0.5), (0, 2): Span(0.7, 0.9)}
    sent = {(0, 0): 0.0, (0, 1): 0.0, (1, 0): 0.0, (0, 2): 0.7}
    assert Moments(graph, sent, calls, 0.9).critical_path() == [(1, 0), (0, 2)]
    at_once = Moments(graph, {**sent, (0, 2): 0.1}, calls, 0.9)
    assert at_once.critical_path() == [(0, 1), (0, 2)], "it waited for its branch only"


def test_a_pause_lasts_until_the_branch_goes_on() -> None:
    ops = [ir.Pause(0, 0, "f.py:3", 0.2, "search"), ir.Hint(0, 1, None), ir.Text(0, 2, None, "x")]
    sent = {(0, 0): 0.1, (0, 1): 0.15, (0, 2): 0.45}
    moments = Moments(Graph("p", ops), sent, {}, 1.0)
    assert moments.spans[0, 0] == Span(0.1, 0.45)
    assert moments.critical_path() == [(0, 0)]
    assert Moments(Graph("p", ops[:1]), sent, {}, 1.0).spans[0, 0] == Span(0.1, 1.0)


def test_pauses_and_hints_are_reported() -> None:
    s = open_scripted(ScriptedChannel(METAS))
    program = s._program
    for op in (ir.Hint(0, 0, "f.py:7", "pin", 5), ir.Pause(0, 1, "f.py:8", 0.2, "search")):
        program.send(op)
    program.end()
    (record,) = s.report().programs
    assert (record.hints[0].outcome, record.hints[0].num_tokens) == ("clipped", 7)
    assert record.pauses[0].label == "search" and record.pauses[0].expected_s == 0.2
    text = s.report().to_text()
    assert "hint pin on main at f.py:7: clipped, 7 tokens (budget)" in text
    assert "pause search on main at f.py:8" in text and "expected 200.0 ms" in text


def test_text_has_a_row_a_call_and_marks_what_is_absent() -> None:
    report = run_fork_join(ScriptedChannel(METAS)).report()
    lines = report.to_text().splitlines()
    (row,) = [line for line in lines if line.split()[1:2] == ["long*"]]
    assert row.split()[:2] == ["main.1", "long*"] and HERE in row
    for part in ("20.0 ms", "80.0 ms", "300.0 ms", "100", "60", "8", "30 from host"):
        assert part in row
    assert "evicted 40 of agent #3" in row and "preempted 2x" in row
    (other,) = [line for line in lines if line.split()[1:2] == ["short"]]
    assert " - " in other, "forced is not known"
    assert any(line.startswith("prompt tokens") and "240 of them cached (60%)" in line
               for line in lines)  # fmt: skip
    assert any("5 forced, 6 of 7 drafted ones accepted" in line for line in lines)
    assert Report([]).to_text().startswith("total")


def test_a_report_is_json() -> None:
    report = run_fork_join(ScriptedChannel(METAS)).report()
    data = json.loads(json.dumps(report.to_json()))
    assert [call["name"] for call in data["programs"][0]["calls"]] == [*METAS]
    assert data["totals"]["num_calls"] == 4 and data["tree"] is None


def test_several_programs_share_one_axis_in_the_order_of_their_start() -> None:
    with recorded_programs() as programs:
        first = run_fork_join(ScriptedChannel(METAS))
        second = run_fork_join(ScriptedChannel(METAS))
    run_fork_join(ScriptedChannel(METAS))  # nobody watches any more
    assert programs == [first._program, second._program]
    report = report_of_all(reversed(programs))
    gap = second._program.started_s - first._program.started_s
    assert report.programs[0].start_s == 0
    assert report.programs[1].start_s == pytest.approx(gap)
    assert {call.program for call in report.programs[1].calls} == {1}
    assert report_of(programs[1]).programs[0].start_s == 0, "alone it is the first"


class Watcher:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def program_started(self, program: Any) -> None:
        self.seen.append(f"start {program.name}")

    def program_ended(self, program: Any) -> None:
        self.seen.append(f"end {program.name}")


@pytest.mark.parametrize("ending", ["end", "cancel", "disconnect", "fail"])
def test_an_observer_is_told_of_the_end_exactly_once(ending: str) -> None:
    from stemma.frontend.trace.observer import add_observer, remove_observer

    watcher = Watcher()
    add_observer(watcher)
    try:
        program = open_scripted(ScriptedChannel(), "p")._program
        if ending == "disconnect":
            program.handle_disconnect(st.EngineError("gone"))
        elif ending == "fail":
            program.fail(ValueError("x"))
        else:
            getattr(program, ending)()
        assert watcher.seen == ["start p", "end p"]
        program.cancel()
        assert watcher.seen == ["start p", "end p"]
    finally:
        remove_observer(watcher)


spans = strats.tuples(strats.integers(0, 20), strats.integers(0, 10))


@given(strats.lists(spans, max_size=8))
def test_busy_time_is_the_length_of_the_union(pairs: list[tuple[int, int]]) -> None:
    covered = {tick for begin, length in pairs for tick in range(begin, begin + length)}
    assert busy_s([Span(begin, begin + length) for begin, length in pairs]) == len(covered)
