"""What `--kv-cache-dtype` may be. No torch."""

from __future__ import annotations

from typing import Literal

KVCacheDtype = Literal["auto", "int8", "fp8"]
"""auto: KV as the arithmetic is; int8, fp8: 8 bits a number, see quantized_kv.py."""

KV_CACHE_DTYPES: tuple[KVCacheDtype, ...] = ("auto", "int8", "fp8")

_FLOAT8_CAPABILITY = (8, 9)  # from which on a GPU converts floats of 8 bits


def kv_cache_dtypes_of_gpu(
    dtype_bytes: int, capability: tuple[int, int]
) -> tuple[KVCacheDtype, ...]:
    """In which a GPU's kernels read KV, by the bytes of the arithmetic's dtype and the compute
    capability: 8 bits in products of 16 bits only."""
    if dtype_bytes != 2:
        return ("auto",)
    return KV_CACHE_DTYPES if capability >= _FLOAT8_CAPABILITY else ("auto", "int8")
