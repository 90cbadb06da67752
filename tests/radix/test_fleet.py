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


def test_what_is_withdrawn_is_gone_with_all_that_goes_on_from_it() -> None:
    tree = FleetTree[str]()
    tree.insert("", b"abcdef", "a", 6)
    tree.insert("", b"abcxyz", "a", 6)
    tree.insert("", b"abcdef", "b", 6)
    tree.withdraw("", b"abcd", 2, "a")
    assert tree.match("", b"abcdef") == pytest.approx({"a": 2.0, "b": 6.0})
    assert tree.match("", b"abcxyz") == pytest.approx({"a": 2.0, "b": 3.0})
    tree.forget("b")
    tree.withdraw("", b"ab", 0, "a")
    assert tree.num_bytes == 0 and tree.match("", b"ab") == {}


def test_what_was_used_longest_ago_is_forgotten_first() -> None:
    tree = FleetTree[int]()
    for number in range(10):
        tree.insert("", b"%d" % number + b"x" * 99, 0, 100)
    tree.match("", b"3" + b"x" * 99)
    tree.shrink(500)
    assert tree.num_bytes <= 500
    assert tree.match("", b"3" + b"x" * 99) and not tree.match("", b"0" + b"x" * 99)


def num_same(one: bytes, other: bytes) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_inserts_and_withdrawals_leaves_what_was_left(seed: int) -> None:
    rng = random.Random(seed)
    tree = FleetTree[int]()
    held: dict[int, set[bytes]] = {holder: set() for holder in range(3)}  # all prefixes
    for _ in range(400):
        holder = rng.randrange(3)
        text = bytes(rng.choice(b"ab") for _ in range(rng.randrange(1, 12)))
        if rng.random() < 0.6:
            tree.insert("", text, holder, len(text))
            held[holder] |= {text[:end] for end in range(1, len(text) + 1)}
        elif rng.random() < 0.1:
            tree.forget(holder)
            held[holder].clear()
        else:
            kept = rng.randrange(len(text) + 1)
            tree.withdraw("", text, kept, holder)
            has = max((num_same(text, p) for p in held[holder]), default=0)
            if has > kept:
                gone = text[: kept + 1]
                held[holder] = {p for p in held[holder] if not p.startswith(gone)}
        query = bytes(rng.choice(b"ab") for _ in range(12))
        wanted = {
            each: max((num_same(query, p) for p in prefixes), default=0)
            for each, prefixes in held.items()
        }
        found = tree.match("", query)
        assert {each: round(found.get(each, 0.0)) for each in held} == wanted
    distinct = set().union(*held.values())
    assert tree.num_bytes == len(distinct)
