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
    Load,
    loading,
    outputs_of,
    serve,
    truth,
)
from preemptions import admit_all
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


KINDS = ("oracle", "wrong", "random")
CIRCUMSTANCES: list[tuple[int, int, dict[str, Any]]] = [
    (1, 2048, {}),
    (1, 7, {"kernels": "cpu"}),
    (16, 23, {}),
    (1, 32, {"max_total_tokens": 160}),
    (1, 24, {"device": "cuda", "disable_overlap": True}),
]
DRAFTERS = ("auto", "suffix", "siblings,grammar", "ngram")
CHUNKS = ((1, 2048), (16, 23))


@pytest.fixture
def alone(checkpoint: Path, name: str) -> list[list[int]]:
    return truth(checkpoint, name)


@pytest.mark.parametrize(
    ("name", "circumstances", "kind"),
    [  # each pair of two of them
        (name, circumstances, KINDS[(i + j) % len(KINDS)])
        for i, name in enumerate(JOBS)
        for j, circumstances in enumerate(CIRCUMSTANCES)
    ],
    ids=str,
)
def test_tokens_are_identical_whatever_is_drafted(
    load: Load,
    name: str,
    alone: list[list[int]],
    circumstances: tuple[int, int, dict[str, Any]],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also beside requests that are aborted amid their drafts, and with too few pages for all."""
    jobs, (page_size, chunk, options) = JOBS[name], circumstances
    rng = random.Random(page_size + chunk)
    guess = {"oracle": oracle, "wrong": always_wrong, "random": sometimes_right(rng)}[kind]
    loaded = load(page_size=page_size, chunked_prefill_size=chunk, **options)
    scheduler, stats = loaded.engine.scheduler, loaded.engine.scheduler.stats
    if "max_total_tokens" in options:
        admit_all(monkeypatch, scheduler)
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


@pytest.mark.parametrize(
    ("name", "drafters", "chunks"),
    [  # each pair of two of them
        (name, drafters, CHUNKS[(i // 2 + j) % len(CHUNKS)])
        for i, name in enumerate(JOBS)
        for j, drafters in enumerate(DRAFTERS)
    ],
    ids=str,
)
def test_tokens_are_identical_with_the_drafters_there_are(
    load: Load, name: str, alone: list[list[int]], drafters: str, chunks: tuple[int, int]
) -> None:
    """Also when all has been said before; whatever a guess costs, it is verified."""
    jobs, (page_size, chunk) = JOBS[name], chunks
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
