"""A checkpoint folder's model config: config.json and generation_config.json, checked.

Torch-free, so that the host half (tokenizer, scheduler, server) can read it too. Every problem
raises a `ModelLoadError` that names the file, the field, what was expected and what was found.
"""

from __future__ import annotations

from dataclasses import dataclass

from .decoder_config import DecoderConfig, ExpertsConfig, LatentConfig

__all__ = ["ExpertsConfig", "LatentConfig", "ModelConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(DecoderConfig):
    """A decoder-only model and its default sampling."""

    default_temperature: float | None  # None: the checkpoint gives none
    default_top_p: float | None
    default_top_k: int | None
    default_min_p: float | None
    default_repetition_penalty: float | None
