"""Exactness (see test_exactness.py) of drafts: outputs are those without any, whoever guesses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exactness_jobs import (
    CONSTRAINED,
    JOBS,
    Job,
    Load,
    loading,
    outputs_of,
    said_alone,
    serve,
)
from scripted_drafters import (
    ScriptedDrafter,
    always_wrong,
    oracle,
    sometimes_right,
    speculate,
    verify_all,
)


@pytest.fixture(scope="module")
def load(checkpoint: Path) -> Iterator[Load]:
    yield from loading(checkpoint)


@pytest.fixture(scope="module", params=JOBS)
def jobs(request: pytest.FixtureRequest) -> list[Job]:
    return JOBS[request.param]


@pytest.fixture(scope="module")
def alone(load: Load, jobs: list[Job]) -> list[list[int]]:
    return said_alone(load, jobs)


@pytest.mark.parametrize("kind", ["oracle", "wrong", "random"])
@pytest.mark.parametrize(
    ("page_size", "chunk", "options"),
    [
        (1, 2048, {}),
        (1, 7, {"kernels": "cpu"}),
        (16, 23, {}),
        (1, 32, {"max_total_tokens": 160}),
        (1, 24, {"device": "cuda", "disable_overlap": True}),
    ],
)
def test_tokens_are_identical_whatever_is_drafted(
    load: Load,
    jobs: list[Job],
    alone: list[list[int]],
    kind: str,
    page_size: int,
    chunk: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also beside requests that are aborted amid their drafts, and with too few pages for all."""
    rng = random.Random(page_size + chunk)
    guess = {"oracle": oracle, "wrong": always_wrong, "random": sometimes_right(rng)}[kind]
    loaded = load(page_size=page_size, chunked_prefill_size=chunk, **options)
    scheduler, stats = loaded.engine.scheduler, loaded.engine.scheduler.stats
    if "max_total_tokens" in options:
        monkeypatch.setattr(scheduler.admission, "_require_room", lambda *_: None)
    outputs = {job.prompt: output for job, output in zip(jobs, alone)}
    num_before, num_steps = stats.num_accepted_tokens, stats.num_steps
    drafted = stats.num_draft_tokens
    speculate(loaded.engine, ScriptedDrafter(outputs, guess))
    try:
        leaving = [replace(job, arrives=i, leaves=i + 4) for i, job in enumerate(jobs)]
        assert outputs_of(serve(loaded, [*jobs, *leaving]))[: len(jobs)] == alone
    finally:
        scheduler.speculation = None
    num_accepted = stats.num_accepted_tokens - num_before
    assert stats.num_draft_tokens > drafted and stats.num_steps > num_steps
    assert (num_accepted > 0) == (kind != "wrong")


@pytest.mark.parametrize("drafters", ["auto", "suffix", "siblings,grammar", "ngram"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 2048), (16, 23)])
def test_tokens_are_identical_with_the_drafters_there_are(
    load: Load,
    jobs: list[Job],
    alone: list[list[int]],
    drafters: str,
    page_size: int,
    chunk: int,
) -> None:
    """Also when all has been said before; whatever a guess costs, it is verified."""
    loaded = load(page_size=page_size, chunked_prefill_size=chunk, speculate=drafters)
    stats, speculation = loaded.engine.scheduler.stats, loaded.engine.scheduler.speculation
    assert speculation is not None
    verify_all(speculation)
    num_before = stats.num_accepted_tokens
    for _ in range(3):
        requests = serve(loaded, jobs)
        assert outputs_of(requests) == alone
        loaded.engine.flush_cache()
    if drafters in ("auto", "suffix") and jobs is not CONSTRAINED:
        assert stats.num_accepted_tokens > num_before, "what was said before was not guessed"
