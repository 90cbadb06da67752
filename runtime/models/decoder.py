"""A decoder-only model: embedding, a stack of layers around one residual stream, a norm, and the
output projection. The config specifies the layers (`families/`)."""

from __future__ import annotations

import logging

from torch import Tensor

from .decoder_layers import decoder_layer
from .forward_batch import ForwardBatch
from .layers.build import ModelBuild
from .layers.embedding import VocabEmbedding
from .layers.norm import norm_of
from .layers.rotary import LayerRotary

logger = logging.getLogger(__name__)


class Decoder:
    """Decoder-only language model; immutable after construction, KV lives in the batch's pool."""

    def __init__(self, build: ModelBuild) -> None:
        config = build.config
        name = f"{config.weight_prefix}model"
        self._vocab = VocabEmbedding(build)
        self._layers = [
            decoder_layer(build, f"{name}.layers.{index}", index)
            for index in range(config.num_layers)
        ]
        self._norm = norm_of(build, f"{name}.{config.final_norm}", config.hidden_size)
        self._rotary = LayerRotary(build)
        for prefix in config.unread_weights:
            build.source.skip(prefix)
        if config.unread_weights:
            unread = ", ".join(f"{prefix}*" for prefix in config.unread_weights)
            logger.info("%s: not loaded: %s", config.architecture, unread)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """input_ids, positions [T] int64 -> hidden [T, hidden_size], normed, in the model's dtype.

        Writes the T tokens' KV to `batch.kv_layers`, and the rows' states to `batch.states`.
        """
        rotaries = self._rotary.at(positions)
        residual = self._vocab.embed(input_ids)
        x: Tensor | None = None
        for layer, rotary in zip(self._layers, rotaries, strict=True):
            x = layer(x, residual, rotary, batch)
        return self._norm(x, residual) if x is not None else self._norm(residual)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden_size] -> [N, vocab_size] float32 (float64 for a float64 model)."""
        return self._vocab.logits(hidden)
