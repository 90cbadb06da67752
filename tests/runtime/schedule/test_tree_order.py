"""Depth-first row order, and which shared runs become segments."""

from __future__ import annotations

from array import array

import pytest
from fakes import FakeListener
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.radix.tree import RadixTree
from stemma.runtime.schedule.plan import SharedSegment
from stemma.runtime.schedule.request import Request
from stemma.runtime.schedule.sampling_params import SamplingParams
from stemma.runtime.schedule.tree_order import TreeOrder


def requests_of(prompts: list[str], page_size: int = 1) -> tuple[TreeOrder, list[Request]]:
    """Requests on a tree that has all of their whole pages, and its order."""
    tree = RadixTree(page_size)
    requests = []
    for number, prompt in enumerate(prompts):
        tokens = array("i", list(prompt.encode()))
        request = Request(number, tokens, SamplingParams(), FakeListener())
        whole = len(tokens) // page_size
        tree.insert("", tokens[: whole * page_size], range(number * 100, number * 100 + whole))
        requests.append(request)
    for request in requests:
        request.node = tree.match("", request.prompt).node
        tree.lock(request.node)
    for request in requests:  # later inserts may have split what earlier ones matched
        request.node = tree.match("", request.prompt).node
    return TreeOrder(tree), requests


def segments_of(prompts: list[str], cost: int = 0, page_size: int = 1) -> list[tuple[int, ...]]:
    order, requests = requests_of(prompts, page_size)
    starts = [len(prompts[index]) - 1 for index in order.depth_first(requests)]
    segments = order.segments(starts, cost)
    return [(s.token_start, s.token_end, s.row_start, s.row_end) for s in segments]


def test_users_of_a_node_are_neighbours_at_every_level() -> None:
    prompts = ["aax.", "b1..", "aay.", "b2..", "ab..", "aax,"]
    order, requests = requests_of(prompts)
    ordered = [prompts[index] for index in order.depth_first(requests)]
    for prefix in ("a", "aa", "aax", "b"):
        places = [i for i, prompt in enumerate(ordered) if prompt.startswith(prefix)]
        assert places == list(range(places[0], places[0] + len(places))), (prefix, ordered)


def test_segments_are_nested_as_the_tree_is() -> None:
    assert segments_of(["aaaa11.", "aaaa12.", "aaaa2.", "b."]) == [(0, 4, 0, 3), (4, 5, 0, 2)]


def test_nothing_is_shared_past_a_rows_first_input() -> None:
    order, requests = requests_of(["aaaaaaaa1", "aaaaaaaa2"])
    order.depth_first(requests)
    assert order.segments([5, 8], 0) == (SharedSegment(0, 5, 0, 2),)
    assert order.segments([0, 8], 0) == ()


def test_segments_end_at_whole_pages() -> None:
    assert segments_of(["aaaaaaaa1234", "aaaaaaaa5678"], page_size=4) == [(0, 8, 0, 2)]
    order, requests = requests_of(["aaaaaaaa1234", "aaaaaaaa5678"], page_size=4)
    order.depth_first(requests)
    assert order.segments([7, 11], 0) == (SharedSegment(0, 4, 0, 2),)


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (0, [(0, 4, 0, 4), (4, 9, 0, 3)]),
        (3, [(0, 9, 0, 3)]),  # 4 tokens for 4 rows do not pay: 3 of the rows share the longer run
        (6, []),
    ],
)
def test_a_run_that_does_not_pay_is_joined_to_the_longer_run_below(
    cost: int, expected: list[tuple[int, ...]]
) -> None:
    assert segments_of(["aaaabbbbb1", "aaaabbbbb2", "aaaabbbbb3", "aaaac."], cost) == expected


def test_unrelated_rows_share_nothing() -> None:
    assert segments_of(["abc", "bcd", "cde"]) == []
    assert segments_of(["abc"]) == []


@given(st.lists(st.text("ab", min_size=1, max_size=8), min_size=2, max_size=6, unique=True))
@settings(max_examples=60, deadline=None)
def test_what_is_kept_from_step_to_step_is_what_is_found_anew(prompts: list[str]) -> None:
    """While requests come, end, go on, and have the nodes of others split."""
    tree = RadixTree()
    kept, running = TreeOrder(tree), list[Request]()
    for number, prompt in enumerate(prompts):
        tokens = array("i", list(prompt.encode()))
        tree.insert("", tokens, range(number * 100, number * 100 + len(tokens)))
        request = Request(number, tokens, SamplingParams(), FakeListener())
        request.node = tree.match("", tokens).node
        tree.lock(request.node)
        running.append(request)
        if number % 3 == 2:
            left = running.pop(0)
            assert left.node is not None
            tree.unlock(left.node)
        for later in range(2):  # the second time nothing is new but the rows' ends
            order, anew = kept.depth_first(running), TreeOrder(tree)
            assert order == anew.depth_first(running)
            starts = [running[index].num_prompt_tokens + later - 1 for index in order]
            assert kept.segments(starts, 1) == anew.segments(starts, 1)
