"""The rules of beam search: which candidates there are."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from math import inf

import pytest

from stemma.runtime.schedule.beam_search import BeamParams, BeamSearch, Hypothesis
from stemma.runtime.schedule.plan import TokenLogprob


class Counted(list[TokenLogprob]):
    num_read = 0

    def __iter__(self) -> Iterator[TokenLogprob]:
        for item in super().__iter__():
            self.num_read += 1
            yield item


@pytest.mark.parametrize("seed", range(30))
def test_candidates_are_the_best_of_all_hypotheses_and_no_more_are_read(seed: int) -> None:
    """Of equal ones the first hypothesis's are first; what is not allowed is none."""
    rng = random.Random(seed)
    width = rng.randint(1, 6)
    search = BeamSearch(BeamParams(width), num_stop_ids=rng.randint(0, 3), max_tokens=9)
    search.live = [Hypothesis(array("i"), -rng.randint(0, 4) / 2) for _ in range(width)]
    best = []
    for _ in range(width):
        values = [-rng.choice((0.5, 1.0, 1.5, 2.0, inf)) for _ in range(search.num_candidates)]
        values.sort(reverse=True)
        best.append(Counted(TokenLogprob(rng.randrange(99), value) for value in values))
    every = [
        (parent, token_id, hypothesis.logprob + logprob)
        for parent, hypothesis in enumerate(search.live)
        for token_id, logprob in list.__iter__(best[parent])
        if logprob > -inf
    ]
    every.sort(key=lambda candidate: -candidate[2])
    found = search.candidates(best)
    assert [tuple(candidate) for candidate in found] == every[: search.num_candidates]
    if len(found) == search.num_candidates:
        assert sum(tokens.num_read for tokens in best) <= search.num_candidates + width
