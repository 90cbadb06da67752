"""Steps by Triton's kernels in their interpreter: what the CPU's kernels make of the same plans.

How steps are queued, captured and read back is held to the last bit in test_gpu_steps.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from step_plans import GREEDY, Feed, PlanDriver

from stemma.kernels.registry import select_kernels
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.model_config import ModelConfig
from stemma.runtime.sampling_params import SamplingParams
from stemma.runtime.step import Adjustment, PageUpdate, Row, RowResult, SharedSegment, StepPlan

Run = Callable[[ModelRunner], list[tuple[RowResult, ...]]]
PROMPT = tuple(range(40, 59))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers; one KV head, since the interpreter takes one program after the other."""
    return make_checkpoint(
        tmp_path_factory.mktemp("model"),
        init_std=0.3,
        seed=3,
        num_heads=2,
        num_kv_heads=1,
        hidden_size=32,
        intermediate_size=64,
        has_tokenizer=False,
    )


@pytest.fixture
def runners(folder: Path) -> Callable[..., tuple[ModelRunner, ModelRunner]]:
    """The same model on the CPU, and as on a GPU."""

    def load(**options: Any) -> tuple[ModelRunner, ModelRunner]:
        config = ModelConfig.from_folder(folder)
        on_cpu, queued = (
            ModelRunner(
                folder,
                config,
                dtype="float32",
                device=device,
                max_running_requests=4,
                max_model_len=64,
                max_total_tokens=256,
                **(options if device == "cuda" else {"page_size": options.get("page_size", 1)}),
            )
            for device in ("cpu", "cuda")
        )
        return on_cpu, queued

    return load


@pytest.mark.parametrize(("page_size", "graph_max_tokens"), [(1, 32), (16, 32), (1, 0)])
def test_chunks_decodes_and_what_the_device_sampled_itself(
    runners: Callable[..., tuple[ModelRunner, ModelRunner]], page_size: int, graph_max_tokens: int
) -> None:
    def run(runner: ModelRunner) -> list[tuple[RowResult, ...]]:
        driver = PlanDriver(runner)
        a, b = driver.sequence(), driver.sequence()
        drawn = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=7)
        results = [driver.step([Feed(a, PROMPT[:7], drawn), Feed(b, PROMPT[3:8])])]
        results += [
            # a's token is known to the device alone; b goes on with its prompt, then samples
            driver.step([Feed(b, PROMPT[8:], GREEDY), Feed(a, [0], drawn, from_previous=0)]),
            driver.step([Feed(a, [0], drawn, from_previous=1), Feed(b, [0], GREEDY, None, (), 0)]),
        ]
        for _ in range(2):
            rows = [Feed(a, [0], drawn, from_previous=0), Feed(b, [0], GREEDY, from_previous=1)]
            results.append(driver.step(rows))
        return results

    _assert_same(runners(page_size=page_size, graph_max_tokens=graph_max_tokens), run)


def test_rows_that_want_more_than_a_token(
    runners: Callable[..., tuple[ModelRunner, ModelRunner]],
) -> None:
    """Penalties on a token that only the device knows, masks, logprobs, scores, sums."""
    logprobs = SamplingParams(temperature=0.0, logprobs=3)
    dear = SamplingParams(
        temperature=0.8, seed=5, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3
    )
    change = Adjustment(
        array("i", PROMPT[:4]), array("i", [9]), array("d", [4.0]), array("i"), masked_ids=(11,)
    )
    mask = np.zeros((2, 9), dtype=np.uint32)
    mask[0, 3], mask[1] = 0b1010, 0xFFFFFFFF

    def run(runner: ModelRunner) -> list[tuple[RowResult, ...]]:
        page = iter(range(100))

        def row(table_row: int, start: int, ids: Sequence[int], **fields: Any) -> Row:
            pages = tuple(next(page) for _ in ids)
            return Row(table_row, table_row, start, tuple(ids), PageUpdate(start, pages), **fields)

        first = (
            row(0, 0, PROMPT[:4], sampling=dear, adjustment=change),
            row(1, 0, PROMPT[:3], sampling=logprobs, mask=0),
            row(2, 0, PROMPT[:5], target_ids=(1, 2, 3), target_start=1, num_top_targets=2),
            row(3, 0, PROMPT[2:6], pooled_from=1),
        )
        second = (
            row(0, 4, (0,), sampling=dear, adjustment=change, from_previous=0),
            row(1, 3, (0,), sampling=logprobs, from_previous=1),
            row(3, 4, PROMPT[:2], pooled_from=0),
        )
        pending = [
            runner.submit(StepPlan(1, first, masks=mask)), runner.submit(StepPlan(2, second))
        ]  # fmt: skip
        return [step.result().rows for step in pending]

    results = _assert_same(runners(graph_max_tokens=32), run)
    assert results[0][1].token_id in (97, 99)


def test_a_segment_is_read_once_for_its_rows(
    runners: Callable[..., tuple[ModelRunner, ModelRunner]],
) -> None:
    def run(runner: ModelRunner) -> list[tuple[RowResult, ...]]:
        shared, own = tuple(range(19)), [(20,), (21,), (22,)]
        prompt = Row(0, 0, 0, PROMPT, PageUpdate(0, shared))
        rows = tuple(
            Row(i, i, 19, (70 + i,), PageUpdate(0, (*shared, *own[i])), sampling=GREEDY)
            for i in range(3)
        )
        plans = [StepPlan(1, (prompt,)), StepPlan(2, rows, (SharedSegment(0, 19, 0, 3),))]
        return [runner.execute(plan).rows for plan in plans]

    _assert_same(runners(graph_max_tokens=4), run)


def test_a_recorded_step_serves_others_of_its_size(
    runners: Callable[..., tuple[ModelRunner, ModelRunner]],
) -> None:
    """Rows and lengths that the first step of the size did not have; smaller steps, padded."""

    def run(runner: ModelRunner) -> list[tuple[RowResult, ...]]:
        driver = PlanDriver(runner)
        sequences = [driver.sequence() for _ in range(4)]
        results = [driver.step([Feed(sequences[0], PROMPT[:8], GREEDY)])]  # recorded at 8
        feeds = [Feed(s, PROMPT[i : i + 1 + i], GREEDY) for i, s in enumerate(sequences[1:])]
        results.append(driver.step(feeds))  # 6 tokens of three rows
        results.append(driver.step([Feed(s, [60], GREEDY) for s in sequences]))  # at 4
        results.append(driver.step([Feed(s, [61], GREEDY) for s in sequences[:3]]))
        return results

    on_cpu, queued = runners(graph_max_tokens=8)
    _assert_same((on_cpu, queued), run)
    assert queued.steps.forward.num_graphs == 2  # type: ignore[union-attr]


def _assert_same(runners: tuple[ModelRunner, ModelRunner], run: Run) -> list[tuple[RowResult, ...]]:
    on_cpu, queued = runners
    assert queued.kernels.describe()[-1].implementation == "triton"
    assert queued.kernels.sample is not select_kernels(on_cpu.dtype).sample
    expected, found = run(on_cpu), run(queued)
    for before, after in zip(expected, found, strict=True):
        for one, other in zip(before, after, strict=True):
            _assert_same_result(one, other)
    return found


def _assert_same_result(one: RowResult, other: RowResult) -> None:
    assert other.error is None and other.token_id == one.token_id
    assert other.target_argmax == one.target_argmax
    np.testing.assert_allclose(other.target_logprobs, one.target_logprobs, atol=1e-4)
    if one.logprob is not None:
        assert other.logprob == pytest.approx(one.logprob, abs=1e-4)
    for ours, theirs in zip(
        (one.top_logprobs, *one.target_tops), (other.top_logprobs, *other.target_tops), strict=True
    ):
        assert [t.token_id for t in ours] == [t.token_id for t in theirs]
    assert (one.pooled is None) == (other.pooled is None)
    if one.pooled is not None and other.pooled is not None:
        np.testing.assert_allclose(other.pooled, one.pooled, atol=1e-4)
