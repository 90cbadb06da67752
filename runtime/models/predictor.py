"""The layer behind a model's last that predicts one token more: multi-token prediction as in
DeepSeek-V3 (arXiv:2412.19437, 2.2), whose form GLM-4.5, Qwen3-Next, MiMo and others have, too.

    token t_p        -> embedding, normed  \\
                                            projected -> one layer of the model -> normed -> logits
    hidden h_(p - 1) -> normed             /

h is the model's final hidden state before the token, so that t_p's KV depends on the tokens up to
t_p alone, as the model's does. Behind its own guess h is the layer's own output, before the norm
or behind it. Embedding and output projection are the model's.
"""

from __future__ import annotations

from torch import Tensor

from ..checkpoint.config.model_config import PredictorConfig
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

    def __init__(
        self, build: ModelBuild, predictor: PredictorConfig, vocabulary: VocabEmbedding
    ) -> None:
        """build: with a config of one layer."""
        size = build.config.hidden_size
        self._vocabulary = vocabulary
        self._token_norm = norm_of(build, predictor.token_norm, size)
        self._hidden_norm = norm_of(build, predictor.hidden_norm, size)
        self._is_hidden_first = predictor.is_hidden_first
        self._merge = LinearLayer(
            build, [predictor.merge], in_features=2 * size, out_features=[size]
        )
        self._layer = decoder_layer(build, predictor.layer, 0)
        self._norm = norm_of(build, predictor.norm, size)
        self._hands_on_normed = predictor.hands_on_normed
        self._rotary = LayerRotary(build)
        self._add, self._join = build.kernels.add_in_place, build.kernels.join_columns
        for copied in predictor.copies:
            build.source.skip(copied)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """See `Decoder.forward`; the result is what the layer hands on [T, hidden_size]."""
        assert batch.residual is not None, "it reads the model's hidden states"
        (rotary,) = self._rotary.at(positions)
        tokens = self._token_norm(self._vocabulary.embed(input_ids))
        before = self._hidden_norm(batch.residual)
        both = (before, tokens) if self._is_hidden_first else (tokens, before)
        residual = self._merge(self._join(*both), batch)
        self._add(residual, self._layer(None, residual, rotary, batch))
        return self._norm(residual) if self._hands_on_normed else residual

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Decoder.compute_logits`."""
        normed = hidden if self._hands_on_normed else self._norm(hidden)
        return self._vocabulary.logits(normed, out)
