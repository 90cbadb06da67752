"""A draft model's checkpoint, and which models can guess for which. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from ...errors import InvalidRequest
from .config.model_config import ModelConfig
from .draft_heads import Head, Medusa

if TYPE_CHECKING:  # it imports torch
    from .quantized.quantizing import Quantization


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A draft model to load."""

    folder: Path
    config: ModelConfig | None  # None: it has no layers
    quantization: Quantization | Literal["none"] = "none"
    head: Head | None = None  # it reads the model's hidden states; None: it is a model

    @property
    def max_ahead(self) -> int | None:
        """How many tokens it can guess; None: any number."""
        return self.head.num_heads if isinstance(self.head, Medusa) else None


@dataclass(frozen=True, slots=True)
class FirstLayers:
    """The model's own first layers guess."""

    num_layers: int
    max_ahead: ClassVar[int | None] = None


@dataclass(frozen=True, slots=True)
class OwnPredictor:
    """The layer that the model's checkpoint has for multi-token prediction guesses."""

    max_ahead: ClassVar[int | None] = None


Draft = DraftCheckpoint | FirstLayers | OwnPredictor
"""What guesses for a model."""


def require_eagle(model: ModelConfig, head: ModelConfig, name: str) -> None:
    """Raises InvalidRequest where the head of the first EAGLE is not for a model of this shape."""
    require_head(model, head, name)
    for field in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(model, field), getattr(head, field)
        if ours != theirs:
            why = f"its {field} is {theirs}, that of {model.architecture} here {ours}"
            raise _another_head(name, why)


def require_eagle3(model: ModelConfig, head: ModelConfig, name: str) -> None:
    """Raises InvalidRequest where the head of EAGLE-3 cannot guess for the model."""
    require_head(model, head, name)
    if head.num_layers != 1:
        why = f"it has {head.num_layers} layers, and an EAGLE-3 head has one"
        raise _another_head(name, why)


def require_head(model: ModelConfig, head: ModelConfig | None, name: str) -> None:
    """Raises InvalidRequest where no head can guess for the model, or this one cannot. head: its
    layers; None: it has none."""
    why = _why_silent(model)
    if model.varied is not None:
        why = f"the layers of {model.architecture} vary"
    if head is not None and why is None:
        why = why_no_draft(head)
    if why is not None:
        raise _another_head(name, why)


def _another_head(name: str, why: str) -> InvalidRequest:
    return InvalidRequest.of("draft_model", name, f"none, or another head: {why}")


def require_drafts(model: ModelConfig, draft: ModelConfig, name: str) -> None:
    """Raises InvalidRequest where `draft` cannot guess for the model."""
    why = _why_silent(model) or why_no_draft(draft)
    if why is not None:
        raise InvalidRequest.of("draft_model", name, f"none: {why}")


def require_first_layers(model: ModelConfig, num_layers: int) -> None:
    """Raises InvalidRequest where the first layers cannot guess for the model."""
    why = _why_silent(model) or why_no_draft(model)
    if why is not None:
        raise InvalidRequest.of("draft_layers", num_layers, f"0: {why}")
    if num_layers >= model.num_layers:
        allowed = f"0, or fewer than the model's {model.num_layers} layers"
        raise InvalidRequest.of("draft_layers", num_layers, allowed)


def require_predictor(model: ModelConfig) -> None:
    """Raises InvalidRequest where the checkpoint has no layer that predicts one token more."""
    why = why_no_draft(replace(model, recurrent=None))  # its own layer has attention
    if model.predictor is None:
        why = f"{model.architecture} has no layer for multi-token prediction that can be read here"
    if why is not None:
        raise InvalidRequest.of("draft_model", "mtp", f"none, or another model: {why}")


def _why_silent(model: ModelConfig) -> str | None:
    return f"{model.architecture} generates nothing" if model.is_bare else None


def why_no_draft(draft: ModelConfig) -> str | None:
    """Why a model's states and KV cannot be had for drafts; None: they can."""
    name = draft.architecture
    if draft.is_bare:
        return f"{name} generates nothing"
    if draft.recurrent is not None:
        return f"{name} has recurrent layers, whose states are not kept for drafts"
    if draft.varied is not None:
        return f"the layers of {name} share KV or vary in what they add"
    if draft.latent is not None and draft.latent.indexer is not None:
        return f"{name} selects keys, whose index is not kept for drafts"
    return None
