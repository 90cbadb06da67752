"""Models that read images say the same whatever is cached: in float64, each request alone in an
empty cache against prefix hits, chunks that end within images, batches, page sizes, preemption,
encodings that are dropped, drafts and beams."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeListener
from image_models import make_image_model, noise, with_images
from scripted_drafters import ScriptedDrafter, sometimes_right, speculate

from stemma.runtime.config import EngineConfig
from stemma.runtime.images.image import Image, spans_of
from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.schedule.request import FinishReason, Request
from stemma.runtime.schedule.sampling_params import SamplingParams

NAMES = ("qwen2.5-vl", "qwen3-vl-odd")
TEXT = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(3)).tolist()
SIZES = ((3, 5), (1, 9), (4, 4), (2, 2), (4, 4))
# Texts by their lengths, images by their numbers below 0: prompts share images and prefixes.
PROMPTS = (
    (5, -1, 7),
    (5, -1, 7, -2, 3),
    (5, -1, 9, -3, 17),
    (5, -2, 7),
    (16, -4, -5, 1),
    (16, -4, -4, 2),
    (30,),
    (-3, 1),
)
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "chunks of 7": {"chunked_prefill_size": 7},
    "pages of 16, three at a time": {
        "page_size": 16, "chunked_prefill_size": 23, "max_running_requests": 3
    },
    "a host tier": {"max_total_tokens": 120, "host_kv_tokens": 400},
    "two ranks": {"tp_size": 2, "chunked_prefill_size": 11},
    "two stages": {"pp_size": 2, "chunked_prefill_size": 11},
    "tokens and KV on three ranks": {"cp_size": 3, "chunked_prefill_size": 11},
    "a CPU's kernels": {"kernels": "cpu", "chunked_prefill_size": 11},
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    sampling: SamplingParams


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("model"), name)


@pytest.fixture(scope="module")
def images(name: str) -> dict[int, Image]:
    return {-i: noise(name, *size, token_id=-i) for i, size in enumerate(SIZES, 1)}


@pytest.fixture(scope="module")
def jobs(images: dict[int, Image]) -> list[Job]:
    return [
        Job(
            tuple(with_images(*(images[p] if p < 0 else TEXT[:p] for p in parts))),
            SamplingParams(max_tokens=8, temperature=0.9 * (i % 2), seed=i, ignore_eos=True,
                           repetition_penalty=1.2 if i % 3 else 1.0),
        )
        for i, parts in enumerate(PROMPTS)
    ]  # fmt: skip


def load(folder: Path, **options: Any) -> LoadedModel:
    exact = {"dtype": "float64", "kernels": "reference", "max_total_tokens": 2048}
    return LoadedModel(EngineConfig(model=folder, speculate="off", **(exact | options)))


def serve(
    loaded: LoadedModel, jobs: Sequence[Job], images: dict[int, Image], *, preempts_each: int = 0
) -> list[Request]:
    """All at once, to their ends, with the invariants checked after each step. `preempts_each`:
    after so many steps one is preempted, and what was cached is lost."""
    requests = [
        Request(
            loaded.engine.next_request_id(),
            array("i", job.prompt),
            job.sampling,
            FakeListener(),
            images=spans_of(array("i", job.prompt), images.__getitem__),
        )
        for job in jobs
    ]
    for request in requests:
        loaded.engine.submit(request)
    num_steps = 0
    while loaded.engine.has_work:
        loaded.engine.step()
        loaded.engine.scheduler.check()
        num_steps += 1
        scheduler = loaded.engine.scheduler
        is_due = preempts_each and num_steps % preempts_each == 0 and num_steps < 40
        if is_due and scheduler.running:
            scheduler._preempt(scheduler.running[num_steps % len(scheduler.running)])
            loaded.engine.flush_cache()
    assert {r.finish_reason for r in requests} == {FinishReason.LENGTH}, [r.error for r in requests]
    return requests


def outputs_of(requests: Sequence[Request]) -> list[list[int]]:
    return [list(request.output_ids) for request in requests]


@pytest.fixture(scope="module")
def alone(folder: Path, jobs: list[Job], images: dict[int, Image]) -> list[list[int]]:
    loaded, outputs = load(folder), []
    for job in jobs:
        outputs += outputs_of(serve(loaded, [job], images))
        loaded.engine.flush_cache()
    assert len({tuple(output) for output in outputs}) == len(outputs)
    return outputs


@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
def test_tokens_are_identical_missed_and_hit(
    folder: Path,
    jobs: list[Job],
    images: dict[int, Image],
    alone: list[list[int]],
    circumstance: str,
) -> None:
    loaded = load(folder, **CIRCUMSTANCES[circumstance])
    loaded.engine.scheduler.segment_cost_tokens = 0  # whatever is shared is a segment
    assert outputs_of(serve(loaded, jobs, images)) == alone
    hits = serve(loaded, jobs[::-1], images)
    assert outputs_of(hits) == alone[::-1]
    assert sum(request.num_cached_tokens for request in hits) > 150
    if loaded.ranks is not None:
        loaded.ranks.close()


@pytest.mark.parametrize("size", [5, 64])
def test_tokens_are_identical_when_preempted_within_images(
    folder: Path, jobs: list[Job], images: dict[int, Image], alone: list[list[int]], size: int
) -> None:
    loaded = load(folder, chunked_prefill_size=size)
    requests = serve(loaded, jobs, images, preempts_each=3)
    assert outputs_of(requests) == alone
    assert loaded.engine.scheduler.stats.num_preemptions > 2


def test_tokens_are_identical_where_one_image_fits_at_a_time(
    folder: Path, jobs: list[Job], images: dict[int, Image], alone: list[list[int]]
) -> None:
    """Each is encoded again and again, a block a step."""
    loaded = load(folder, chunked_prefill_size=9)
    encodings = loaded.engine.scheduler.images
    assert encodings is not None
    encodings._max_bytes = 1
    loaded.engine.scheduler._num_layers = 1
    assert outputs_of(serve(loaded, jobs, images)) == alone
    described = encodings.describe()
    assert described["num_images"] <= 1 and described["encoded"] >= len(SIZES)


def test_an_image_is_encoded_once_for_all_who_ask_and_not_where_its_kv_is_cached(
    folder: Path, jobs: list[Job], images: dict[int, Image]
) -> None:
    loaded = load(folder)
    encodings = loaded.engine.scheduler.images
    assert encodings is not None
    serve(loaded, jobs, images)
    assert encodings.describe()["encoded"] == len(SIZES)
    encodings.reset()
    serve(loaded, jobs, images)
    assert encodings.describe()["encoded"] == len(SIZES)


@pytest.mark.parametrize("under", ["right", "image"])
def test_drafts_change_nothing_and_never_are_images(
    folder: Path, jobs: list[Job], images: dict[int, Image], alone: list[list[int]], under: str
) -> None:
    loaded = load(folder, chunked_prefill_size=64)
    said = {job.prompt: output for job, output in zip(jobs, alone, strict=True)}
    guess = sometimes_right(random.Random(1)) if under == "right" else _then_an_image
    speculate(loaded.engine, ScriptedDrafter(said, guess))
    assert outputs_of(serve(loaded, jobs, images)) == alone
    assert loaded.engine.scheduler.stats.num_accepted_tokens > 0


def _then_an_image(follows: Sequence[int]) -> Sequence[int]:
    return [*follows[:2], -1, -1]


def test_two_images_of_equal_size_never_match(
    folder: Path, jobs: list[Job], images: dict[int, Image]
) -> None:
    loaded = load(folder)
    serve(loaded, [jobs[4]], images)
    (other,) = serve(loaded, [Job((*jobs[4].prompt[:16], *with_images(images[-3])),
                                  jobs[4].sampling)], images)  # fmt: skip
    assert other.num_cached_tokens == 17  # the text and the mark before it
