"""The picture of a tree, against a golden text, and the snapshot that it is drawn from."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from stemma.radix.render import render
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
        "hits": 2,
        "last_use": rows[1]["last_use"],
    }
    seen: set[int | None] = {None}
    for row in rows:
        assert row["parent"] in seen
        seen.add(row["id"])
