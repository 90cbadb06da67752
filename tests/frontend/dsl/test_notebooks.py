"""What notebooks show, and the example notebooks."""

from __future__ import annotations

import html.parser
from pathlib import Path
from typing import Any

import pytest
from notebooks import shown_by
from scripted_channel import ScriptedChannel, open_scripted

import stemma as st
from stemma.frontend.trace.notebook import RadixTree

EXAMPLES = Path(st.__file__).parent / "examples" / "notebooks"


class Tags(html.parser.HTMLParser):
    """Raises AssertionError for tags that do not close each other."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_example_notebooks_run(path: Path) -> None:
    values = shown_by(path)
    rich = [value for value in values if hasattr(value, "_repr_html_")]
    assert rich, "it shows something"
    for value in rich:
        assert Tags(value._repr_html_()).text or "iframe" in value._repr_html_()


def test_a_state_shows_what_it_has_so_far_without_waiting() -> None:
    channel = ScriptedChannel()
    state = open_scripted(channel)
    state += st.user("<b>Hi</b>") + st.assistant_begin() + st.gen("a")
    assert repr(state) == "<ProgramState '<b>Hi</b>…', values: a>" or "…" in repr(state)
    page = Tags(state._repr_html_())
    assert "<b>Hi</b>" in page.text and "…" in page.text
    state["a"]
    assert "<a>" in Tags(state._repr_html_()).text and "<a>" in repr(state)
    state += "x" * 10_000
    assert len(repr(state)) < 400
    state += "x" * 200_000
    assert len(state._repr_html_()) < 200_000


def test_pictures_are_in_frames_of_their_own() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "a" + st.gen("x")

    graph = program.trace()
    assert str(graph) == graph.to_text()
    for shown in (graph._repr_html_(), open_scripted(ScriptedChannel()).report()._repr_html_()):
        assert shown.startswith("<iframe srcdoc=") and 'sandbox="allow-scripts"' in shown
        assert "<script" not in shown and "<style" not in shown, "escaped"


def test_a_tree_is_plain_data_and_shows_itself() -> None:
    nodes = [
        {"id": 0, "parent": None, "num_tokens": 0, "namespace": ""},
        {"id": 1, "parent": 0, "num_tokens": 7, "hits": 2, "text": "<i>"},
    ]
    tree = RadixTree({"nodes": nodes, "cached_tokens": 7})
    assert tree == {"nodes": nodes, "cached_tokens": 7}
    assert "&lt;i&gt;" in tree._repr_html_() and "<details open>" in tree._repr_html_()
