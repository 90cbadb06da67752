"""Which groups of ranks have which experts, and copies of those that many tokens choose (expert
parallelism's load balancing; DeepSeek-V3, section 3.4.1, as its EPLB does it).

Extra copies go to the experts whose copies have most to do; then all copies, those with most first,
to the group with least to do that has room and not that expert (longest processing time first,
Graham 1969).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Placement = tuple[tuple[int, ...], ...]
"""The experts of each group, ascending."""

# A token's turn, which says which copy of an expert computes it, is below this: copies get equal
# parts of the turns to within one.
NUM_TURNS = 64


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Groups of ranks that have other experts of each mixture."""

    count: int = 1
    num_extra: int = 0  # copies that a group has beyond its part of the experts
    # By layer, how many tokens chose each expert; None: not known, and so all alike.
    loads: Mapping[int, Sequence[int]] | None = None

    def placement(self, layer: int, num_experts: int) -> Placement:
        """Of the model's layer with this index; the same on all ranks."""
        loads = (0,) * num_experts if self.loads is None else self.loads[layer]
        return place_experts(loads, self.count, self.num_extra)


ONE_GROUP = ExpertGroups()


def place_experts(loads: Sequence[int], num_groups: int, num_extra: int) -> Placement:
    """loads: of each expert, at least as many as groups; num_extra: at most so many copies a group.

    Groups have equally many experts to within one, each expert once, and each expert is in one at
    least. With more extra copies the busiest group never has more to do; of placements alike in
    this the one with fewest copies, ranges of experts where they suffice. Cost: (1 + num_extra)
    times the copies, logarithmic factors aside.
    """
    candidates = [_ranges(len(loads), num_groups)]
    for extra in range(num_extra + 1):
        candidates.append(_packed(loads, _num_copies(loads, num_groups, extra), num_groups))
    return min(candidates, key=lambda placement: max(group_loads(placement, loads)))


def group_loads(placement: Placement, loads: Sequence[int]) -> list[float]:
    """How much each group has to do, where copies of an expert share its load."""
    shares = [loads[expert] / len(groups) for expert, groups in enumerate(_holders(placement))]
    return [sum(shares[expert] for expert in own) for own in placement]


def places_of(placement: Placement) -> list[list[tuple[int, int]]]:
    """[turns, experts]: which group computes a token with this turn for the expert, and the place
    of the expert among the group's. One turn where there are no copies."""
    holders = _holders(placement)
    places = [
        [(group, placement[group].index(expert)) for group in groups]
        for expert, groups in enumerate(holders)
    ]
    num_turns = NUM_TURNS if any(len(copies) > 1 for copies in places) else 1
    return [[copies[turn % len(copies)] for copies in places] for turn in range(num_turns)]


def _holders(placement: Placement) -> list[list[int]]:
    """The groups that have each expert, ascending."""
    holders: dict[int, list[int]] = {}
    for group, own in enumerate(placement):
        for expert in own:
            holders.setdefault(expert, []).append(group)
    return [holders[expert] for expert in range(len(holders))]


def _ranges(num_experts: int, num_groups: int) -> Placement:
    bounds = [num_experts * group // num_groups for group in range(num_groups + 1)]
    return tuple(tuple(range(*part)) for part in pairwise(bounds))


def _num_copies(loads: Sequence[int], num_groups: int, num_extra: int) -> list[int]:
    """Of each expert, at most one a group."""
    copies = [1] * len(loads)
    if num_groups == 1:
        return copies
    hottest = [(-float(load), expert) for expert, load in enumerate(loads)]
    heapq.heapify(hottest)
    for _ in range(num_groups * num_extra):
        if not hottest:
            break
        _, expert = heapq.heappop(hottest)
        copies[expert] += 1
        if copies[expert] < num_groups:
            heapq.heappush(hottest, (-loads[expert] / copies[expert], expert))
    return copies


def _packed(loads: Sequence[int], copies: Sequence[int], num_groups: int) -> Placement:
    room, num_larger = divmod(sum(copies), num_groups)
    groups: list[set[int]] = [set() for _ in range(num_groups)]
    totals = [0.0] * num_groups
    shares = [load / count for load, count in zip(loads, copies, strict=True)]
    for expert in sorted(range(len(loads)), key=lambda expert: -shares[expert]):
        for _ in range(copies[expert]):
            may_grow = sum(len(own) > room for own in groups) < num_larger
            open_groups = [g for g in range(num_groups) if len(groups[g]) < room + may_grow]
            free = [group for group in open_groups if expert not in groups[group]]
            if free:
                group = min(free, key=lambda group: totals[group])
            else:
                group = _make_room(expert, open_groups[0], groups, totals, shares)
            groups[group].add(expert)
            totals[group] += shares[expert]
    return tuple(tuple(sorted(own)) for own in groups)


def _make_room(
    expert: int,
    open_group: int,
    groups: Sequence[set[int]],
    totals: list[float],
    shares: Sequence[float],
) -> int:
    """Move an expert to the open group, which has this one, from a group that has not and is full:
    it has more experts, and so one that the open group lacks. Returns that group."""
    moves = [
        (max(totals[group] + shares[expert] - shares[moved], totals[open_group] + shares[moved]),
         group, moved)
        for group, own in enumerate(groups) if expert not in own
        for moved in own - groups[open_group]
    ]  # fmt: skip
    _, group, moved = min(moves)
    groups[group].remove(moved)
    groups[open_group].add(moved)
    totals[group] -= shares[moved]
    totals[open_group] += shares[moved]
    return group
