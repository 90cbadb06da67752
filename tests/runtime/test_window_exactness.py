"""A model whose layers all see windows gives up the KV behind them as requests go on: in float64
all of them say what they say with all KV, whatever is cached, chunked, preempted or swapped, in
memory that does not grow with the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapters import make_adapter
from checkpoints import make_checkpoint
from exactness_jobs import (
    ADJUSTED,
    CONSTRAINED,
    GREEDY,
    SAMPLED,
    Job,
    Load,
    loading,
    outputs_of,
    said_alone,
    score,
    serve,
)
from preemptions import admit_all

from stemma.errors import InvalidRequest, PromptTooLong
from stemma.frontend.protocol.kv_policy import snapkv, streaming
from stemma.runtime.schedule.request import Scoring

WINDOW = 16


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("windowed"), "mistral", num_layers=3, sliding_window=WINDOW
    )


@pytest.fixture(scope="module")
def load(windowed: Path) -> Iterator[Load]:
    yield from loading(windowed)


def _longer(job: Job, num_tokens: int) -> Job:
    sampling = replace(job.sampling, max_tokens=num_tokens, stop_token_ids=(), min_tokens=0)
    return replace(job, sampling=sampling)


JOBS = [
    _longer(GREEDY[0], 90),
    _longer(SAMPLED[4], 60),
    _longer(CONSTRAINED[3], 70),
    _longer(ADJUSTED[7], 50),
    _longer(SAMPLED[6], 40),
    GREEDY[5],
    GREEDY[7],
    _longer(ADJUSTED[6], 30),
]


@pytest.fixture(scope="module")
def alone(load: Load) -> list[list[int]]:
    """With all KV."""
    return said_alone(lambda: load(kv_policy="none"), JOBS)


@pytest.mark.parametrize(
    ("options", "num_runs"),
    [
        ({}, 1),
        ({"chunked_prefill_size": 5}, 1),
        ({"chunked_prefill_size": 64, "max_running_requests": 3}, 2),
        ({"kernels": "cpu", "chunked_prefill_size": 23}, 2),
        ({"schedule_policy": "program"}, 1),
        ({"speculate": "auto"}, 2),
        ({"page_size": 16, "chunked_prefill_size": 23}, 2),
        ({"page_size": 5}, 1),
    ],
)
def test_outputs_are_those_with_all_kv(
    load: Load, alone: list[list[int]], options: dict[str, Any], num_runs: int
) -> None:
    loaded = load(**options)
    for _ in range(num_runs):
        requests = serve(loaded, JOBS)
        assert outputs_of(requests) == alone
        assert all(request.num_dropped >= request.num_text_tokens // 2 for request in requests[1:])
        most = WINDOW + WINDOW // 2 + 2 * loaded.engine.scheduler.kv_cache.page_size
        most += 16 * (loaded.engine.scheduler.speculation is not None)  # right at once, at the end
        assert all(request.num_tokens <= most for request in requests)


@pytest.mark.parametrize("host", [0, 512])
def test_outputs_do_not_depend_on_preemption_and_eviction(
    load: Load, alone: list[list[int]], host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(max_total_tokens=56, chunked_prefill_size=32, host_kv_tokens=host)
    scheduler = loaded.engine.scheduler
    admit_all(monkeypatch, scheduler)
    num_before = scheduler.stats.num_preemptions
    for _ in range(2):
        assert outputs_of(serve(loaded, JOBS)) == alone
    assert scheduler.stats.num_preemptions > num_before
    loaded.engine.flush_cache()
    assert scheduler.kv_cache.num_free_pages == 56


def test_a_text_may_be_longer_than_the_pool(load: Load) -> None:
    loaded = load(max_total_tokens=48)
    long = Job(tuple(index % 251 for index in range(150)), _longer(GREEDY[0], 250).sampling)
    (expected,) = said_alone(lambda: load(kv_policy="none"), [long])
    for _ in range(2):
        (request,) = serve(loaded, [long])
        assert list(request.output_ids) == expected
    assert request.num_dropped > 300
    with pytest.raises(PromptTooLong):  # its positions are no fewer than its tokens
        serve(loaded, [replace(long, prompt=long.prompt * 4)])
    with pytest.raises(PromptTooLong, match="> 47"):  # all of whose KV is wanted
        serve(load(max_total_tokens=48, kv_policy="none"), [long])


def test_a_branch_of_what_was_given_up_begins_where_its_window_is_there(load: Load) -> None:
    """A prefix is found where its last window is kept; shorter ones are computed again."""
    loaded = load()
    text = tuple(index * 7 % 251 for index in range(120))
    jobs = [replace(GREEDY[0], prompt=text[:length] + (9,)) for length in range(20, 120, 7)]
    expected = said_alone(lambda: load(kv_policy="none"), jobs)
    num_before = loaded.engine.scheduler.stats.num_computed_tokens
    serve(loaded, [replace(GREEDY[0], prompt=text)])
    assert outputs_of([serve(loaded, [job])[0] for job in jobs]) == expected
    num_computed = loaded.engine.scheduler.stats.num_computed_tokens - num_before
    assert num_computed < len(text) + len(jobs) * (10 + 1 + WINDOW // 2)
    loaded.engine.flush_cache()
    assert outputs_of(serve(loaded, jobs[::-1])) == expected[::-1]


def test_adapters_and_kv_in_8_bits_are_given_up_too(
    load: Load, windowed: Path, tmp_path: Path
) -> None:
    path = make_adapter(tmp_path / "first", windowed, ["q_proj", "v_proj"], rank=3, seed=1)
    options: dict[str, Any] = {"lora_paths": (("first", path),)}
    both = [JOBS[0], replace(JOBS[0], adapter="first")]
    expected = outputs_of(serve(load(kv_policy="none", **options), both))
    assert outputs_of(serve(load(**options), both)) == expected
    options = {"kv_cache_dtype": "int8", "kernels": "auto", "dtype": "float32"}
    expected = outputs_of(serve(load(kv_policy="none", **options), JOBS[:2]))
    assert outputs_of(serve(load(**options), JOBS[:2])) == expected


def test_logprobs_of_a_whole_prompt_have_all_kv(load: Load) -> None:
    ids = GREEDY[7].prompt
    scoring = Scoring(0, ids[1:])
    scores = [score(each, ids, scoring).scores for each in (load(), load(kv_policy="none"))]
    assert scores[0] == pytest.approx(scores[1], rel=1e-12)


def test_other_policies_are_refused_and_all_may_be_kept(load: Load) -> None:
    prefixes = load().context().compressed
    for policy in (snapkv(0.5), streaming(24)):
        with pytest.raises(InvalidRequest, match="windows"):
            prefixes.of(array("i", range(90)), policy)
    assert prefixes.of(array("i", range(90)), snapkv(1.0)) == (None, 0)
    assert prefixes.window is not None
    with pytest.raises(InvalidRequest, match="by themselves"):
        prefixes.of(array("i", range(90)), replace(prefixes.window, keep=8))
    assert load(kv_policy="none").context().compressed.window is None


def test_kv_is_kept_where_some_layers_see_all(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gemma2", sliding_window=WINDOW)
    for load in loading(folder):
        assert load().context().compressed.window is None
        assert serve(load(), [_longer(GREEDY[4], 40)])[0].num_dropped == 0
