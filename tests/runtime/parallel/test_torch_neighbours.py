"""Stages that send to each other through torch.distributed, by gloo in Triton's interpreter: what
they say is what one device says.

Processes as an engine starts them, in float64 through the reference kernels. Each test loads its
own: a process is of one world at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exactness_jobs import JOBS, loading, outputs_of, score, serve, truth
from mixtures import make_mixture
from ranks import without_library
from torch import Tensor

from stemma.runtime.parallel import meeting
from stemma.runtime.parallel.torch_neighbours import TorchNeighbours
from stemma.runtime.schedule.request import Scoring


@pytest.mark.parametrize("num_ranks", [1, 2])  # of each stage: groups of the world, as on GPUs
def test_tokens_are_identical_with_several_plans_in_flight(
    num_ranks: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "SharedMemory", without_library)
    for load in loading(checkpoint):
        loaded = load(device="cuda", pp_size=2, tp_size=num_ranks, chunked_prefill_size=23)
        assert isinstance(loaded.runner._neighbours, TorchNeighbours)
        assert loaded.engine.scheduler.max_plans_in_flight == 3
        for name, jobs in JOBS.items():
            assert outputs_of(serve(loaded, jobs)) == truth(checkpoint, name)
            assert outputs_of(serve(loaded, jobs)) == truth(checkpoint, name)


class ScriptedWorld:
    """In place of `TorchWorld`: whoever receives is slow."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.ended: list[int] = []

    def send(self, x: Tensor, process: int) -> int:
        self.sent.append(x)
        return len(self.sent) - 1

    def end(self, sent: int) -> None:
        self.ended.append(sent)


def test_what_is_under_way_does_not_change_and_is_bounded() -> None:
    """A graph leaves its results in the same place again."""
    world: Any = ScriptedWorld()
    neighbours = TorchNeighbours(world, None, 0, row=torch.empty(0, 2), max_sent=2)
    hidden = torch.empty(3, 2)
    for step in range(4):
        neighbours.send(hidden.fill_(step))
    assert [x.tolist() for x in world.sent] == [[[step] * 2] * 3 for step in range(4)]
    assert world.ended == [0, 1]


@pytest.mark.parametrize("family", ["Llama", "Mixtral", "DeepseekV3"])
def test_scores_have_the_bits_of_one_device(family: str, checkpoint: Path, tmp_path: Path) -> None:
    """Grouped queries, experts, latents."""
    if family != "Llama":
        make_mixture(tmp_path, family, has_tokenizer=True, num_hidden_layers=3)
        checkpoint = tmp_path
    prompt = JOBS["greedy"][5].prompt
    scoring = Scoring(3, prompt[4:], num_top=4)
    for load in loading(checkpoint):
        whole = score(load(device="cuda"), prompt, scoring)
        found = score(load(device="cuda", pp_size=2), prompt, scoring)
        assert len(found.scores) == len(scoring.targets) and found.scores == whole.scores
