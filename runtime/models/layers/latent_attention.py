"""Multi-head latent attention over the paged latents, absorbed (DeepSeek-V2, section 2.1).

A head's key and value are products of the token's latent with the head's own matrices:

    key = [W_UK latent, rotated key]    value = W_UV latent

so that its score is (W_UK^T q_nope) . latent + q_rope . rotated key, and its output W_UV times the
weighted sum of latents. Only latent and rotated key are stored, one row for all heads; the products
with W_UK and W_UV are made once a query, not once a key.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....kernels.ops import RMSNorm
from ....kernels.quantized_tensors import QuantizedWeight
from ....kernels.reference.quantized import dequantize
from ....kernels.sparse_latent import SparseLatentPlan, latent_attention
from ...checkpoint.config.model_config import LatentConfig
from ...checkpoint.parts import WHOLE, Part
from ..forward_batch import ForwardBatch
from .build import ModelBuild
from .indexer import Indexer
from .linear import LinearLayer
from .ranks import HeadShare, head_share
from .rotary import Rotary, turned

# For the norms of latents, whatever the config says of other norms, as in Hugging Face.
_LATENT_NORM_EPS = 1e-6


class LatentAttention:
    """One layer's attention block. Knows its layer's index in the KV pool, and which of the
    step's attention plans it uses. Between ranks its heads are divided; all have the latents."""

    def __init__(self, build: ModelBuild, name: str, layer_index: int) -> None:
        config, latent = build.config, _config_of(build)
        self._layer_index = config.attention_layers.index(layer_index)
        self._kind = config.layer_kinds[layer_index]
        self._kernels = build.kernels
        share = head_share(config, build.ranks)
        self._num_heads = share.num_heads
        self._latent = latent
        head_size = latent.nope_dim + latent.rope_dim
        query_size, kv_size = config.num_heads * head_size, latent.latent_dim + latent.rope_dim
        self._is_direct = latent.query_latent_dim is None
        own_size = latent.query_latent_dim or share.num_heads * head_size
        self._sizes = [own_size, latent.latent_dim, latent.rope_dim]
        queries = [share.numbers(head_size)]
        query = f"{name}.q_proj" if self._is_direct else f"{name}.q_a_proj"
        self._down = LinearLayer(
            build,
            [query, f"{name}.kv_a_proj_with_mqa"],
            in_features=config.hidden_size,
            out_features=[latent.query_latent_dim or query_size, kv_size],
            bias=config.qkv_bias,
            part=Part([queries, [(0, kv_size)]]) if self._is_direct and share.is_divided else WHOLE,
        )
        if latent.query_latent_dim is not None:
            self._query_norm = _latent_norm(build, f"{name}.q_a_layernorm", latent.query_latent_dim)
            self._query_up = LinearLayer(
                build,
                [f"{name}.q_b_proj"],
                in_features=latent.query_latent_dim,
                out_features=[query_size],
                part=Part([queries]) if share.is_divided else WHOLE,
            )
        self._indexer: Indexer | None = None
        if latent.indexer is not None and layer_index in latent.indexer.layers:
            self._index_layer = latent.indexer.layers.index(layer_index)
            self._indexer = Indexer(build, f"{name}.indexer", latent, latent.indexer)
        self._norm = _latent_norm(build, f"{name}.kv_a_layernorm", latent.latent_dim)
        self._key_up, self._value_up = (
            build.kernels.make_head_linear(weight)
            for weight in _take_up_projections(build, f"{name}.kv_b_proj", latent, share)
        )
        self._output = LinearLayer(
            build,
            [f"{name}.o_proj"],
            in_features=config.num_heads * latent.value_dim,
            out_features=[config.hidden_size],
            bias=config.output_bias,
            part=Part(inputs=share.numbers(latent.value_dim)) if share.is_divided else WHOLE,
        )

    def __call__(self, x: Tensor, rotary: Rotary, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size], rotary of rope_dim -> [T, hidden_size]."""
        query, latent, key = torch.split(self._down(x, batch), self._sizes, -1)
        query_latent = query
        if not self._is_direct:
            query_latent = self._query_norm(query.contiguous())
            query = self._query_up(query_latent, batch)
        query = query.view(len(x), self._num_heads, -1)
        nope, rope = torch.split(query, [self._latent.nope_dim, self._latent.rope_dim], -1)
        heads, latent, absorbed = batch.tokens.gather_together(
            (torch.cat((rope, key[:, None]), 1), latent, self._key_up(nope))
        )
        rotated = turned(heads, rotary.cos, rotary.sin, is_interleaved=self._latent.is_interleaved)
        kv_layer = batch.kv_layers[self._layer_index]
        assert isinstance(kv_layer, Tensor), "latents are not quantized"
        stored = torch.cat((self._norm(latent.contiguous()), rotated[:, -1]), -1)
        self._kernels.store_latent(stored, kv_layer, batch.slot_mapping)
        queries, plan = (absorbed, rotated[:, :-1]), batch.attention[self._kind]
        select = None
        if self._indexer is not None:
            select = self._selection(self._indexer, x, query_latent, rotary, batch)
        attended = latent_attention(self._kernels, queries, kv_layer, plan, select)
        return self._output(self._value_up(attended).reshape(len(x), -1), batch)

    def _selection(
        self, indexer: Indexer, x: Tensor, query_latent: Tensor, rotary: Rotary, batch: ForwardBatch
    ) -> Callable[[SparseLatentPlan], Tensor]:
        """Stores the tokens' index keys; returns what selects keys for sparse queries."""
        index_keys = batch.index_keys[self._index_layer]
        self._kernels.store_latent(indexer.keys(x, rotary), index_keys, batch.slot_mapping)

        def select(plan: SparseLatentPlan) -> Tensor:
            q, weights = indexer.queries(x, query_latent, rotary, plan.sparse_tokens)
            return self._kernels.select_keys(q, weights, index_keys, plan.selection)

        return select


def _latent_norm(build: ModelBuild, name: str, size: int) -> RMSNorm:
    weight = build.source.take(f"{name}.weight", (size,))
    return build.kernels.make_rms_norm(weight, _LATENT_NORM_EPS)


def _take_up_projections(
    build: ModelBuild, name: str, latent: LatentConfig, share: HeadShare
) -> tuple[Tensor, Tensor]:
    """Of H heads W_UK [H, nope_dim, latent_dim] and W_UV transposed, [H, latent_dim, value_dim]."""
    num_heads, size = share.num_heads, latent.nope_dim + latent.value_dim
    part = Part([[share.numbers(size)]]) if share.is_divided else WHOLE
    sizes = [build.config.num_heads * size]
    weight = build.source.take_part([name], sizes, latent.latent_dim, part)
    if isinstance(weight, QuantizedWeight):
        weight = dequantize(weight, build.dtype)
    heads = weight.view(num_heads, size, latent.latent_dim)
    key_up, value_up = torch.split(heads, [latent.nope_dim, latent.value_dim], 1)
    return key_up.contiguous(), value_up.transpose(1, 2).contiguous()


def _config_of(build: ModelBuild) -> LatentConfig:
    assert build.config.latent is not None, "the config says that the model has latent attention"
    return build.config.latent
