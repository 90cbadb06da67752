"""Norms of queries and keys where they lie, out of a backend's norm of rows."""

from __future__ import annotations

from torch import Tensor

from ..ops import MakeQueryKeyNorm, MakeRMSNorm, QueryKeyNorm


def query_key_norm_of(make_rms_norm: MakeRMSNorm) -> MakeQueryKeyNorm:
    def make_query_key_norm(
        query_weight: Tensor, key_weight: Tensor, num_heads: int, num_kv_heads: int, eps: float
    ) -> QueryKeyNorm:
        norm_query, norm_key = make_rms_norm(query_weight, eps), make_rms_norm(key_weight, eps)

        def query_key_norm(heads: Tensor) -> None:
            queries, keys = heads[:, :num_heads], heads[:, num_heads:-num_kv_heads]
            queries.copy_(norm_query(queries.reshape(-1, len(query_weight))).view(queries.shape))
            keys.copy_(norm_key(keys.reshape(-1, len(key_weight))).view(keys.shape))

        return query_key_norm

    return make_query_key_norm
