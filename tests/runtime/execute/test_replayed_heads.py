"""Passes of heads that read hidden states are recorded, and replay what they compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from draft_heads import with_eagle, with_eagle3, with_predictor

from stemma.kernels.native.bindings import why_not_native
from stemma.runtime.execute.draft_model import DraftModel
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.models.drafts import read_draft
from stemma.runtime.models.model_config import read_model_config
from stemma.runtime.schedule.plan import PageUpdate, Row, StepPlan, TokenLogprob
from stemma.runtime.schedule.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(
    why_not_native(torch.bfloat16) is not None, reason="nothing is recorded"
)
MAKERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "eagle": (with_eagle, "head"),
    "eagle3": (with_eagle3, "head"),
    "mtp": (lambda folder: with_predictor(folder, "MiMo"), "mtp"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_replayed_pass_guesses_what_a_computed_one_does(kind: str, tmp_path: Path) -> None:
    make, name = MAKERS[kind]
    make(tmp_path)
    config = read_model_config(tmp_path)
    draft = read_draft(config, name if name == "mtp" else str(tmp_path / name))
    runner = ModelRunner(tmp_path, config, dtype="bfloat16", num_pages=64, draft=draft)
    head = runner.steps._draft_model
    assert isinstance(head, DraftModel)

    def guesses() -> list[tuple[TokenLogprob, ...]]:
        found = []
        for number, ids in enumerate(((5, 6, 7), (8, 9, 10), (1, 2, 3))):
            row = Row(
                number, 0, 0, ids, PageUpdate(0, tuple(range(16))), num_ahead=3,
                sampling=SamplingParams(temperature=0.0),
            )  # fmt: skip
            (result,) = runner.execute(StepPlan(number, (row,))).rows
            found.append(result.ahead)
        return found

    replayed = guesses()
    assert head._forward._replays and None not in head._forward._replays.values()
    head._forward._capture = None
    assert replayed == guesses()
    assert len(set(replayed)) == 3 and all(len(ahead) == 3 for ahead in replayed)
