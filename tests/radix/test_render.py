"""The picture of a tree, against a golden text, and the snapshot that it is drawn from."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from stemma.radix.fleet import FleetTree
from stemma.radix.render import render, render_fleet
from stemma.radix.tree import RadixTree


def text(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


@pytest.fixture
def tree() -> RadixTree:
    tree = RadixTree()
    next_page = 0
    for namespace, line in [
        ("", "You are a helpful assistant.\nAnswer in one word. Q: capital of France?"),
        ("", "You are a helpful assistant.\nAnswer in one word. Q: capital of Spain? A: Madrid"),
        ("", "You are a helpful assistant.\nSing: " + "漢字" * 30),
        ("lora-a", "def f(x):\n\treturn x"),
    ]:
        token_ids = [ord(char) for char in line]
        match = tree.match(namespace, token_ids)
        own = range(next_page, next_page + len(line) - match.num_tokens)
        next_page = own.stop
        inserted = tree.insert(namespace, token_ids, [*match.pages, *own])
        if "Spain" in line:
            tree.lock(inserted.node)
    return tree


GOLDEN = """\
                                             tokens locks   hits
(default)                                       152     1
└─ "You are a helpful assistant.\\n"              29     1      2
   ├─ "Sing: 漢字漢字漢字漢字漢字漢字漢…"        66     ·      0
   └─ "Answer in one word. Q: capital o…"        34     1      1
      ├─ "Spain? A: Madrid"                      16     1      0
      └─ "France?"                                7     ·      0
lora-a                                           19     ·
└─ "def f(x):\\n\\treturn x"                       19     ·      0"""


def test_render_draws_the_tree(tree: RadixTree) -> None:
    assert render(tree.snapshot(), text, width=64) == GOLDEN


MARKED = """\
                                             tokens locks   hits  kept      host
(default)                                       152     1
└─ "You are a helpful assistant.\\n"              29     1      3   pin        29
   ├─ "Sing: 漢字漢字漢字漢字漢字漢字漢…"        66     ·      0     ·         ·
   └─ "Answer in one word. Q: capital o…"        34     1      1 lease         7
      ├─ "Spain? A: Madrid"                      16     1      0 lease         ·
      └─ "France?"                                7     ·      0     ·         ·"""


def test_render_marks_what_is_leased_and_what_the_host_has_too(tree: RadixTree) -> None:
    rows = tree.snapshot()
    spain = next(row for row in rows if row["num_tokens"] == 16)
    node = next(node for node in tree.nodes() if node.id == spain["id"])
    tree.lease(node)
    tree.lease(tree.match("", [ord(c) for c in "You are a helpful assistant.\n"]).node, is_pin=True)
    rows = tree.snapshot()
    rows[1]["host_tokens"], rows[2]["host_tokens"] = 29, 0
    next(row for row in rows if row["num_tokens"] == 34)["host_tokens"] = 7
    assert render(rows[:-2], text, width=80) == MARKED


def test_render_counts_what_it_leaves_out(tree: RadixTree) -> None:
    assert "└─ … 4 more nodes, 123 tokens" in render(tree.snapshot(), text, max_depth=1)
    picture = render(tree.snapshot(), text, max_children=1)
    assert "   └─ … 3 more nodes, 57 tokens" in picture


@pytest.mark.parametrize("width", [20, 40, 64, 100])
def test_render_keeps_to_its_width(tree: RadixTree, width: int) -> None:
    for line in render(tree.snapshot(), text, width=width).splitlines():
        cells = sum(2 if char in "漢字" else 1 for char in line)
        assert cells <= max(width, 39), line


def test_render_of_an_empty_tree() -> None:
    assert render(RadixTree().snapshot(), text) == "(empty)"


def test_render_draws_a_very_deep_tree() -> None:
    tree = RadixTree()
    node = tree.match("", []).node
    tree.lock(node)
    for page in range(400):
        tree.lock(node)
        node = tree.extend(node, [page % 50 + 65], [page]).node
        tree.lock(node)
    assert "more nodes" in render(tree.snapshot(), text)
    assert render(tree.snapshot(), text, max_depth=10_000).count("\n") == 401


FLEET = """\
                                              tokens  0 1 12
(default)                                         10  0 · 12
└─ "You are kind. Q: "                             6  0 · 12
   ├─ "Spain?"                                     2  · · 12
   └─ "France?"                                    2  0 ·  ·"""


def test_render_fleet_marks_who_has_each_prefix() -> None:
    tree = FleetTree[int]()
    for holder, text in [(0, "France?"), (12, "Spain?")]:
        tree.insert("", f"You are kind. Q: {text}".encode(), holder, 8)
    rows, _ = tree.snapshot()
    assert render_fleet(rows, ["0", "1", "12"], width=60) == FLEET


def test_snapshot_is_plain_data_with_a_prefix_of_each_run(tree: RadixTree) -> None:
    rows = tree.snapshot(max_token_ids=4)
    assert json.loads(json.dumps(rows)) == rows
    assert rows[1] == {
        "id": rows[1]["id"],
        "parent": rows[0]["id"],
        "namespace": "",
        "num_tokens": 29,
        "token_ids": [ord(char) for char in "You "],
        "lock_ref": 1,
        "lease_ref": 0,
        "pin_ref": 0,
        "host_tokens": 0,
        "hits": 2,
        "last_use": rows[1]["last_use"],
    }
    seen: set[int | None] = {None}
    for row in rows:
        assert row["parent"] in seen
        seen.add(row["id"])
