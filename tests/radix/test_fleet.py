"""The fleet's tree against a plain record of what each holder has."""

from __future__ import annotations

import random
from itertools import takewhile

import pytest

from stemma.radix.fleet import FleetTree, Place


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
    the = tree.cover_below(tree.root(""), b"the", "a", 1)
    tree.cover_below(the, b" dog", "a", 1)
    cat = tree.cover_below(the, b" cat", "a", 1)
    cats = tree.cover_below(the, b" cats", "a", 2)
    assert tree.match("", b"the cats")["a"] == pytest.approx(1 + 1 + 2 / 5)
    tree.uncover_above(cat, 4, "a")
    assert tree.match("", b"the cats")["a"] == pytest.approx(1 + 1 + 2 / 5)
    assert tree.uncover_above(cats, 5, "a") is the
    assert tree.match("", b"the cats") == pytest.approx({"a": 1.25})
    tree.uncover("", b"the dog", "a")
    assert tree.num_bytes == 0 and tree.match("", b"the") == {}


def test_what_was_used_longest_ago_is_forgotten_first() -> None:
    tree = FleetTree[int]()
    for number in range(10):
        tree.insert("", b"%d" % number + b"x" * 99, 0, 100)
    tree.match("", b"3" + b"x" * 99)
    tree.shrink(5000)
    assert tree.size_bytes <= 5000
    assert tree.match("", b"3" + b"x" * 99) and not tree.match("", b"0" + b"x" * 99)
    tree.shrink(0)
    assert tree.size_bytes == 0


def test_a_long_chain_is_forgotten_from_its_end() -> None:
    tree = FleetTree[int]()
    for length in range(1, 3000):
        tree.insert("", b"x" * length, 0, length)
    tree.shrink(tree.size_bytes - 1)
    assert 1500 < tree.match("", b"x" * 3000)[0] < 2500
    tree.shrink(0)
    assert tree.num_nodes == 0


def test_names_take_room_too_and_leave_nothing() -> None:
    """Namespaces are clients' words, and so are adapters that there are not."""
    tree = FleetTree[int]()
    for number in range(100):
        for text in (b"", b"x"):
            tree.cover(f"n{number}", text, 0, 1)
            tree.uncover(f"n{number}", text, 0)
        assert tree.size_bytes == 0
    for number in range(100):
        tree.insert(f"n{number}", b"", 0, 0)
        tree.insert(f"n{number}", b"x", 0, 1)
    assert tree.size_bytes > 100 * 500
    tree.shrink(30_000)
    assert tree.match("n99", b"x") and not tree.match("n0", b"x") and tree.size_bytes <= 30_000


def test_a_snapshot_tells_who_has_which_run_and_joins_what_nothing_divides() -> None:
    tree = FleetTree[int]()
    end = tree.cover_below(tree.root(""), b"the quick", 0, 3)
    end = tree.cover_below(end, b" brown fox", 0, 4)
    tree.cover_below(end, b" jumps", 0, 2)
    end = tree.cover_below(tree.root(""), b"the quick", 1, 2)
    tree.cover_below(end, b" red", 1, 1)
    tree.cover("#x", "né".encode()[:2], 1, 1)
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
            tree.cover("", text, holder, len(text))
            held[holder].append(text)
        elif rng.random() < 0.05:
            tree.forget(holder)
            held[holder].clear()
        else:
            text = held[holder].pop(rng.randrange(len(held[holder])))
            tree.uncover("", text, holder)
        query = bytes(rng.choice(b"ab") for _ in range(12))
        wanted = {
            each: max((num_same(query, text) for text in texts), default=0)
            for each, texts in held.items()
        }
        found = tree.match("", query)
        assert {each: round(found.get(each, 0.0)) for each in held} == wanted
    prefixes = {text[:end] for texts in held.values() for text in texts for end in range(12)}
    assert tree.num_bytes == len(prefixes - {b""})


@pytest.mark.parametrize("seed", range(8))
def test_nodes_by_places_are_as_nodes_by_texts(seed: int) -> None:
    """Nodes that grow, end earlier and leave, of two holders in one tree, each under its parent."""
    rng = random.Random(seed)
    tree = FleetTree[int]()
    nodes: list[tuple[int, bytes, bytes, Place[int]]] = []  # holder, above, its own text, its end
    for _ in range(300):
        draw = rng.random()
        text = bytes(rng.choice(b"ab") for _ in range(rng.randrange(1, 5)))
        if draw < 0.4 or not nodes:
            holder = rng.randrange(2)
            before, place = b"", tree.root("")
            if rng.random() < 0.7 and (own := [each for each in nodes if each[0] == holder]):
                _, above, ending, place = rng.choice(own)
                before = above + ending
            nodes.append((holder, before, text, tree.cover_below(place, text, holder, len(text))))
        else:
            index = rng.choice([i for i, each in enumerate(nodes) if is_leaf(each, nodes)])
            holder, before, own_text, place = nodes.pop(index)
            if draw < 0.6:
                end = tree.extend(place, text, holder, len(text))
                nodes.append((holder, before, own_text + text, end))
            else:
                num_bytes = rng.randrange(1, len(own_text) + 1)
                middle = tree.above(place, num_bytes)
                assert tree.uncover_above(place, num_bytes, holder) is middle
                if num_bytes < len(own_text):
                    nodes.append((holder, before, own_text[:-num_bytes], middle))
        for each in (0, 1):
            texts = [above + ending for holder, above, ending, _ in nodes if holder == each]
            query = bytes(rng.choice(b"ab") for _ in range(12))
            wanted = max((num_same(query, text) for text in texts), default=0)
            assert round(tree.match("", query).get(each, 0.0)) == wanted


def is_leaf(
    node: tuple[int, bytes, bytes, object], nodes: list[tuple[int, bytes, bytes, Place[int]]]
) -> bool:
    """Whether no other one of its holder may stand on it."""
    whole = node[1] + node[2]
    return not any(each[0] == node[0] and each[1].startswith(whole) for each in nodes)
