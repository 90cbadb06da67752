"""Self-attention over the paged KV: fused qkv, rotary embedding, store, attend, project."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....kernels.ops import KVLayer
from ....kernels.reference.dense import sigmoid
from ....kernels.reference.kv_store import rotate
from ...checkpoint.config.model_config import DecoderConfig
from ...checkpoint.parts import WHOLE, Part, Range
from ..forward_batch import ForwardBatch
from .build import ModelBuild
from .linear import LinearLayer
from .norm import query_key_norm_of
from .ranks import HeadShare, head_share
from .rotary import Rotary, halves_apart


class Attention:
    """One layer's attention block. Knows its layer's index in the KV pool, and which of the
    step's attention plans it uses.

    With the config's gates a query head's projection is twice as wide: its query, then its gate.
    Between ranks its heads are divided.
    """

    def __init__(
        self,
        build: ModelBuild,
        name: str,
        layer_index: int,
        in_features: int | None = None,
    ) -> None:
        """in_features: of the input; None: hidden_size."""
        config, is_fused = build.config, build.config.has_fused_projections
        self._layer_index = config.attention_layers.index(layer_index)
        self._kind = config.layer_kinds[layer_index]
        self._kernels = build.kernels
        share = head_share(config, build.ranks)
        self._num_heads = share.num_heads
        self._num_kv_heads = share.num_kv_heads
        self._head_dim = config.head_dim
        self._q_size = share.num_heads * config.head_dim
        self._is_gated = config.has_attention_gate
        q_width = config.head_dim * (2 if self._is_gated else 1)
        kv_size = config.num_kv_heads * config.head_dim
        sizes = [config.num_heads * q_width, kv_size, kv_size]
        self.projection = LinearLayer(
            build,
            [f"{name}.qkv_proj"] if is_fused else [f"{name}.{part}_proj" for part in "qkv"],
            in_features=in_features or config.hidden_size,
            out_features=[sum(sizes)] if is_fused else sizes,
            bias=config.qkv_bias,
            orders=_orders(config, share) if config.has_interleaved_rope else None,
            part=_projected(share, config, q_width, sizes) if share.is_divided else WHOLE,
        )
        self._norm = query_key_norm_of(build, name, layer_index)
        self._sink_logits: Tensor | None = None
        if config.has_sink_logits:
            self._sink_logits = build.source.take_rows(
                f"{name}.sinks",
                (config.num_heads,),
                [share.heads],
                torch.promote_types(build.dtype, torch.float32),
            )
        self._is_normed_after_rotation = config.is_normed_after_rotation
        self._output = LinearLayer(
            build,
            [f"{name}.{config.names.attention_output}"],
            in_features=config.num_heads * config.head_dim,
            out_features=[config.hidden_size],
            bias=config.output_bias,
            part=Part(inputs=share.numbers(config.head_dim)) if share.is_divided else WHOLE,
        )

    def __call__(self, x: Tensor, rotary: Rotary, batch: ForwardBatch) -> Tensor:
        """x [T, in_features] -> [T, hidden_size]."""
        return self.attend(self.projection(x, batch), rotary, batch)

    def attend(self, projected: Tensor, rotary: Rotary, batch: ForwardBatch) -> Tensor:
        """What `projection` gives, contiguous -> [T, hidden_size]."""
        # [T, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values, in one buffer
        heads = projected.view(len(projected), -1, self._head_dim)
        gates: Tensor | None = None
        if self._is_gated:
            heads, gates = self._without_gates(heads)
        heads = batch.tokens.gather(heads)
        kv_layer = batch.kv_layers[self._layer_index]
        self._place(heads, rotary, kv_layer, batch.slot_mapping)
        queries = heads[:, : self._num_heads]
        if rotary.query_scale is not None:
            queries.mul_(rotary.query_scale)
        if batch.observed is not None:
            batch.observed.note(self._layer_index, queries)
        plan = batch.attention[self._kind]
        attended = self._kernels.paged_attention(queries, kv_layer, plan, self._sink_logits)
        attended = attended.reshape(-1, self._q_size)
        if gates is not None:
            attended = attended * sigmoid(gates)
        return self._output(attended, batch)

    def _without_gates(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values as without gates, and the gates [T, q_size]."""
        both, others = torch.split(
            heads, [2 * self._num_heads, heads.shape[1] - 2 * self._num_heads], 1
        )
        queries, gates = both[:, ::2], both[:, 1::2]
        return torch.cat((queries, others), 1), gates.reshape(-1, self._q_size)

    def _place(self, heads: Tensor, rotary: Rotary, kv_layer: KVLayer, slots: Tensor) -> None:
        """Norm and rotate queries and keys, IN PLACE, and store keys and values; see
        `ops.RotateAndStore`."""
        if self._norm is None or not self._is_normed_after_rotation:
            if self._norm is not None:
                self._norm(heads)
            self._kernels.rotate_and_store(heads, rotary.cos, rotary.sin, kv_layer, slots)
            return
        rotate(heads[:, : -self._num_kv_heads], rotary.cos, rotary.sin)
        self._norm(heads)
        key, value = heads[:, self._num_heads :].chunk(2, dim=1)
        self._kernels.store_kv(key, value, kv_layer, slots)


def _projected(share: HeadShare, config: DecoderConfig, q_width: int, sizes: Sequence[int]) -> Part:
    """A rank's outputs of the projections to queries, keys and values."""
    queries, keys = share.numbers(q_width), share.kv_numbers(config.head_dim)
    if not config.has_fused_projections:
        return Part([[queries], [keys], [keys]])
    fused: list[Range] = [queries]
    for first in (sizes[0], sizes[0] + sizes[1]):
        fused.append((first + keys[0], first + keys[1]))
    return Part([fused])


def _orders(config: DecoderConfig, share: HeadShare) -> list[Tensor | None]:
    """Of the outputs of the projections to queries, keys and values."""
    assert config.query_key_norm in (None, "layer", "unit"), "the norm's weights are not ordered"
    assert not config.has_fused_projections, "the orders are of three modules"
    query, key = (
        halves_apart(number, config.head_dim, config.rotary_dim)
        for number in (share.num_heads, share.num_kv_heads)
    )
    return [query, key, None]
