"""Which draft a model is asked to have: found, read and checked. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...errors import InvalidRequest
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
from ..checkpoint.draft_heads import (
    Eagle,
    head_kind,
    read_eagle3,
    read_medusa,
    require_model,
)
from ..checkpoint.location import MTP
from ..tokenizer.same_tokens import first_difference
from ..tokenizer.tokenizer import Tokenizer
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
    if kind is None:
        require_model(folder)
    config = read_model_config(folder)
    if kind == "eagle":
        require_eagle(model, config, draft_model)
        return DraftCheckpoint(folder, config, quantization, Eagle())
    require_drafts(model, config, draft_model)
    return DraftCheckpoint(folder, config, quantization)


def require_same_tokens(draft: Draft | None, tokenizer: Tokenizer, model_name: str) -> None:
    """Raises InvalidRequest for a draft model whose ids are other tokens than those of the model
    with this tokenizer; heads have the model's tokens, and no tokenizer."""
    if not isinstance(draft, DraftCheckpoint) or draft.head is not None:
        return
    assert draft.config is not None, "a model has layers"
    difference = first_difference(tokenizer, Tokenizer(draft.folder, draft.config.vocab_size))
    if difference is not None:
        allowed = f"a model with the tokens of {model_name}: {difference}"
        raise InvalidRequest.of("draft_model", str(draft.folder), allowed)


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
