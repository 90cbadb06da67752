"""Models whose layers are divided between the stages of a pipeline say what they say as a whole."""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from device_plans import device_kernels
from family_cases import CASES, VOCAB_SIZE
from hypothesis import given
from hypothesis import strategies as st
from mixtures import make_mixture
from ranks import ThreadCommunicator, on_ranks
from step_plans import Feed, PlanDriver
from torch import Tensor

from stemma.errors import InvalidRequest, RankLost
from stemma.runtime.execute.accelerator import InterpretedAccelerator
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.models.layers.ranks import Ranks
from stemma.runtime.models.layers.stage import ALL_LAYERS, Stage, config_of_stage
from stemma.runtime.models.model_config import read_model_config
from stemma.runtime.parallel.neighbours import ChannelMessages, open_channel
from stemma.runtime.parallel.stages import divided, stages_of

PROMPTS = [[(7 * i + 3) % 100 for i in range(33)], [(11 * i + 5) % 100 for i in range(20)]]

MODELS = {
    "tied, windows in every other layer": ("dense", "gemma2", {"tie_word_embeddings": True}),
    "norms behind the blocks": ("dense", "olmo2", {}),
    "experts": ("mixture", "Mixtral", {}),
    "experts in one tensor, sinks": ("mixture", "GptOss", {}),
    "latent attention, a dense layer first": ("mixture", "DeepseekV3", {}),
    "no rotation in some layers": ("mixture", "Llama4", {}),
}


class QueueNeighbours:
    """See `execute.neighbours.Neighbours`, between threads."""

    def __init__(self, previous: queue.Queue[Any] | None, behind: queue.Queue[Any] | None) -> None:
        self.previous, self.behind = previous, behind
        self.has_previous, self.has_next = previous is not None, behind is not None
        self.sent: list[tuple[int, ...]] = []

    def receive(self, num_tokens: int) -> Tensor:
        assert self.previous is not None
        hidden = self.previous.get()
        assert isinstance(hidden, Tensor) and len(hidden) == num_tokens
        return hidden

    def send(self, hidden: Tensor) -> None:
        assert self.behind is not None
        self.sent.append(tuple(hidden.shape))
        self.behind.put(hidden.clone())

    def least(self, number: int) -> int:
        return number


def scores(
    folder: Path,
    stage: Stage = ALL_LAYERS,
    layers: Any = None,
    neighbours: Any = None,
    **options: Any,
) -> list[tuple[float, ...]]:
    """Log-probabilities of the prompts' last tokens, in three steps."""
    config = read_model_config(folder)
    runner = ModelRunner(
        folder,
        config if layers is None else config_of_stage(config, layers),
        **{"dtype": "float64", "kernels": "reference", **options},
        num_pages=120,
        max_running_requests=4,
        stage=stage,
        neighbours=neighbours,
    )
    driver = PlanDriver(runner)
    sequences = [driver.sequence() for _ in PROMPTS]
    rows: Any = ()
    for own in (slice(0, 3), slice(3, 7), slice(7, None)):
        rows = driver.step(
            [Feed(sequences[i], prompt[own], is_scored=True) for i, prompt in enumerate(PROMPTS)]
        )
    return [row.target_logprobs for row in rows]


def scores_through_stages(
    folder: Path, num_stages: int, **options: Any
) -> tuple[list[tuple[float, ...]], Any]:
    """(those of the last stage, what was sent)."""
    bounds = stages_of(read_model_config(folder), num_stages)
    links = [queue.Queue[Any]() for _ in bounds[1:]]
    neighbours = [QueueNeighbours(*ends) for ends in zip([None, *links], [*links, None])]

    def run(number: int) -> list[tuple[float, ...]]:
        stage = Stage(bounds[number][0], number == 0, number == num_stages - 1)
        return scores(folder, stage, bounds[number], neighbours[number], **options)

    with ThreadPoolExecutor(num_stages) as pool:
        return list(pool.map(run, range(num_stages)))[-1], [each.sent for each in neighbours]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_stages", [2, 4])
def test_log_probabilities_are_those_of_the_whole(
    name: str, num_stages: int, tmp_path: Path
) -> None:
    kind, family, options = MODELS[name]
    if kind == "dense":
        fields = {**CASES[family].options, **options, "num_layers": 4}
        make_checkpoint(
            tmp_path, CASES[family].architecture, vocab_size=VOCAB_SIZE, has_tokenizer=False,
            **fields,
        )  # fmt: skip
    else:
        make_mixture(tmp_path, family, num_hidden_layers=4)
    whole = scores(tmp_path)
    found, sent = scores_through_stages(tmp_path, num_stages)
    assert found == whole
    hidden_size = read_model_config(tmp_path).hidden_size
    # One message a step and boundary: the tokens' residual stream, once.
    steps = [(num_tokens, hidden_size) for num_tokens in (6, 8, 39)]
    assert sent == [steps] * (num_stages - 1) + [[]]


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_graphs_of_stages_compute_what_the_whole_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step replays the first one's graph, without padding; messages have none."""
    if name == "dense":
        make_checkpoint(tmp_path, num_layers=3, vocab_size=VOCAB_SIZE, has_tokenizer=False)
    else:
        make_mixture(tmp_path, "Mixtral", num_hidden_layers=3)
    captured: list[object] = []
    capture = InterpretedAccelerator.capture

    def counted(self: InterpretedAccelerator, run: Callable[[], None]) -> Callable[[], None]:
        captured.append(run)
        return capture(self, run)

    monkeypatch.setattr(InterpretedAccelerator, "capture", counted)
    options = {"device": "cuda", "kernels": device_kernels(torch.float64)}
    whole = scores(tmp_path, **options)
    assert len(captured) == 2
    found, sent = scores_through_stages(tmp_path, 3, **options)
    assert found == whole and len(captured) == 2 * (1 + 3)
    assert [[num_tokens for num_tokens, _ in each] for each in sent] == [[6, 8, 39]] * 2 + [[]]


def test_messages_between_stages_are_as_long_as_they_are() -> None:
    """Shorter than a slot, as long as some, longer than the ring, which is then waited for."""
    behind, previous = open_channel(num_slots=3, slot_bytes=64)
    sender, receiver = ChannelMessages(None, behind), ChannelMessages(previous, None)
    sent = [None, *(np.arange(size, dtype=np.uint8) for size in (0, 9, 128, 250)), ("a", 7)]
    sending = threading.Thread(target=lambda: [*map(sender.send, sent)], daemon=True)
    sending.start()
    received = [receiver.receive() for _ in sent]
    sending.join()
    assert str(received) == str(sent) and received[4].size == 250
    sender.close()
    with pytest.raises(RankLost, match="a stage of the model has ended"):
        receiver.receive()
    receiver.close()


def test_no_rank_of_a_stage_has_fewer_pages_than_the_engine_hands_out(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_layers=2, vocab_size=VOCAB_SIZE, has_tokenizer=False)
    config = read_model_config(tmp_path)

    def num_pages(communicator: ThreadCommunicator) -> int:
        runner = ModelRunner(
            tmp_path,
            config_of_stage(config, (1, 2)),
            dtype="float32",
            num_pages=(9, 7)[communicator.rank],
            max_model_len=4,
            max_running_requests=1,
            ranks=Ranks(communicator.rank, 2, communicator),
            stage=Stage(1, is_first=False),
            neighbours=QueueNeighbours(queue.Queue(), None),
        )
        return runner.num_pages

    assert on_ranks(2, num_pages) == [7, 7]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(0, 20), st.integers(1, 5))
def test_the_dearest_stage_is_as_cheap_as_can_be(
    costs: list[int], last: int, num_stages: int
) -> None:
    if num_stages > len(costs):
        return

    def dearest(ends: tuple[int, ...]) -> float:
        parts = [sum(costs[a:b]) for a, b in itertools.pairwise((0, *ends, len(costs)))]
        parts[-1] += last
        return max(parts)

    found = divided(costs, last, num_stages)
    assert [first for first, _ in found] == [0, *[end for _, end in found[:-1]]]
    assert all(first < end for first, end in found) and found[-1][1] == len(costs)
    inner = itertools.combinations(range(1, len(costs)), num_stages - 1)
    assert dearest(tuple(end for _, end in found[:-1])) == min(map(dearest, inner))


def test_an_output_projection_counts_as_the_layers_that_it_weighs(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_layers=6, vocab_size=4000, has_tokenizer=False)
    (first, last) = stages_of(read_model_config(tmp_path), 2)
    assert first[1] - first[0] > last[1] - last[0] >= 1


@pytest.mark.parametrize(
    ("family", "num_stages", "said"),
    [
        ("Qwen3Next", 2, "its recurrent layers keep states; tp_size divides each layer"),
        ("Gemma3n", 2, "its layers share KV"),
        ("Mixtral", 9, "at most 2, the model's layers"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(
    family: str, num_stages: int, said: str, tmp_path: Path
) -> None:
    make_mixture(tmp_path, family)
    with pytest.raises(InvalidRequest, match=said):
        stages_of(read_model_config(tmp_path), num_stages)


def test_all_stages_together_read_each_byte_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, num_layers=4, has_tokenizer=False, tie_word_embeddings=False)
    counts: list[int] = []
    read = os.preadv

    def counted(*args: Any) -> int:
        counts.append(read(*args))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counted)
    whole = scores(tmp_path)
    of_whole = sum(counts)
    counts.clear()
    assert scores_through_stages(tmp_path, 3)[0] == whole
    assert sum(counts) == of_whole
