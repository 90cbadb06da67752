"""The Llama family: RMSNorm, rotary attention with grouped KV heads, gated MLP.

Llama, Mistral and Qwen2 differ only in where biases are, which the config says. Layers are plain
objects that hold prepared kernels; everything a step needs comes in through `forward`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.registry import Kernels
from ..execute.inputs import ForwardBatch
from ..layers.attention import Attention
from ..layers.embedding import VocabEmbedding
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rotary import RotaryTable
from ..model_config import ModelConfig
from ..weights.source import WeightSource


class LlamaForCausalLM:
    """Decoder-only language model; immutable after construction, KV lives in the batch's pool."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        self.config = config
        self._vocab = VocabEmbedding(source, config, kernels)
        self._layers = [
            DecoderLayer(source, f"model.layers.{index}", index, config, kernels)
            for index in range(config.num_layers)
        ]
        self._norm = RMSNorm(source, "model.norm", config.hidden_size, config.rms_norm_eps, kernels)
        self._rotary = RotaryTable(
            config.head_dim,
            max_model_len,
            config.rope_theta,
            config.rope_scaling,
            dtype=dtype,
            device=device,
        )

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """input_ids, positions [T] int64 -> hidden [T, hidden_size], normed, in the model's dtype.

        Writes the T tokens' KV to `batch.kv_layers`.
        """
        rotary = self._rotary.at(positions)
        residual = self._vocab.embed(input_ids)
        x: Tensor | None = None
        for layer in self._layers:
            x = layer(x, residual, rotary, batch)
        return self._norm(x, residual) if x is not None else self._norm(residual)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden_size] -> [N, vocab_size] float32 (float64 for a float64 model)."""
        return self._vocab.logits(hidden)


class DecoderLayer:
    """Attention and MLP, each behind a norm, around one residual stream."""

    def __init__(
        self, source: WeightSource, name: str, index: int, config: ModelConfig, kernels: Kernels
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self._input_norm = RMSNorm(source, f"{name}.input_layernorm", size, eps, kernels)
        self._attention = Attention(source, f"{name}.self_attn", index, config, kernels)
        self._mlp_norm = RMSNorm(source, f"{name}.post_attention_layernorm", size, eps, kernels)
        self._mlp = GatedMLP(source, f"{name}.mlp", config, kernels)

    def __call__(
        self,
        x: Tensor | None,
        residual: Tensor,
        rotary: tuple[Tensor, Tensor],
        batch: ForwardBatch,
    ) -> Tensor:
        """x: the layer below's output, not yet in `residual` (None: nothing), both
        [T, hidden_size] -> this layer's, not yet in `residual`, which is updated in place."""
        normed = self._input_norm(residual) if x is None else self._input_norm(x, residual)
        attended = self._attention(normed, rotary, batch)
        return self._mlp(self._mlp_norm(attended, residual))
