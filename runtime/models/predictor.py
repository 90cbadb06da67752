"""The layer behind a model's last that predicts one token more: multi-token prediction as in
DeepSeek-V3 (arXiv:2412.19437, 2.2), whose form GLM-4.5 and others have, too.

    token t_p        -> embedding, normed  \\
                                            projected -> one layer of the model -> normed -> logits
    hidden h_(p - 1) -> normed             /

h is the model's final hidden state before the token, so that t_p's KV depends on the tokens up to
t_p alone, as the model's does. Behind its own guess h is the layer's own output. Embedding and
output projection are the model's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .decoder_layers import decoder_layer
from .forward_batch import ForwardBatch
from .layers.build import ModelBuild
from .layers.embedding import VocabEmbedding
from .layers.linear import LinearLayer
from .layers.norm import norm_of
from .layers.rotary import LayerRotary
from .vision.tower import VisionTower


class Predictor:
    """A `LanguageModel` that also reads hidden states: `batch.residual`, which it leaves as it
    is."""

    vision: VisionTower | None = None  # it does not see

    def __init__(self, build: ModelBuild, name: str, vocabulary: VocabEmbedding) -> None:
        """build: with a config of one layer; name: that layer's in the checkpoint."""
        size = build.config.hidden_size
        self._vocabulary = vocabulary
        self._token_norm = norm_of(build, f"{name}.enorm", size)
        self._hidden_norm = norm_of(build, f"{name}.hnorm", size)
        self._merge = LinearLayer(
            build, [f"{name}.eh_proj"], in_features=2 * size, out_features=[size]
        )
        self._layer = decoder_layer(build, name, 0)
        self._norm = norm_of(build, f"{name}.shared_head.norm", size)
        self._rotary = LayerRotary(build)
        self._add = build.kernels.add_in_place
        for copied in ("embed_tokens.", "shared_head.head."):
            build.source.skip(f"{name}.{copied}")

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """See `Decoder.forward`; the result is the layer's output [T, hidden_size] before its
        norm."""
        assert batch.residual is not None, "it reads the model's hidden states"
        (rotary,) = self._rotary.at(positions)
        tokens = self._token_norm(self._vocabulary.embed(input_ids))
        before = self._hidden_norm(batch.residual)
        residual = self._merge(torch.cat([tokens, before], dim=-1), batch)
        self._add(residual, self._layer(None, residual, rotary, batch))
        return residual

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.compute_logits`."""
        return self._vocabulary.logits(self._norm(hidden))
