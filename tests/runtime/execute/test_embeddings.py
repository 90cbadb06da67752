"""Embeddings: transformers' hidden states pooled, and exact whatever runs beside them.

In float64 through the reference kernels, so that exact means equal to rounding. transformers itself
computes norms and rotations in float32, whence the wider tolerance there.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from engine_harness import hope
from fakes import FakeListener

from stemma.frontend.protocol import ir
from stemma.runtime.config import EngineConfig
from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.schedule.request import FinishReason, HiddenSum, Request
from stemma.runtime.schedule.sampling_params import SamplingParams

Load = Callable[..., LoadedModel]
Vector = npt.NDArray[np.float64]

_RANDOM = random.Random(7)
SHARED = tuple(_RANDOM.randrange(256) for _ in range(40))
PROMPTS = [SHARED[:1], SHARED[:17], SHARED, (*SHARED[:32], 3, 1, 4), SHARED[5:]]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def load(checkpoint: Path) -> Iterator[Load]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def load_one(**options: Any) -> LoadedModel:
        options = {"max_total_tokens": 2048, "max_model_len": 512, **options}
        config = EngineConfig(model=checkpoint, dtype="float64", kernels="reference", **options)
        return LoadedModel(config)

    yield load_one
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def truth(load: Load) -> dict[tuple[Sequence[int], bool], Vector]:
    """Each embedding alone, on an empty cache, in one chunk."""
    loaded, alone = load(), {}
    for prompt in PROMPTS:
        for is_mean in (True, False):
            loaded.engine.flush_cache()
            request = embedding_of(loaded, prompt, is_mean)
            run(loaded)
            alone[prompt, is_mean] = pooled(request)
    return alone


def test_embeddings_are_the_pooled_hidden_states_of_transformers(
    checkpoint: Path, truth: dict[tuple[Sequence[int], bool], Vector]
) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    for prompt in PROMPTS:
        with torch.inference_mode():
            states = model.model(torch.tensor([prompt])).last_hidden_state[0].numpy()
        for is_mean, wanted in ((True, states.mean(axis=0)), (False, states[-1])):
            assert truth[prompt, is_mean] == pytest.approx(wanted, abs=3e-6)


def embedding_of(loaded: LoadedModel, prompt: Sequence[int], is_mean: bool) -> Request:
    request = Request(
        loaded.engine.next_request_id(),
        array("i", prompt),
        SamplingParams(),
        FakeListener(),
        hidden=HiddenSum(is_mean),
    )
    loaded.engine.submit(request)
    return request


def run(loaded: LoadedModel) -> None:
    while loaded.engine.has_work:
        loaded.engine.step()
        loaded.engine.scheduler.check()


def pooled(request: Request) -> Vector:
    assert request.finish_reason is FinishReason.STOP, request.error
    assert request.num_output_tokens == 0 and request.hidden is not None
    return request.hidden.pooled()


def assert_exact(request: Request, wanted: Vector) -> None:
    assert np.abs(pooled(request) - wanted).max() < 1e-12 * np.abs(wanted).max()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [16, 2048])
def test_embeddings_are_exact_for_chunks_batches_and_cache_hits(
    load: Load, truth: dict[tuple[Sequence[int], bool], Vector], page_size: int, chunk: int
) -> None:
    loaded = load(page_size=page_size, chunked_prefill_size=chunk)
    for _ in range(2):  # the second time all is in the cache
        beside = Request(
            loaded.engine.next_request_id(), array("i", SHARED), GREEDY, FakeListener()
        )
        loaded.engine.submit(beside)
        asked = [
            (prompt, is_mean, embedding_of(loaded, prompt, is_mean))
            for prompt in PROMPTS
            for is_mean in (True, False)
        ]
        run(loaded)
        assert beside.num_output_tokens == 12
        for prompt, is_mean, request in asked:
            assert_exact(request, truth[prompt, is_mean])
    cached = {(prompt, is_mean): request.num_cached_tokens for prompt, is_mean, request in asked}
    assert cached[SHARED, False] >= len(SHARED) - page_size  # only the last one is computed
    assert not any(num for (_, is_mean), num in cached.items() if is_mean)  # all were needed


@pytest.mark.parametrize("is_mean", [True, False])
def test_an_embedding_that_is_preempted_sums_no_token_twice(
    load: Load, truth: dict[tuple[Sequence[int], bool], Vector], is_mean: bool
) -> None:
    loaded = load(max_total_tokens=64, chunked_prefill_size=4)
    prompt = PROMPTS[2]
    long = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    beside = Request(0, array("i", SHARED[5:25]), long, FakeListener())
    hope(loaded.engine)
    loaded.engine.submit(beside)
    request = embedding_of(loaded, prompt, is_mean)
    run(loaded)
    assert request.num_preemptions > 0 and beside.num_output_tokens == 30
    assert_exact(request, truth[prompt, is_mean])


def test_what_was_computed_before_a_preemption_is_summed_once_if_computed_anew() -> None:
    hidden = HiddenSum(is_mean=True)
    assert hidden.first_wanted(0, 8, 20) == 0
    hidden.add(np.full(2, 8.0), 8)
    assert hidden.first_wanted(0, 8, 20) is None  # preempted, and its KV was evicted
    assert hidden.first_wanted(4, 20, 20) == 4
    hidden.add(np.full(2, 12.0), 20)
    assert hidden.pooled().tolist() == [1.0, 1.0]
    last = HiddenSum(is_mean=False)
    assert [last.first_wanted(0, 8, 20), last.first_wanted(8, 20, 20)] == [None, 11]


def test_hidden_states_that_are_not_finite_fail_their_request_alone(load: Load) -> None:
    loaded = load()
    sound = embedding_of(loaded, SHARED, is_mean=True)
    run(loaded)
    steps = loaded.runner.steps
    forward = steps.forward

    def spoiled(batch: Any) -> torch.Tensor:
        states = forward(batch).clone()
        states[0] = torch.nan
        return states

    steps.forward = spoiled  # type: ignore[assignment]
    first = embedding_of(loaded, (7, 7), is_mean=True)
    second = embedding_of(loaded, (9, 9), is_mean=True)
    run(loaded)
    assert {first.finish_reason, second.finish_reason} == {FinishReason.ERROR, FinishReason.STOP}
    failed = first if first.finish_reason is FinishReason.ERROR else second
    assert failed.error == "the model produced non-finite hidden states"
    steps.forward = forward
    again = embedding_of(loaded, SHARED, is_mean=True)
    run(loaded)
    assert pooled(again) == pytest.approx(pooled(sound), rel=1e-12)


def test_an_embed_op_travels_and_names_what_it_may_not_be() -> None:
    op = ir.Embed(0, 1, None, "e", "mean", False)
    assert ir.op_from_wire(op.to_wire()) == op
    with pytest.raises(Exception, match="pooling"):
        ir.op_from_wire(["embed", 0, 0, None, "e", "median", True])
