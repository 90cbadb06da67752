"""Where experts and their copies go."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemma.runtime.models.layers.expert_placement import (
    NUM_TURNS,
    group_loads,
    place_experts,
    places_of,
)

LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=24)


@given(LOADS, st.integers(1, 8), st.integers(0, 6))
def test_each_expert_is_somewhere_and_groups_are_equal_to_within_one(
    loads: list[int], num_groups: int, num_extra: int
) -> None:
    num_groups = min(num_groups, len(loads))
    placement = place_experts(loads, num_groups, num_extra)
    assert {expert for own in placement for expert in own} == set(range(len(loads)))
    assert all(len(set(own)) == len(own) for own in placement)
    sizes = [len(own) for own in placement]
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) <= len(loads) + num_groups * num_extra
    assert sum(group_loads(placement, loads)) == pytest.approx(sum(loads))


@given(LOADS, st.integers(1, 8), st.integers(0, 6))
def test_the_busiest_group_never_has_more_to_do_with_more_copies(
    loads: list[int], num_groups: int, num_extra: int
) -> None:
    num_groups = min(num_groups, len(loads))
    fewer, more = (place_experts(loads, num_groups, num_extra + i) for i in (0, 1))
    assert max(group_loads(more, loads)) <= max(group_loads(fewer, loads))


def test_a_hot_expert_is_everywhere_before_a_cold_one_is_twice() -> None:
    loads = [800, 10, 10, 10, 10, 10, 10, 10]
    assert max(group_loads(place_experts(loads, 4, 0), loads)) >= 800
    placement = place_experts(loads, 4, 1)
    assert all(0 in own for own in placement)
    assert max(group_loads(placement, loads)) <= 220


@given(LOADS, st.integers(1, 8), st.integers(0, 4))
def test_each_turn_has_each_expert_in_one_group_and_copies_have_equally_many_turns(
    loads: list[int], num_groups: int, num_extra: int
) -> None:
    num_groups = min(num_groups, len(loads))
    placement = place_experts(loads, num_groups, num_extra)
    places = places_of(placement)
    assert len(places) == (NUM_TURNS if sum(map(len, placement)) > len(loads) else 1)
    for expert in range(len(loads)):
        taken = [turn[expert] for turn in places]
        assert all(placement[group][slot] == expert for group, slot in taken)
        counts = Counter(group for group, _ in taken)
        assert set(counts) == {group for group in range(num_groups) if expert in placement[group]}
        assert max(counts.values()) - min(counts.values()) <= 1
