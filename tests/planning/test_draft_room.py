"""What `stemma doctor` counts of a draft is what its checkpoint has and what an engine holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from draft_heads import with_eagle, with_medusa, with_predictor
from safetensors.torch import load_file

from stemma.planning.draft_room import DraftRoom
from stemma.planning.served_model import ServedModel
from stemma.runtime.config import EngineConfig
from stemma.runtime.loaded_model import LoadedModel


@pytest.mark.parametrize("kind", ["model", "layers", "mtp", "eagle", "medusa"])
def test_room_of_a_draft(tmp_path: Path, kind: str) -> None:
    model, head = tmp_path / "model", tmp_path / "model" / "head"
    flags: dict[str, Any] = {"draft_model": str(head)}
    file, begin = head / "model.safetensors", ""
    if kind in ("model", "layers"):
        make_checkpoint(model, num_layers=2)
        make_checkpoint(head, num_layers=1, num_kv_heads=1, seed=3)
    elif kind == "mtp":
        with_predictor(model, "DeepseekV3")
        file, begin = model / "model.safetensors", "model.layers.2."
        flags = {"draft_model": "mtp"}
    else:
        {"eagle": with_eagle, "medusa": with_medusa}[kind](model)
    if kind == "medusa":
        file = head / "medusa_lm_head.safetensors"
    if kind == "layers":
        flags = {"draft_layers": 1}
    loaded = LoadedModel(EngineConfig(str(model), dtype="float32", max_total_tokens=512, **flags))
    config, draft = loaded.model_config, loaded.draft
    assert draft is not None
    served = ServedModel.of(config, "float32", draft=draft)
    assert served.kv_bytes_per_token == loaded.runner.kv_layout.bytes_per_token
    is_own = {"embed_tokens.weight", "shared_head.head.weight"}  # a predictor has the model's
    stored = sum(
        tensor.nbytes
        for name, tensor in load_file(file).items()
        if name.startswith(begin) and (not begin or name.removeprefix(begin) not in is_own)
    )
    counted = DraftRoom.of(draft, config, "float32").weight_bytes
    assert counted == (0 if kind == "layers" else pytest.approx(stored, rel=0.01))
    assert served.weight_bytes == ServedModel.of(config, "float32").weight_bytes + counted
