"""Which draft a model is asked to have: found, read and checked. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..checkpoint.config.model_config import ModelConfig
from ..checkpoint.draft_checkpoint import (
    Draft,
    DraftCheckpoint,
    FirstLayers,
    OwnPredictor,
    require_drafts,
    require_eagle,
    require_eagle3,
    require_first_layers,
    require_head,
    require_predictor,
)
from ..checkpoint.draft_heads import Eagle, head_kind, read_eagle3, read_medusa
from ..checkpoint.location import MTP
from .layers.stage import config_of_stage
from .model_config import read_head_config, read_model_config

if TYPE_CHECKING:  # it imports torch
    from ..checkpoint.quantized.quantizing import Quantization


def read_draft(
    model: ModelConfig,
    draft_model: str | None = None,
    draft_layers: int = 0,
    quantization: Quantization | Literal["none"] = "none",
) -> Draft | None:
    """What guesses for this model; the arguments are the flags, `draft_model` a folder or `MTP`.
    None: nothing is asked for. Raises InvalidRequest where it cannot guess, and ModelLoadError."""
    if draft_layers:
        require_first_layers(model, draft_layers)
        return FirstLayers(draft_layers)
    if draft_model == MTP:
        require_predictor(model)
        return OwnPredictor()
    if draft_model is None:
        return None
    folder = Path(draft_model)
    kind = head_kind(folder)
    if kind == "medusa":
        require_head(model, None, draft_model)
        medusa = read_medusa(folder, model.hidden_size, model.vocab_size)
        return DraftCheckpoint(folder, None, quantization, medusa)
    if kind == "eagle3":
        config = read_head_config(folder)
        require_eagle3(model, config, draft_model)
        eagle3 = read_eagle3(folder, model.hidden_size, model.vocab_size, model.num_layers)
        return DraftCheckpoint(folder, config, quantization, eagle3)
    config = read_model_config(folder)
    if kind == "eagle":
        require_eagle(model, config, draft_model)
        return DraftCheckpoint(folder, config, quantization, Eagle())
    require_drafts(model, config, draft_model)
    return DraftCheckpoint(folder, config, quantization)


def config_of(draft: Draft, model: ModelConfig) -> ModelConfig | None:
    """Of the layers that have KV of their own; None: there are none."""
    if isinstance(draft, DraftCheckpoint):
        return draft.config
    if isinstance(draft, FirstLayers):
        return None
    last = model.attention_layers[-1]  # which a predictor's is like
    own = replace(config_of_stage(model, (last, last + 1)), recurrent=None)
    is_dense = model.predictor is not None and model.predictor.is_dense
    return replace(own, experts=None) if is_dense else own
