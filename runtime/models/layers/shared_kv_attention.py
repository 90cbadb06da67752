"""Self-attention of layers of several shapes, of which some attend to the KV of an earlier one
(Gemma 3n, Gemma 4). Queries, keys and values are normed head by head, values without weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.ops import KVLayer, RMSNorm
from ....kernels.reference.kv_store import rotate
from ..forward_batch import ForwardBatch
from .build import ModelBuild
from .linear import LinearLayer
from .norm import wide_rms_norm
from .rotary import Rotary


@dataclass(frozen=True, slots=True)
class _Keys:
    """How a layer makes KV of its own."""

    key_norm: RMSNorm
    value_norm: RMSNorm
    has_values: bool


class SharedKVAttention:
    """One layer's attention block. Knows which layer of the KV pool it reads, and whether it is
    also the one that writes it."""

    def __init__(self, build: ModelBuild, name: str, layer_index: int) -> None:
        config, varied = build.config, build.config.varied
        assert varied is not None, "the config says how layers differ"
        source = varied.kv_sources[layer_index]
        self._kv_index = config.attention_layers.index(source)
        self._kind = config.layer_kinds[layer_index]
        self._kernels = build.kernels
        self._num_heads, self._num_kv_heads = config.num_heads, varied.num_kv_heads[layer_index]
        self._head_dim = varied.head_dims[layer_index]
        has_values = varied.has_values[layer_index]
        is_own = source == layer_index
        parts = ["q", *(("k", "v") if has_values else ("k",))] if is_own else ["q"]
        key_size = self._num_kv_heads * self._head_dim
        self._sizes = [self._num_heads * self._head_dim, *[key_size] * (len(parts) - 1)]
        self._project = LinearLayer(
            build,
            [f"{name}.{part}_proj" for part in parts],
            in_features=config.hidden_size,
            out_features=self._sizes,
            bias=config.qkv_bias,
        )
        self._query_norm = wide_rms_norm(build, f"{name}.q_norm", self._head_dim)
        self._keys: _Keys | None = None
        if is_own:
            ones = torch.ones(self._head_dim, dtype=build.dtype, device=build.device)
            self._keys = _Keys(
                wide_rms_norm(build, f"{name}.k_norm", self._head_dim),
                build.kernels.make_rms_norm(ones, config.rms_norm_eps),
                has_values,
            )
        else:  # checkpoints may have what is never used
            for part in ("k_proj", "v_proj", "k_norm"):
                build.source.skip(f"{name}.{part}.")
        self._output = LinearLayer(
            build,
            [f"{name}.o_proj"],
            in_features=self._sizes[0],
            out_features=[config.hidden_size],
            bias=config.output_bias,
        )

    def __call__(self, x: Tensor, rotary: Rotary, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        projected = batch.tokens.gather(self._project(x, batch))
        parts = [
            part.contiguous().view(-1, self._head_dim)
            for part in torch.split(projected, self._sizes, -1)
        ]
        kv_layer = batch.kv_layers[self._kv_index]
        if self._keys is not None:
            self._store(self._keys, parts[1], parts[-1], rotary, kv_layer, batch.slot_mapping)
        queries = self._query_norm(parts[0]).view(len(projected), self._num_heads, -1)
        rotate(queries, rotary.cos, rotary.sin)
        plan = batch.attention[self._kind]
        attended = self._kernels.paged_attention(queries, kv_layer, plan, None)
        return self._output(attended.view(len(x), -1), batch)

    def _store(
        self,
        own: _Keys,
        key: Tensor,
        value: Tensor,
        rotary: Rotary,
        kv_layer: KVLayer,
        slots: Tensor,
    ) -> None:
        """key, value [T * num_kv_heads, head_dim]; the same where there is no projection to
        values."""
        shape = (len(slots), self._num_kv_heads, self._head_dim)
        values = own.value_norm(value).view(shape)
        keys = own.key_norm(key).view(shape)
        rotate(keys, rotary.cos, rotary.sin)
        self._kernels.store_kv(keys, values, kv_layer, slots)
