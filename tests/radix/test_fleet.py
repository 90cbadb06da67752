"""The fleet's tree against a plain record of what each holder has."""

from __future__ import annotations

import random
from itertools import takewhile

import pytest

from stemma.radix.fleet import FleetTree


def test_holders_of_a_text_have_the_tokens_of_what_they_share() -> None:
    tree = FleetTree[str]()
    tree.insert("", b"the quick brown fox", "a", 4)
    tree.insert("", b"the quick", "b", 2)
    assert tree.match("", b"the quick brown fox jumps") == pytest.approx({"a": 4.0, "b": 2.0})
    assert tree.match("", b"the slow") == pytest.approx({"a": 4 * 4 / 19, "b": 2 * 4 / 9})
    assert tree.match("", b"a slow") == {} and tree.match("other", b"the") == {}


def test_what_is_covered_twice_is_there_until_it_is_uncovered_twice() -> None:
    """Two nodes of one holder may write the same bytes: siblings that begin alike."""
    tree = FleetTree[str]()
    tree.cover("", b"the", 0, "a", 1)
    tree.cover("", b"the cat", 3, "a", 1)
    tree.cover("", b"the cats", 3, "a", 2)
    assert tree.match("", b"the cats")["a"] == pytest.approx(1 + 1 + 2 / 5)
    tree.uncover("", b"the cat", 3, "a")
    assert tree.match("", b"the cats")["a"] == pytest.approx(1 + 1 + 2 / 5)
    tree.uncover("", b"the cats", 3, "a")
    assert tree.match("", b"the cats") == pytest.approx({"a": 1.0})
    tree.uncover("", b"the", 0, "a")
    assert tree.num_bytes == 0 and tree.match("", b"the") == {}


def test_what_was_used_longest_ago_is_forgotten_first() -> None:
    tree = FleetTree[int]()
    for number in range(10):
        tree.insert("", b"%d" % number + b"x" * 99, 0, 100)
    tree.match("", b"3" + b"x" * 99)
    tree.shrink(500)
    assert tree.num_bytes <= 500
    assert tree.match("", b"3" + b"x" * 99) and not tree.match("", b"0" + b"x" * 99)


def test_a_snapshot_tells_who_has_which_run_and_joins_what_nothing_divides() -> None:
    tree = FleetTree[int]()
    tree.cover("", b"the quick", 0, 0, 3)
    tree.cover("", b"the quick brown fox", 9, 0, 4)
    tree.cover("", b"the quick brown fox jumps", 19, 0, 2)
    tree.cover("", b"the quick", 0, 1, 2)
    tree.cover("", b"the quick red", 9, 1, 1)
    tree.cover("#x", "né".encode()[:2], 0, 1, 1)
    rows, is_whole = tree.snapshot(max_bytes=10)
    assert is_whole
    assert [(r["namespace"], r["text"], r["is_cut"], r["holders"]) for r in rows] == [
        ("", "", False, {"0": 9, "1": 3}),
        ("#x", "", False, {"1": 1}),
        ("#x", "n\ufffd", False, {"1": 1}),
        ("", "the quick ", False, {"0": 3, "1": 2}),
        ("", "red", False, {"1": 1}),
        ("", "brown fox ", True, {"0": 6}),
    ]
    assert [row["parent"] for row in rows] == [None, None, 2, 1, 4, 4]
    assert sum(row["num_bytes"] for row in rows) == tree.num_bytes
    assert all(row["parent"] is None for row in rows if not row["num_tokens"])


def test_a_snapshot_that_is_cut_has_what_was_used_last() -> None:
    tree = FleetTree[int]()
    for number in range(10):
        tree.insert("", b"%d" % number + b"x" * 99, 0, 100)
    tree.match("", b"3x")
    rows, is_whole = tree.snapshot(max_nodes=2)
    assert not is_whole and [row["text"][:1] for row in rows] == ["", "3", "9"]
    assert tree.snapshot(namespace="other") == ([], True)


def num_same(one: bytes, other: bytes) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_covering_and_uncovering_leaves_what_is_covered(seed: int) -> None:
    rng = random.Random(seed)
    tree = FleetTree[int]()
    held: dict[int, list[bytes]] = {holder: [] for holder in range(3)}
    for _ in range(400):
        holder = rng.randrange(3)
        if rng.random() < 0.5 or not held[holder]:
            text = bytes(rng.choice(b"ab") for _ in range(rng.randrange(1, 12)))
            tree.cover("", text, 0, holder, len(text))
            held[holder].append(text)
        elif rng.random() < 0.05:
            tree.forget(holder)
            held[holder].clear()
        else:
            text = held[holder].pop(rng.randrange(len(held[holder])))
            tree.uncover("", text, 0, holder)
        query = bytes(rng.choice(b"ab") for _ in range(12))
        wanted = {
            each: max((num_same(query, text) for text in texts), default=0)
            for each, texts in held.items()
        }
        found = tree.match("", query)
        assert {each: round(found.get(each, 0.0)) for each in held} == wanted
    prefixes = {text[:end] for texts in held.values() for text in texts for end in range(12)}
    assert tree.num_bytes == len(prefixes - {b""})
