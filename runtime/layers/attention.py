"""Self-attention over the paged KV: fused qkv, rotary embedding, store, attend, project."""

from __future__ import annotations

from torch import Tensor

from ...kernels.registry import Kernels
from ..execute.inputs import ForwardBatch
from ..model_config import ModelConfig
from ..weights.source import WeightSource
from .linear import load_linear


class Attention:
    """One layer's attention block. Knows its layer's index in the KV pool."""

    def __init__(
        self,
        source: WeightSource,
        name: str,
        layer_index: int,
        config: ModelConfig,
        kernels: Kernels,
    ) -> None:
        self._layer_index = layer_index
        self._kernels = kernels
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self._qkv = load_linear(
            source,
            kernels.make_linear,
            [f"{name}.{part}_proj" for part in "qkv"],
            in_features=config.hidden_size,
            out_features=[self._q_size, kv_size, kv_size],
            bias=config.qkv_bias,
        )
        self._output = load_linear(
            source,
            kernels.make_linear,
            [f"{name}.o_proj"],
            in_features=self._q_size,
            out_features=[config.hidden_size],
            bias=config.output_bias,
        )

    def __call__(self, x: Tensor, rotary: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size], rotary (cos, sin) each [T, 1, head_dim] -> [T, hidden_size]."""
        # [T, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values, in one buffer
        heads = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        kv_layer = batch.kv_layers[self._layer_index]
        self._kernels.rotate_and_store(heads, *rotary, kv_layer, batch.slot_mapping)
        queries = heads[:, : self._num_heads]
        attended = self._kernels.paged_attention(queries, kv_layer, batch.attention)
        return self._output(attended.reshape(-1, self._q_size))
