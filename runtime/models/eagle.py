"""An EAGLE head (Li et al. 2024, arXiv:2401.15077): a layer, or a few, that go on with the model's
final hidden states.

    token t_p        -> the model's embedding  \\
                                                fc -> a layer without an input norm -> the model's
    hidden h_(p - 1) -------------------------- /     output projection

As published: `fc`, `layers.0` (those behind it, if any, are as the model's), sometimes a copy of
the model's embedding. h is the model's state before the token, so that t_p's KV depends on the
tokens up to t_p alone; behind its own guess h is the head's own output.
"""

from __future__ import annotations

from torch import Tensor

from .decoder_layers import attention_of, decoder_layer
from .forward_batch import ForwardBatch
from .layers.build import ModelBuild
from .layers.embedding import VocabEmbedding
from .layers.experts import feed_forward_of
from .layers.linear import LinearLayer
from .layers.norm import norm_of
from .layers.rotary import LayerRotary
from .vision.tower import VisionTower


class EagleHead:
    """A `LanguageModel` that also reads hidden states: `batch.residual`, which it leaves as it
    is."""

    vision: VisionTower | None = None  # it does not see

    def __init__(self, build: ModelBuild, vocabulary: VocabEmbedding) -> None:
        """build: of the head's checkpoint; vocabulary: the model's."""
        config = build.config
        size = config.hidden_size
        self._vocabulary = vocabulary
        # A checkpoint with an embedding is read as one without an output projection is.
        prefix = "model." if "model.fc.weight" in build.source else ""
        merge, layer = f"{prefix}fc", f"{prefix}layers.0"
        self._merge = LinearLayer(
            build,
            [merge],
            in_features=2 * size,
            out_features=[size],
            bias=f"{merge}.bias" in build.source,
        )
        self._attention = attention_of(build, layer, 0)
        self._middle_norm = norm_of(build, f"{layer}.{config.names.middle_norm}", size)
        self._feed_forward = feed_forward_of(build, layer, 0)
        self._further = [
            decoder_layer(build, f"{prefix}layers.{index}", index)
            for index in range(1, config.num_layers)
        ]
        self._rotary = LayerRotary(build)
        self._add, self._join = build.kernels.add_in_place, build.kernels.join_columns
        for unread in (f"{prefix}embed_tokens.", "lm_head.", f"{layer}.self_attn.rotary_emb."):
            build.source.skip(unread)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """See `Decoder.forward`."""
        assert batch.residual is not None, "it reads the model's hidden states"
        rotary, *rotaries = self._rotary.at(positions)
        merged = self._join(self._vocabulary.embed(input_ids), batch.residual)
        residual = self._merge(merged, batch)
        attended = self._attention(residual, rotary, batch)
        output = self._feed_forward(self._middle_norm(attended, residual), batch)
        for layer, rotary in zip(self._further, rotaries):
            output = layer(output, residual, rotary, batch)
        self._add(residual, output)
        return residual

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Decoder.compute_logits`."""
        return self._vocabulary.logits(hidden, out)
