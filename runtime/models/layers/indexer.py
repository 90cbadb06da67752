"""The index by which queries of latent attention select the keys they attend to (DeepSeek-V3.2,
section 2.1, "lightning indexer"): one key a token, queries of several heads from the latent of the
attention's queries, and a weight for each head from the token itself.

Published code turns queries and keys by a Hadamard matrix first, which changes no product, and
rounds them to 8 bits; here they are in the model's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...checkpoint.config.model_config import IndexerConfig, LatentConfig
from .build import ModelBuild
from .rotary import Rotary, turned

_NORM_EPS = 1e-6


class Indexer:
    """One layer's index queries and keys; adapters do not reach them."""

    def __init__(
        self, build: ModelBuild, name: str, latent: LatentConfig, config: IndexerConfig
    ) -> None:
        source, kernels = build.source, build.kernels
        heads, size, hidden = config.num_heads, config.head_dim, build.config.hidden_size
        assert latent.query_latent_dim is not None, "the config's reader requires it"
        self._num_heads = heads
        self._rope_dim, self._is_interleaved = latent.rope_dim, config.is_interleaved
        query = source.take_weight([f"{name}.wq_b"], [heads * size], latent.query_latent_dim)
        self._query = kernels.make_linear(query, None)
        self._key = kernels.make_linear(source.take_weight([f"{name}.wk"], [size], hidden), None)
        self._norm_weight, self._norm_bias = (
            source.take(f"{name}.k_norm.{part}", (size,)) for part in ("weight", "bias")
        )
        self._weights = kernels.make_output_linear(
            source.take_weight([f"{name}.weights_proj"], [heads], hidden)
        )
        self._scale = (heads * size) ** -0.5

    def keys(self, x: Tensor, rotary: Rotary) -> Tensor:
        """x [T, hidden_size] -> [T, head_dim]"""
        key = self._key(x)
        key = F.layer_norm(key, key.shape[-1:], self._norm_weight, self._norm_bias, _NORM_EPS)
        return self._rotate(key[:, None], rotary.cos, rotary.sin)[:, 0]

    def queries(
        self, x: Tensor, query_latent: Tensor, rotary: Rotary, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x [T, hidden_size], query_latent [T, query_latent_dim], normed -> q and weights of the
        tokens [N] int64 among them, as `ops.SelectKeys` takes them."""
        q = self._query(query_latent.index_select(0, tokens)).view(len(tokens), self._num_heads, -1)
        cos, sin = (table.index_select(0, tokens) for table in (rotary.cos, rotary.sin))
        weights = self._weights(x.index_select(0, tokens)) * self._scale
        return self._rotate(q, cos, sin), weights

    def _rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """heads [T, N, head_dim], whose first rope_dim numbers are rotated."""
        rope, rest = heads[..., : self._rope_dim], heads[..., self._rope_dim :]
        return torch.cat((turned(rope, cos, sin, is_interleaved=self._is_interleaved), rest), -1)
