"""Which decoder computes a model: the one whose layers are alike, or the one whose layers vary."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .decoder import Decoder
from .forward_batch import ForwardBatch
from .layers.build import ModelBuild
from .varied_decoder import VariedDecoder
from .vision.tower import VisionTower


class LanguageModel(Protocol):
    """Decoder-only; immutable, KV lives in the batch's pool."""

    vision: VisionTower | None  # None: it does not see

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """See `Decoder.forward`."""
        ...

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Decoder.compute_logits`."""
        ...


def build_model(build: ModelBuild) -> LanguageModel:
    """The decoder that the config specifies."""
    return Decoder(build) if build.config.varied is None else VariedDecoder(build)
