"""Belady's choice on a tree of prefixes: by hand, and against every possible choice."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.bench.scheduling.clairvoyant import Use, num_hits

Prefix = tuple[int, ...]


def in_turn(*prompts: str, output: str = "") -> list[Use]:
    """Calls that run one after the other, a letter a token."""
    return [
        Use([*map(ord, prompt)], [*map(ord, output)], float(i), i + 0.5)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("prompts", "capacity", "hits"),
    [
        (("abcd", "abcd"), 4, 3),  # the last token of a prompt is always computed
        (("abcd", "abcd"), 2, 2),  # the tail goes first
        (("abcx", "abcy", "abcz"), 4, 6),
        (("aaa", "bbb", "aaab"), 3, 0),  # there is no room for both, and b is being used
        (("aaa", "bbb", "aaab"), 5, 2),
        (("aaa", "bbb", "ccc", "aaab", "bbb"), 8, 5),  # c goes, which nobody uses again
        (("aaa", "bbb", "ccc", "aaab", "bbb"), 6, 3),  # and b, while c is being used
        (("a", "b", "c"), 1, 0),
    ],
)
def test_what_is_used_again_last_goes_first(
    prompts: tuple[str, ...], capacity: int, hits: int
) -> None:
    assert num_hits(in_turn(*prompts), capacity) == hits


def test_an_output_is_kept_for_the_call_that_goes_on_from_it() -> None:
    first, *others = in_turn("ab", "abxy", "cd")
    spoken = Use(first.prompt, [ord("x")], first.admitted_s, first.ended_s)
    assert num_hits([spoken, *others], 8) == 3
    assert num_hits([first, *others], 8) == 2


def test_what_a_running_call_uses_stays() -> None:
    long = Use([1, 2, 3], [], 0.0, 9.0)
    assert num_hits([long, Use([4, 5], [], 1.0, 2.0), Use([1, 2, 3], [], 3.0, 4.0)], 2) == 2
    short = Use([1, 2, 3], [], 0.0, 0.5)
    assert num_hits([short, Use([4, 5], [], 1.0, 2.0), Use([1, 2, 3], [], 3.0, 4.0)], 2) == 0


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_no_other_choice_hits_more(data: st.DataObject) -> None:
    """Over random calls, some of which overlap and share prefixes."""
    num_calls = data.draw(st.integers(1, 4))
    tokens = st.lists(st.integers(0, 1), max_size=2)
    ticks = data.draw(st.permutations(range(2 * num_calls)))
    uses = []
    for call in range(num_calls):
        prompt = [data.draw(st.integers(0, 1)), *data.draw(tokens), *data.draw(tokens)]
        admitted, ended = sorted(ticks[2 * call : 2 * call + 2])
        uses.append(Use(prompt, data.draw(tokens), float(admitted), float(ended)))
    capacity = data.draw(st.integers(0, 7))
    assert num_hits(uses, capacity) == most_hits(uses, capacity)


def most_hits(uses: list[Use], capacity: int) -> int:
    """By trying every set of tokens that may stay after each event."""
    events = sorted(
        [(use.admitted_s, True, use) for use in uses] + [(use.ended_s, False, use) for use in uses],
        key=lambda event: event[0],
    )

    @cache
    def best_from(number: int, resident: frozenset[Prefix]) -> int:
        if number == len(events):
            return 0
        _, is_admission, use = events[number]
        known = prefixes(use.prompt)
        hits = 0
        if is_admission:
            hits = sum(known[: i + 1] == [p for p in known[: i + 1] if p in resident]
                       for i in range(len(known) - 1))  # fmt: skip
            present = resident | set(known)
        else:
            present = resident | set(prefixes([*use.prompt, *use.output]))
        now_s = events[number][0]
        running = [u for u in uses if u.admitted_s <= now_s < u.ended_s]
        locked = {prefix for u in running for prefix in prefixes(u.prompt)}
        free = sorted(present - locked)
        num_kept = min(len(free), max(0, capacity - len(locked)))
        return hits + max(
            best_from(number + 1, frozenset(locked.union(kept)))
            for kept in combinations(free, num_kept)
            if is_closed(locked.union(kept))
        )

    return best_from(0, frozenset())


def prefixes(token_ids: list[int] | tuple[int, ...]) -> list[Prefix]:
    return [tuple(token_ids[: i + 1]) for i in range(len(token_ids))]


def is_closed(kept: set[Prefix]) -> bool:
    return all(prefix[:-1] in kept for prefix in kept if len(prefix) > 1)
