"""An EAGLE-3 head (Li et al. 2025, arXiv:2503.01840): one layer that goes on with hidden states
from within the model, and guesses among the most frequent tokens.

    three hidden states of token t_(p - 1) -> fc -> h -> hidden_norm    \\
                                                                          attention -> ... -> norm
    token t_p -> embedding ---------------------> input_layernorm       /               -> lm_head

As published: `fc`, `midlayer` (or `layers.0`), `norm`, `lm_head` over `draft_vocab_size` tokens,
`d2t` with their ids, sometimes `embed_tokens`. h is of the token before, so that t_p's KV depends
on the tokens up to t_p alone; behind its own guess h is the layer's own output before its norm.
Logits are laid out by the model's ids, minus infinity where the head has no token: so a draw sees
the noise that the model's draw of the same token does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ...kernels.ops import OutputLinear
from ...kernels.reference.dense import placed
from ..checkpoint.draft_heads import Eagle3
from .decoder_layers import attention_of
from .forward_batch import ForwardBatch
from .layers.build import ModelBuild
from .layers.embedding import VocabEmbedding
from .layers.experts import feed_forward_of
from .layers.norm import Norm, norm_of
from .layers.rotary import LayerRotary
from .vision.tower import VisionTower


class Eagle3Head:
    """A `LanguageModel` that also reads hidden states, merged: `batch.residual`, which it
    overwrites."""

    vision: VisionTower | None = None  # it does not see

    def __init__(
        self, build: ModelBuild, head: Eagle3, vocabulary: VocabEmbedding, state_size: int
    ) -> None:
        """build: of the head's checkpoint; vocabulary: the model's; state_size: of the model's
        hidden states."""
        config, source = build.config, build.source
        size = config.hidden_size
        # A checkpoint with an embedding is read as one without an output projection is.
        prefix = "model." if head.has_embedding else ""
        layer = f"{prefix}midlayer"
        if (
            f"{layer}.hidden_norm.weight" not in source
            and f"{prefix}layers.0.hidden_norm.weight" in source
        ):
            layer = f"{prefix}layers.0"
        self.layers = head.layers
        joined = len(head.layers) * state_size
        self._states_norm: Norm | None = None
        if head.is_input_normed:
            self._states_norm = norm_of(build, f"{prefix}input_norm", joined)
        merge = f"{prefix}fc"
        bias = source.take(f"{merge}.bias", (size,)) if f"{merge}.bias" in source else None
        self._merge = build.kernels.make_linear(source.take_weight([merge], [size], joined), bias)
        self._vocabulary = vocabulary
        self._gather = build.kernels.gather_rows
        self._table: Tensor | None = None
        if head.has_embedding:
            shape = (config.vocab_size, size)
            self._table = source.take(f"{prefix}embed_tokens.weight", shape)
        self._token_norm = norm_of(build, f"{layer}.{config.names.input_norm}", size)
        self._hidden_norm = norm_of(build, f"{layer}.hidden_norm", size)
        self._is_residual_normed = head.is_residual_normed
        self._attention = attention_of(build, layer, 0, in_features=2 * size)
        self._middle_norm = norm_of(build, f"{layer}.{config.names.middle_norm}", size)
        self._feed_forward = feed_forward_of(build, layer, 0)
        self._norm = norm_of(build, f"{prefix}norm", size)
        self._rotary = LayerRotary(build)
        self._add, self._join = build.kernels.add_in_place, build.kernels.join_columns
        self._output: OutputLinear | None = None
        if head.has_output:
            weight = source.take_weight(["lm_head"], [head.vocab_size], size)
            self._output = build.kernels.make_output_linear(weight)
        self._vocab_size = config.vocab_size
        self._token_ids: Tensor | None = None
        if head.token_ids is not None:
            self._token_ids = torch.from_numpy(head.token_ids)
        for unread in ("d2t", "t2d", "verifier_norm.", "verifier_lm_head."):
            source.skip(f"{prefix}{unread}")
        source.skip(f"{layer}.self_attn.rotary_emb.")

    def merged(self, states: Mapping[int, Tensor]) -> Tensor:
        """The model's hidden states behind `layers`, [T, state_size] each -> what the head goes on
        with [T, hidden_size]."""
        joined = torch.cat([states[layer] for layer in self.layers], dim=-1)
        return self._merge(joined if self._states_norm is None else self._states_norm(joined))

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """See `Decoder.forward`; the result is the layer's output [T, hidden_size] before its
        norm."""
        assert batch.residual is not None, "it reads the model's hidden states"
        (rotary,) = self._rotary.at(positions)
        tokens = self._token_norm(self._embed(input_ids))
        normed = self._hidden_norm(batch.residual)
        both = self._join(tokens, normed)
        residual = normed if self._is_residual_normed else batch.residual
        attended = self._attention(both, rotary, batch)
        self._add(residual, self._feed_forward(self._middle_norm(attended, residual), batch))
        return residual

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Decoder.compute_logits`."""
        normed = self._norm(hidden)
        if self._output is None:
            return self._vocabulary.logits(normed, out)
        if self._token_ids is None:
            return self._output(normed, out)
        logits = self._output(normed)
        of_all = logits.new_full((len(logits), self._vocab_size), -math.inf)
        of_all[:, self._token_ids] = logits
        return placed(of_all, out)

    def _embed(self, input_ids: Tensor) -> Tensor:
        if self._table is None:
            return self._vocabulary.embed(input_ids)
        return self._gather(self._table, input_ids)
