"""A decoder-only model: embedding, a stack of layers around one residual stream, a norm, and the
output projection. The config specifies the layers (`families/`)."""

from __future__ import annotations

import logging
from copy import copy

import torch
from torch import Tensor

from .decoder_layers import decoder_layer
from .forward_batch import ForwardBatch
from .layers.build import ModelBuild
from .layers.embedding import VocabEmbedding
from .layers.norm import Norm, norm_of
from .layers.rotary import LayerRotary, Rotary
from .vision.tower import VisionTower

logger = logging.getLogger(__name__)


class Decoder:
    """Decoder-only language model; immutable after construction, KV lives in the batch's pool."""

    def __init__(self, build: ModelBuild) -> None:
        config, stage = build.config, build.stage
        name = f"{config.weight_prefix}model"
        self._vocab = VocabEmbedding(build)
        self._first_layer = stage.first_layer
        self._layers = [
            decoder_layer(build, f"{name}.layers.{stage.first_layer + index}", index)
            for index in range(config.num_layers)
        ]
        self._norm: Norm | None = None
        if stage.is_last:
            self._norm = norm_of(build, f"{name}.{config.final_norm}", config.hidden_size)
        self._add, self._gather = build.kernels.add_in_place, build.kernels.gather_rows
        self._rotary = LayerRotary(build)
        self.vision: VisionTower | None = None
        unread_weights = config.unread_weights
        if config.vision is not None and build.device.type != "cuda":
            self.vision = VisionTower(build, config.vision)
        elif config.vision is not None:
            unread_weights = (*unread_weights, config.vision.weight_prefix)
        for prefix in unread_weights:
            build.source.skip(prefix)
        if unread_weights:
            unread = ", ".join(f"{prefix}*" for prefix in unread_weights)
            logger.info("%s: not loaded: %s", config.architecture, unread)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """input_ids [T] int64, positions as the batch's -> hidden [T, hidden_size] in the model's
        dtype: normed, or, with stages behind it, the residual stream.

        Writes the T tokens' KV to `batch.kv_layers`, and the rows' states to `batch.states`.
        """
        rotaries = self._rotary.at(positions)
        images, residual = batch.images, batch.residual
        if residual is None:
            residual = self._vocab.embed(input_ids)
            if images is not None:
                residual[images.places] = images.features[0]
        x: Tensor | None = None
        layers = zip(self._layers, rotaries[: len(self._layers)], strict=True)
        for index, (layer, rotary) in enumerate(layers, self._first_layer + 1):
            x = layer(x, residual, rotary, batch)
            if images is not None and index < len(images.features):
                x[images.places] += images.features[index]
            if batch.on_layer is not None:
                batch.on_layer(index - 1 - self._first_layer)
            if batch.kept is not None and index in batch.kept.layers:
                # By kernels alone: a recorded pass has nothing else.
                state = self._gather(residual, batch.kept.rows)
                self._add(state, x)
                batch.kept.of[index] = state
        assert x is not None, "it has layers"
        if self._norm is not None:
            return self._norm(x, residual, batch.out)
        if batch.out is not None:
            return torch.add(residual, x, out=batch.out)
        self._add(residual, x)
        return residual

    def rotary_at(self, positions: Tensor) -> list[Rotary]:
        """How its layers turn keys at these positions [N] int64: [num_layers]."""
        return self._rotary.at(positions)

    @property
    def vocabulary(self) -> VocabEmbedding:
        """For what shares it."""
        return self._vocab

    def first(self, num_layers: int) -> Decoder:
        """Its first layers with its embedding, norm and output projection, as a model that shares
        all of them."""
        first = copy(self)
        first._layers = self._layers[:num_layers]
        return first

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [N, hidden_size] -> [N, vocab_size] float32 (float64 for a float64 model): `out`,
        or a new tensor."""
        return self._vocab.logits(hidden, out)
