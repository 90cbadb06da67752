"""Exactness, part c (see test_exactness.py): low precision and fast kernels.

The tokens that path A chose (batch, cache hits, chunks) are replayed through path B (one scoring
pass on an empty cache); at every position the best logprob exceeds that of A's token by at most
tau, the reference kernels' own error against a wider type, measured by the test on the same tokens
and printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from exactness_jobs import (
    GREEDY,
    Load,
    loading,
    score,
    serve,
)

from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.schedule.request import Request, Scoring


@pytest.fixture(scope="module")
def load(checkpoint: Path) -> Iterator[Load]:
    yield from loading(checkpoint)


@dataclass(frozen=True)
class Replay:
    """Logprobs at each generated position: of path A's token, and the best one's."""

    chosen: list[float]
    best: list[float]


def replay(loaded: LoadedModel, request: Request, best_ids: list[int] | None = None) -> Replay:
    """Path B: one pass over A's tokens on an empty cache, against A's and the best tokens.

    `best_ids`: score these instead of this path's own best tokens.
    """
    token_ids = request.token_ids[:-1]
    start = request.num_prompt_tokens - 1
    loaded.engine.flush_cache()
    chosen = score(loaded, token_ids, Scoring(start, tuple(request.output_ids)))
    targets = tuple(best_ids or chosen.score_argmax)
    loaded.engine.flush_cache()
    best = score(loaded, token_ids, Scoring(start, targets))
    assert best.num_cached_tokens == 0
    return Replay(chosen.scores, best.scores)


@pytest.mark.parametrize(
    ("dtype", "wider"), [("bfloat16", "float32"), ("float32", "float64")], ids=str
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_tokens_of_the_fast_path_are_best_within_the_reference_error(
    load: Load, dtype: str, wider: str, page_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = load(
        dtype=dtype,
        kernels="auto",
        page_size=page_size,
        chunked_prefill_size=24,
        max_total_tokens=208,
    )
    serve(fast, GREEDY)  # so that path A has cache hits
    path_a = serve(fast, [replace(job, arrives=i) for i, job in enumerate(GREEDY)])
    assert sum(request.num_cached_tokens for request in path_a) > 0
    path_b = load(dtype=dtype, kernels="auto", page_size=page_size)
    reference, wide = load(dtype=dtype), load(dtype=wider)
    excess, error, excess_of_wrong = 0.0, 0.0, 0.0
    for request in path_a:
        mine = replay(path_b, request)
        excess = max(excess, *(b - c for b, c in zip(mine.best, mine.chosen)))
        wrong = [(token_id + 1) % 256 for token_id in request.output_ids]
        wrongs = replay(path_b, request, wrong).best
        excess_of_wrong = max(excess_of_wrong, *(b - w for b, w in zip(mine.best, wrongs)))
        argmax = score(wide, request.token_ids[:-1], _scoring_of(request)).score_argmax
        truth = replay(wide, request, argmax)
        theirs = replay(reference, request, argmax)
        for a, b in ((truth.chosen, theirs.chosen), (truth.best, theirs.best)):
            error = max(error, *(abs(x - y) for x, y in zip(a, b)))
    tau = 2 * error  # the excess is a difference of two logprobs
    with capsys.disabled():
        print(
            f"\n  exactness {dtype}, page size {page_size}: excess {excess:.2e}, tau {tau:.2e} "
            f"(2 x the reference kernels' error against {wider})"
        )
    assert excess <= tau
    assert excess_of_wrong > tau, "tau is so large that wrong tokens would pass"


def _scoring_of(request: Request) -> Scoring:
    return Scoring(request.num_prompt_tokens - 1, tuple(request.output_ids))
