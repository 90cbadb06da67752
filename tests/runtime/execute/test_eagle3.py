"""An EAGLE-3 head: the states that a pass leaves for it, and its draws."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from draft_heads import with_eagle3
from torch import Tensor

from stemma.kernels.gumbel import gumbel
from stemma.kernels.native.bindings import why_not_native
from stemma.kernels.sampling_rows import SamplingRows
from stemma.runtime.checkpoint.draft_checkpoint import DraftCheckpoint
from stemma.runtime.checkpoint.draft_heads import read_eagle3
from stemma.runtime.execute.draft_model import DraftModel
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.execute.sampling_arrays import sampling_arrays
from stemma.runtime.models.eagle3 import Eagle3Head
from stemma.runtime.models.forward_batch import LayerStates
from stemma.runtime.models.model_config import read_head_config, read_model_config
from stemma.runtime.schedule.plan import NO_GUESSES, PageUpdate, Row, StepPlan
from stemma.runtime.schedule.sampling_params import SamplingParams


@pytest.mark.skipif(why_not_native(torch.bfloat16) is not None, reason="nothing is recorded")
def test_a_replayed_step_keeps_the_states_of_its_own_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_eagle3(tmp_path)
    config, head = read_model_config(tmp_path), tmp_path / "head"
    read = read_eagle3(head, config.hidden_size, config.vocab_size, config.num_layers)
    draft = DraftCheckpoint(head, read_head_config(head), head=read)
    runner = ModelRunner(tmp_path, config, dtype="bfloat16", num_pages=64, draft=draft)
    steps: list[dict[int, Tensor]] = []

    def noted(_: DraftModel, plan: StepPlan, results: object, hidden: Tensor, kept: LayerStates):
        steps.append({layer: state.clone() for layer, state in kept.of.items()})
        return results, NO_GUESSES

    monkeypatch.setattr(DraftModel, "guessed", noted)
    pages = PageUpdate(0, tuple(range(16)))
    plans = [StepPlan(0, (Row(0, 0, 0, ids, pages),)) for ids in ((5, 6, 7), (8, 9, 10), (1, 2, 3))]
    for plan in plans:
        runner.execute(plan)
    assert any(replay is not None for replay in runner.steps.forward._replays.values())
    runner.steps.forward._capture = None
    for plan in plans:
        runner.execute(plan)
    replayed, computed = steps[:3], steps[3:]
    assert [sorted(each) for each in steps] == [[2, 3, 4]] * 6
    for ours, wanted in zip(replayed, computed):
        assert all(torch.equal(ours[layer], wanted[layer]) for layer in wanted)
    assert not torch.equal(computed[0][2], computed[1][2])


def test_a_draw_of_a_reduced_vocabulary_sees_the_noise_of_the_models_ids(tmp_path: Path) -> None:
    with_eagle3(tmp_path)
    config, folder = read_model_config(tmp_path), tmp_path / "head"
    read = read_eagle3(folder, config.hidden_size, config.vocab_size, config.num_layers)
    draft = DraftCheckpoint(folder, read_head_config(folder), head=read)
    runner = ModelRunner(
        tmp_path, config, dtype="float64", kernels="reference", num_pages=64, draft=draft
    )
    assert runner._drafts is not None
    model = runner._drafts._model
    assert isinstance(model, Eagle3Head)
    hidden = torch.randn(50, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits = model.compute_logits(hidden)
    positions = np.arange(50)
    params = [SamplingParams(temperature=2.0, seed=seed) for seed in range(50)]
    arrays = sampling_arrays(params, positions)
    rows = SamplingRows(**{name: torch.from_numpy(each) for name, each in arrays.items()})
    token_ids, _ = runner.kernels.sample(logits, rows)
    assert read.token_ids is not None and len(read.token_ids) < config.vocab_size
    own = logits[:, torch.from_numpy(read.token_ids)].numpy()
    for row, token_id in enumerate(token_ids.tolist()):
        noise = gumbel(np.uint64([row]), np.uint64([row]), read.token_ids)
        assert token_id == read.token_ids[np.argmax(own[row] / 2.0 + noise)]
    assert len(set(token_ids.tolist())) > 20
