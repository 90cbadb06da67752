"""Capture: what a program sends before it first waits, as a graph, as text and as a picture."""

from __future__ import annotations

import asyncio
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import stemma as st
from stemma.frontend.dsl.capture import trace_of
from stemma.frontend.protocol import ir
from stemma.frontend.trace.graph import Graph
from stemma.frontend.trace.graph_picture import page_of, svg_of
from stemma.frontend.trace.observer import recorded_programs
from stemma.frontend.trace.op_graph import Wait

HERE = Path(__file__).name


def line_of(marker: str) -> str:
    """ "file:line" of the one line of this file that ends in the comment `marker`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {marker}")]
    return f"{HERE}:{number}"


@st.function
def trip(s: st.ProgramState, city: str, num: int = 2) -> None:
    s += st.user(f"Tell me about {city}, <b>please</b>.")  # ask
    s += st.assistant(st.gen("answer", max_tokens=64, temperature=0))
    forks = s.fork(num)  # fork
    forks += lambda i: f"Tip {i}: "
    forks += st.gen("tip")
    forks.join()
    s += s.var("answer") + st.select("mood", ["good", "bad"])
    print(s["mood"])  # wait
    s += "never sent"


def test_ops_are_captured_up_to_the_first_wait_and_it_is_named() -> None:
    graph = trip.trace("Rome")
    assert graph.wait is not None and graph.wait.reading == "s['mood']"
    assert graph.wait.source is not None and graph.wait.source.endswith(line_of("wait"))
    texts = [op.text for op in graph.ops if isinstance(op, ir.Text)]
    assert texts == ["Tell me about Rome, <b>please</b>.", "Tip 0: ", "Tip 1: "]
    assert [op.name for op in graph.ops if isinstance(op, ir.Gen)] == ["answer", "tip", "tip"]


def test_edges_say_what_forks_joins_and_is_appended() -> None:
    graph = trip.trace("Rome")
    fork = next(op for op in graph.ops if isinstance(op, ir.Fork))
    assert [branch.path for branch in graph.branches] == ["main", "main.0", "main.1"]
    by_kind: dict[str, list[Any]] = {"fork": [], "join": [], "var": []}
    for edge in graph.edges:
        by_kind[edge.kind].append(edge)
    assert [e.origin for e in by_kind["fork"]] == [(0, fork.seq)] * 2
    assert [e.target for e in by_kind["fork"]] == [(child, 0) for child in fork.children]
    assert [e.names for e in by_kind["join"]] == [("tip",)] * 2
    (var,) = by_kind["var"]
    assert graph.name_of(var.origin) == "answer" and var.names == ("answer",)


def test_what_is_not_given_is_a_placeholder() -> None:
    graph = trip.trace()
    assert any("Tell me about {city}" in getattr(op, "text", "") for op in graph.ops)
    assert sum(isinstance(op, ir.Gen) for op in graph.ops) == 3, "a default stays the default"
    bound = trip.bind(city="Oslo", num=1).trace()
    assert any("about Oslo" in getattr(op, "text", "") for op in bound.ops)
    assert len(bound.branches) == 2


@pytest.mark.parametrize(
    ("read", "reading"),
    [
        (lambda s: s["x"], "s['x']"),
        (lambda s: s.get_var("x"), "s['x']"),
        (lambda s: s.get_meta_info("x"), "s.get_meta_info('x')"),
        (lambda s: s.text(), "s.text()"),
        (lambda s: s.messages(), "s.messages()"),
        (lambda s: s.sync(), "s.sync()"),
        (lambda s: list(s.text_iter("x")), "s.text_iter('x')"),
    ],
)
def test_every_way_to_wait_stops_the_capture(read: Any, reading: str) -> None:
    def program(s: st.ProgramState) -> None:
        with s.user():
            s += st.gen("x")
            read(s)
        s += "never sent"

    graph = trace_of(program)
    assert [op.kind for op in graph.ops] == ["role_begin", "gen"]
    assert graph.wait is not None and graph.wait.reading == reading


def test_a_program_that_never_waits_is_captured_whole() -> None:
    graph = trace_of(lambda s: s.append("a" + st.gen("x")))
    assert graph.wait is None and len(graph.ops) == 2
    assert "it never waits" in graph.to_text()


def test_no_handler_of_the_authors_keeps_the_program_going_past_its_wait() -> None:
    def stubborn(s: st.ProgramState) -> None:
        s += st.gen("x")
        for name in ("x", "x"):
            try:
                s[name]
            except:  # noqa: E722
                s += "after the wait"

    graph = trace_of(stubborn)
    assert [op.kind for op in graph.ops] == ["gen"]
    assert graph.wait == Wait("s['x']", 0, graph.wait.source if graph.wait else None)


def test_async_functions_are_captured_also_within_a_loop() -> None:
    async def program(s: st.ProgramState) -> None:
        s += "a"
        await asyncio.sleep(0)
        s += st.gen("x")
        s["x"]

    async def within() -> Graph:
        return trace_of(program)

    for graph in (trace_of(program), asyncio.run(within())):
        assert [op.kind for op in graph.ops] == ["text", "gen"]
        assert graph.wait is not None and graph.wait.reading == "s['x']"


@pytest.mark.parametrize(
    ("read", "reading"),
    [
        (lambda s: s.aget("x"), "s.aget('x')"),
        (lambda s: s.aget_meta_info("x"), "s.aget_meta_info('x')"),
        (lambda s: s.atext(), "s.atext()"),
        (lambda s: s.adone(), "s.adone()"),
        (lambda s: s.pin(ttl_s=1).aoutcome(), "a hint's outcome"),
    ],
)
def test_every_way_to_await_stops_the_capture(read: Any, reading: str) -> None:
    async def program(s: st.ProgramState) -> None:
        s += st.gen("x")
        await read(s)
        s += "never sent"

    graph = st.function(program).trace()
    assert [op.kind for op in graph.ops if op.kind != "hint"] == ["gen"]
    assert graph.wait is not None and graph.wait.reading == reading


def test_pauses_tools_and_hints_are_part_of_it() -> None:
    search = st.tool(lambda query: f"found {query}", expected_s=0.5)

    def program(s: st.ProgramState) -> None:
        s += "a"
        s.pin(ttl_s=2)
        with s.pause(0.25, label="thinking"):
            s += str(search(s, "x"))

    text = trace_of(program).to_text()
    assert "hint   pin ttl_ms=2000" in text and "pause  thinking about 0.25 s" in text
    assert "pause  <lambda> about 0.5 s" in text and '"found x"' in text


def test_a_capture_is_no_run_that_observers_see() -> None:
    with recorded_programs() as programs:
        trip.trace("Rome")
    assert not programs


def test_an_error_before_the_first_wait_names_the_placeholders() -> None:
    def program(s: st.ProgramState, num: int, name: str = "") -> None:
        s.fork(range(num))  # type: ignore[arg-type]

    with pytest.raises(st.InvalidProgram, match=r"raised TypeError.*placeholders: num\)") as found:
        trace_of(program)
    assert isinstance(found.value.__cause__, TypeError)


def test_text_has_a_line_an_op_with_its_source_and_flow() -> None:
    lines = trip.trace("Rome").to_text().splitlines()
    assert lines[0] == "trip: 16 ops, 4 calls, 3 branches up to the first wait"
    assert all(len(line) <= 100 for line in lines)

    def line(*words: str) -> str:
        (found,) = [line for line in lines if all(word in line for word in words)]
        return found

    assert line("gen", "answer", "max_tokens=64 temperature=0").strip().startswith("gen")
    assert line("Tell me about Rome").endswith(line_of("ask"))
    assert line("fork", line_of("fork"))
    assert line("join", "<- main.0, main.1 -> tip[]")
    assert line("var", "answer <- main")
    assert line('choices=["good", "bad"]')
    assert lines[-1].split() == ["waits", "s['mood']", line_of("wait")]
    assert line("Tip 1").index("text") > line("gen", "answer").index("gen"), "indented by branch"


def test_ops_of_a_branch_that_nobody_forked_are_refused() -> None:
    with pytest.raises(st.InvalidProgram, match=r"branch=3 .* forked: \[0, 1\]"):
        Graph("p", [ir.Fork(0, 0, None, (1,)), ir.End(3, 0, None)])


def test_data_is_json_and_holds_every_op() -> None:
    graph = trip.trace("Rome")
    data = json.loads(json.dumps(graph.to_json()))
    ops = [ir.op_from_wire(op) for branch in data["branches"] for op in branch["ops"]]
    assert sorted(ops, key=str) == sorted(graph.ops, key=str)
    assert data["wait"]["reading"] == "s['mood']" and data["name"] == "trip"


def test_the_picture_is_well_formed_escaped_and_needs_no_network() -> None:
    graph = trip.trace("<script>alert(1)</script>")
    for markup in (graph.to_svg(), svg_of([graph, graph])):
        root = ElementTree.fromstring(markup)
        groups = [g.get("class") for g in root.iter("{http://www.w3.org/2000/svg}g")]
        assert groups.count("gen") == 3 * (markup.count(">trip</text>"))
        assert "<script" not in markup and "&lt;script" in markup
        assert markup.count("http") == 1, "only the namespace's name"
    assert graph.to_svg() in page_of([graph])


def test_boxes_never_overlap_and_stand_below_what_they_need() -> None:
    from stemma.frontend.trace.graph_picture import _placed

    graph = trip.trace("Rome")
    boxes = _placed(graph, {b.number: i for i, b in enumerate(graph.branches)})
    shown = [b for b in boxes.values() if not isinstance(b.op, ir.RoleBegin | ir.RoleEnd | ir.End)]
    assert len({(b.column, b.row) for b in shown}) == len(shown)
    for edge in graph.edges:
        assert boxes[edge.target].row > boxes[edge.origin].row or edge.kind == "var"
    join = next(b for b in shown if isinstance(b.op, ir.Join))
    assert join.row > max(b.row for b in shown if b.op.branch)


def test_what_waits_by_itself_is_named() -> None:
    @st.tool
    def weather(city: str) -> str:
        return city

    @st.function
    def looped(s: st.ProgramState) -> None:
        s += st.user("Weather?")
        st.tool_loop([weather])(s)

    @st.function
    def checked(s: st.ProgramState) -> None:
        s += st.gen("x", retries=1)

    for program, reading in (
        (looped, "'answer' in a tool loop"),
        (checked, "'x' in a gen that is"),
    ):
        wait = program.trace().wait
        assert wait is not None and wait.reading.startswith(reading)
        assert "test_capture.py" in str(wait.source)
