"""What crosses between ranks: plans arrive as they were, in few bytes; sums and exchanges are as
many as docs/how-it-works/parallelism.md counts."""

from __future__ import annotations

import os
import random
import select
import signal
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from mixtures import make_mixture
from ranks import ThreadCommunicator, on_grid, on_ranks
from step_plans import GREEDY, Feed, PlanDriver

from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.models.layers.expert_placement import ExpertGroups
from stemma.runtime.models.layers.ranks import Ranks
from stemma.runtime.models.model_config import read_model_config
from stemma.runtime.parallel.orders import EXECUTE, PlanReader, PlanWriter, message_of, write_all
from stemma.runtime.schedule.plan import Adjustment, PageUpdate, Row, SharedSegment, StepPlan
from stemma.runtime.schedule.sampling_params import SamplingParams

PARAMS = [SamplingParams(temperature=0.5, seed=i, logit_bias=((3, 1.0),)) for i in range(64)]


def row(
    request: int, table_row: int, start: int, params: SamplingParams | None, **fields: Any
) -> Row:
    return Row(request, table_row, start, (7,), sampling=params, **fields)


def received(writer: PlanWriter, reader: PlanReader, plan: StepPlan) -> tuple[StepPlan, int]:
    written = writer.frame(plan)
    name, *arguments = message_of(written[4:])
    assert name == EXECUTE
    return reader.plan(*arguments), len(written)


def test_plans_arrive_as_they_were_whoever_takes_a_row_of_the_table_next() -> None:
    writer, reader = PlanWriter(), PlanReader()
    adjustment = Adjustment(array("i", [1]), array("i", [2]), array("d", [0.5]), array("i"), (4,))
    masks = np.array([[1, 2]], dtype=np.uint32)
    first = row(1, 0, 0, PARAMS[0], page_update=PageUpdate(0, array("i", [9, 8])), mask=0)
    plans = [
        StepPlan(0, (first, row(2, 1, 5, None)), (SharedSegment(0, 4, 0, 2),), masks),
        StepPlan(1, (row(1, 0, 1, PARAMS[0], adjustments=(adjustment,)), row(2, 1, 6, PARAMS[1]))),
        StepPlan(2, (row(3, 0, 0, PARAMS[2]), row(2, 1, 7, PARAMS[1], sampled_at=(0,)))),
        StepPlan(3, (row(3, 0, 1, PARAMS[2]),)),
    ]
    for plan in plans:
        found, _ = received(writer, reader, plan)
        assert found == plan
        assert plan.masks is None or np.array_equal(plan.masks, found.masks)


def test_a_step_of_64_rows_takes_few_bytes() -> None:
    writer, reader = PlanWriter(), PlanReader()
    for step in range(2):
        update = PageUpdate(300 + step, array("i", [5000]))
        rows = tuple(row(i, i, 300 + step, PARAMS[i], page_update=update) for i in range(64))
        found, num_bytes = received(writer, reader, StepPlan(step, rows))
        assert found.rows == rows
    assert num_bytes < 4096


def test_a_chunk_of_a_prompt_takes_few_bytes() -> None:
    rng = random.Random(3)
    ids = tuple(rng.choices(range(1000), k=1900) + rng.choices(range(128_000), k=148))
    runs = rng.sample(range(0, 60_000, 64), 32)
    pages = array("i", [first + place for first in runs for place in range(64)])
    rows = (Row(1, 0, 0, ids, PageUpdate(0, pages), sampling=PARAMS[0]),)
    found, num_bytes = received(PlanWriter(), PlanReader(), StepPlan(0, rows))
    assert found.rows == rows and num_bytes < 10_000


def test_an_order_arrives_whole_where_a_signal_interrupts_its_writing() -> None:
    data = b"order" * 100_000  # more than a pipe takes
    outcome, income = os.pipe()
    received = bytearray()

    def read() -> None:
        while select.select([], [income], [], 0)[1]:
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        while part := os.read(outcome, 1 << 20):
            received.extend(part)

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    reader = threading.Thread(target=read)
    try:
        reader.start()
        with os.fdopen(income, "wb", buffering=0) as stream:
            write_all(stream, data)
        reader.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
        os.close(outcome)
    assert bytes(received) == data


class Counting(ThreadCommunicator):
    """Notes what is summed and exchanged."""

    def __init__(self, inner: ThreadCommunicator) -> None:
        super().__init__(inner.rank, inner._parts, inner._barrier)
        self.sums: list[int] = []
        self.exchanges: list[int] = []
        self.sent: list[list[int]] = []  # bytes to each rank, of each `all_to_all`

    def all_reduce(self, x: torch.Tensor) -> None:
        num_exchanges = len(self.exchanges)
        super().all_reduce(x)
        del self.exchanges[num_exchanges:]
        self.sums.append(x.numel())

    def all_to_all(self, parts: Any) -> Any:
        self.sent.append([part.nbytes for part in parts])
        return super().all_to_all(parts)

    def all_gather(self, data: Any) -> Any:
        self.exchanges.append(data.size)
        return super().all_gather(data)


def test_a_token_goes_to_each_rank_of_its_experts_once_and_one_vector_comes_back(
    tmp_path: Path,
) -> None:
    """Each of two ranks has three of six tokens; docs/how-it-works/parallelism.md counts bytes."""
    make_mixture(tmp_path, "Mixtral")
    config = read_model_config(tmp_path)
    assert config.experts is not None
    num_layers, num_chosen = len(config.experts.layers), config.experts.routing.num_chosen
    there, back = config.hidden_size * 8 + num_chosen * (4 + 8), config.hidden_size * 8

    def run(communicator: ThreadCommunicator) -> list[list[int]]:
        counting = Counting(communicator)
        groups = ExpertGroups(2)
        ranks = Ranks(context=counting, expert_groups=groups)
        runner = ModelRunner(
            tmp_path, config, dtype="float64", kernels="reference", num_pages=64,
            max_running_requests=4, ranks=ranks,
        )  # fmt: skip
        driver = PlanDriver(runner)
        driver.step([Feed(driver.sequence(), range(6), GREEDY)])
        assert len(counting.sent) == 2 * num_layers and not counting.sums
        return counting.sent

    one, other = on_ranks(2, run)
    for given, returned in zip(range(0, 2 * num_layers, 2), range(1, 2 * num_layers, 2)):
        for sent in (one, other):
            assert sum(sent[given]) % there == 0
            assert 3 <= sum(sent[given]) // there <= 3 * num_chosen
            assert max(sent[given]) <= 3 * there
        rows = [[size // there for size in sent[given]] for sent in (one, other)]
        for rank, sent in enumerate((one, other)):
            assert sent[returned] == [rows[0][rank] * back, rows[1][rank] * back]


@pytest.mark.parametrize("num_layers", [2, 3])
def test_a_step_makes_two_sums_a_layer_and_one_exchange_of_its_winners(
    tmp_path: Path, num_layers: int
) -> None:
    make_checkpoint(tmp_path, num_layers=num_layers, has_tokenizer=False)
    nucleus = SamplingParams(temperature=1.0, top_k=5, top_p=0.9)

    def run(communicator: ThreadCommunicator) -> None:
        counting = Counting(communicator)
        runner = ModelRunner(
            tmp_path, read_model_config(tmp_path), dtype="float64", kernels="reference",
            num_pages=64, max_running_requests=4, ranks=Ranks(counting.rank, 2, counting),
        )  # fmt: skip
        driver = PlanDriver(runner)
        one, other = driver.sequence(), driver.sequence()
        for sampling, exchanges in ((GREEDY, [3 * 2]), (nucleus, [(2 + 5) * 2, 3 * 2])):
            counting.sums, counting.exchanges = [], []
            driver.step([Feed(one, (1, 2, 3), sampling), Feed(other, (4,), sampling)])
            # The embedding's, then attention's and the feed-forward block's of each layer.
            assert counting.sums == [4 * 64] * (1 + 2 * num_layers)
            assert counting.exchanges == exchanges

    on_ranks(2, run)


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("num_layers", [2, 3])
def test_a_step_of_divided_tokens_makes_two_exchanges_a_layer_and_one_of_its_results(
    tmp_path: Path, num_layers: int, num_parts: int
) -> None:
    """Beside ranks that divide layers it is of their heads, and sums are of a rank's tokens."""
    make_checkpoint(tmp_path, num_layers=num_layers, has_tokenizer=False)

    def run(row: ThreadCommunicator, column: ThreadCommunicator) -> None:
        counting, summing = Counting(column), Counting(row)
        config = read_model_config(tmp_path)
        runner = ModelRunner(
            tmp_path, config, dtype="float64", kernels="reference", num_pages=64,
            max_running_requests=4,
            ranks=Ranks(row.rank, num_parts, summing if num_parts > 1 else None, context=counting),
        )  # fmt: skip
        driver = PlanDriver(runner)
        one, other = driver.sequence(), driver.sequence()
        summing.sums, counting.exchanges = [], []
        driver.step([Feed(one, (1, 2, 3), GREEDY), Feed(other, (4, 5), GREEDY)])
        num_heads, size = config.num_heads // num_parts, config.head_dim
        num_kv_heads = config.num_kv_heads // num_parts
        heads = 3 * (num_heads + 2 * num_kv_heads) * size  # of three of the five tokens
        parts = 5 * num_heads * (size + 1)
        sizes = [heads, parts] * num_layers + [3 * config.hidden_size]
        assert counting.exchanges == [8 * number for number in sizes]
        sums = [3 * config.hidden_size] * (1 + 2 * num_layers)
        assert summing.sums == (sums if num_parts > 1 else []) and not counting.sums

    on_grid(num_parts, 2, run)
