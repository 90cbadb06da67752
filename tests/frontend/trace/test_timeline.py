"""The timeline: a page that needs no network, has every call, and lets no text be markup."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from stemma.frontend.trace.radix_outline import outline_of
from stemma.frontend.trace.records import CallRecord, LaneRecord, PauseRecord, ProgramRecord
from stemma.frontend.trace.report import Report
from stemma.frontend.trace.timeline import page_of

EVIL = "</td><script>alert(1)</script>\"'"
VOID = ("meta", "br", "img", "input", "hr", "link")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def program_of(index: int, num_branches: int, calls_a_branch: int = 1) -> ProgramRecord:
    """A root with one call, then branches with some calls each; start and end in whole seconds."""
    lanes = [LaneRecord(0, "main", 0, None, 0.0, 10.0, False)]
    calls = [call_of(index, 0, "main", f"root{EVIL}", 0.0, follows=None)]
    for branch in range(1, num_branches + 1):
        path = f"main.{branch - 1}"
        lanes.append(LaneRecord(branch, path, 1, 0, 1.0, 10.0, True))
        calls += [
            call_of(index, branch, path, f"call{number}", 1.0 + number, follows=0)
            for number in range(calls_a_branch)
        ]
    pause = PauseRecord(0, "main", f"tool{EVIL}", "f.py:3", 8.0, 9.0, 0.5, True)
    return ProgramRecord(f"agent{EVIL}", 0.0, 10.0, tuple(lanes), tuple(calls), (pause,), ())


def call_of(
    program: int, branch: int, path: str, name: str, start_s: float, follows: int | None
) -> CallRecord:
    return CallRecord(
        program=program,
        branch=branch,
        seq=0,
        path=path,
        kind="gen",
        name=name,
        source="/somewhere/f.py:12",
        start_s=start_s,
        end_s=start_s + 1.0,
        queue_s=0.25,
        prefill_s=0.25,
        decode_s=0.5,
        prompt_tokens=100,
        cached_tokens=75,
        host_tokens=25,
        generated_tokens=10,
        evicted={EVIL: 5},
        is_critical=True,
        follows=follows,
    )


class Page(HTMLParser):
    """Checks that elements nest, and collects them: (tag, attributes, text)."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[tuple[str, list[str]]] = []
        self.feed(markup)
        self.close()
        assert not self._open, f"never closed: {[tag for tag, _ in self._open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        texts: list[str] = []
        self.elements.append((tag, dict(attrs), texts))
        if tag not in VOID:
            self._open.append((tag, texts))

    def handle_endtag(self, tag: str) -> None:
        opened, _ = self._open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"

    def handle_data(self, data: str) -> None:
        for _, texts in self._open:
            texts.append(data)

    def with_class(self, name: str) -> Iterator[tuple[dict[str, Any], str]]:
        for _, attributes, texts in self.elements:
            if name in (attributes.get("class") or "").split():
                yield attributes, "".join(texts)


TREE = {
    "cached_tokens": 12,
    "nodes": [
        {"id": 1, "parent": None, "namespace": "", "num_tokens": 0, "text": "", "hits": 0},
        {"id": 2, "parent": 1, "num_tokens": 8, "text": EVIL, "hits": 3},
        {"id": 3, "parent": 2, "num_tokens": 4, "text": "below", "hits": 1},
        {"id": 4, "parent": 1, "num_tokens": 1, "text": "tiny", "hits": 0},
    ],
}


def test_elements_nest_and_text_is_never_markup() -> None:
    markup = page_of(Report([program_of(0, 2), program_of(1, 3)], TREE))
    page = Page(markup)
    scripts = [texts for tag, _, texts in page.elements if tag == "script"]
    assert len(scripts) == 1 and "alert" not in "".join(scripts[0])
    assert any(EVIL in text for _, text in page.with_class("call"))
    assert any("<script>alert(1)" in text for _, text in page.with_class("radix"))
    assert EVIL in next(page.with_class("pausing"))[0]["aria-label"]


def test_it_needs_no_network() -> None:
    markup = page_of(Report([program_of(0, 2)], TREE))
    assert not re.search(r"https?:|//[a-z]|@import|url\(", markup.replace("// Tooltips", ""))
    page = Page(markup)
    assert all(
        (value or "").startswith("#")
        for _, attributes, _ in page.elements
        for key, value in attributes.items()
        if key in ("href", "src")
    )


def test_every_call_is_a_bar_a_row_and_a_node() -> None:
    report = Report([program_of(0, 2, 2), program_of(1, 3)], TREE)
    page = Page(page_of(report))
    wanted = [f"c{number}" for number in range(len(report.calls))]
    rows = [a["id"] for tag, a, _ in page.elements if tag == "tr" and "id" in a]
    bars = [attributes["href"][1:] for attributes, _ in page.with_class("call")]
    nodes = [attributes["href"][1:] for attributes, _ in page.with_class("node")]
    assert rows == bars == wanted and sorted(nodes) == sorted(wanted)


def test_bars_stand_where_and_as_long_as_the_calls_were() -> None:
    (program,) = (program_of(0, 1),)
    page = Page(page_of(Report([program])))
    (_, root), (branch, _) = [(a, a["style"]) for a, _ in page.with_class("call")]
    style = dict(part.split(":") for part in branch["style"].split(";"))
    assert style["top"] == "36px", "the second lane"
    assert float(style["left"][:-1]) == pytest.approx(100 * 1.0 / 10.2, rel=1e-3)
    assert float(style["width"][:-1]) == pytest.approx(100 * 1.0 / 10.2, rel=1e-3)
    assert root.startswith("top:0px;left:0%")


def test_a_bar_is_split_as_its_time_was() -> None:
    markup = page_of(Report([program_of(0, 1)]))
    assert markup.count('<i class="queue" style="width:25%"></i>') == 2
    assert markup.count('<i class="decode" style="width:50%"></i>') == 2


def test_where_the_time_went_adds_up_to_the_whole() -> None:
    page = Page(page_of(Report([program_of(0, 1)])))
    (split,) = [i for i, (_, a, _) in enumerate(page.elements) if a.get("class") == "split"]
    parts = {}
    for tag, attributes, _ in page.elements[split + 1 :]:
        if tag != "i":
            break
        parts[attributes["class"]] = float((attributes["style"] or "")[6:-1])
    # Two critical calls of 1 s and a pause of 1 s within 10 s.
    assert parts == {"queue": 5, "prefill": 5, "decode": 10, "pause": 10, "outside": 70}


def test_200_calls_are_less_than_300_kb() -> None:
    report = Report([program_of(index, 19, 1) for index in range(10)], TREE)
    assert len(report.calls) == 200
    assert len(page_of(report).encode()) < 300_000


def test_a_chain_of_calls_is_not_indented_and_costs_no_recursion() -> None:
    calls = [call_of(0, 0, "main", f"c{i}", 0.0, i - 1 if i else None) for i in range(1100)]
    lanes = (LaneRecord(0, "main", 0, None, 0.0, 1.0, False),)
    markup = page_of(Report([ProgramRecord("chain", 0.0, 1.0, lanes, tuple(calls), (), ())]))
    Page(markup)
    assert markup.count('class="node"') == 1100 and "<li><ul>" not in markup


def test_columns_of_which_nothing_is_known_are_left_out() -> None:
    page = Page(page_of(Report([program_of(0, 1)])))
    head = ["".join(texts) for tag, _, texts in page.elements if tag == "th"]
    assert "host" in head and "evicted" in head
    assert not {"disk", "forced", "preempted"} & set(head)
    cells = sum(tag == "td" for tag, _, _ in page.elements)
    assert cells == 2 * len(head)


def test_nothing_at_all_is_a_page_too() -> None:
    page = Page(page_of(Report([])))
    texts = {tag: "".join(texts) for tag, _, texts in page.elements if tag in ("title", "h1", "p")}
    assert texts == {
        "title": "no program · timeline",
        "h1": "no program",
        "p": "0 programs, 0 calls, 0.0 ms",
    }
    assert [text for _, text in page.with_class("rows")] == [""]
    assert sum(tag == "tr" for tag, _, _ in page.elements) == 1, "only the head of the table"
    assert not [*page.with_class("split")], "no program of which the time could be split"


def test_the_outline_keeps_the_biggest_subtrees_and_says_what_it_hides() -> None:
    markup = outline_of(TREE, max_nodes=2)
    assert "tiny" not in markup and "below" not in markup and "8 tokens, 3 hits" in markup
    assert "… and 2 smaller nodes" in markup
    assert "smaller nodes" not in outline_of(TREE)
    deep = [{"id": i, "parent": i - 1 or None, "num_tokens": 1, "text": ""} for i in range(1, 3000)]
    assert outline_of({"nodes": deep}, max_nodes=5000).count("<li>") == 2999


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_a_browser_lays_it_out_without_an_error(tmp_path: Path) -> None:
    """Scripts have run (ticks are there), on a phone's width, too."""
    page = tmp_path / "timeline.html"
    page.write_text(page_of(Report([program_of(0, 2), program_of(1, 3)], TREE)))
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/user"]
    command = [str(BROWSER), *flags, "--window-size=390,800", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    shown = Page(done.stdout.replace("<!DOCTYPE html>", ""))
    assert len(list(shown.with_class("tick"))) > 2, "ticks are made by the script"
    body = next(attributes for tag, attributes, _ in shown.elements if tag == "body")
    assert "no-script" not in (body.get("class") or "")
