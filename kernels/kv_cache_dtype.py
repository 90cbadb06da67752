"""The values of `--kv-cache-dtype`. No torch."""

from __future__ import annotations

from typing import Literal

KVCacheDtype = Literal["auto", "int8", "fp8"]
"""auto: KV in the compute dtype; int8, fp8: 8 bits a number, see quantized_kv.py."""

KV_CACHE_DTYPES: tuple[KVCacheDtype, ...] = ("auto", "int8", "fp8")

_FLOAT8_CAPABILITY = (8, 9)  # the first at which a GPU converts 8-bit floats


def kv_cache_dtypes_of_gpu(
    dtype_bytes: int, capability: tuple[int, int]
) -> tuple[KVCacheDtype, ...]:
    """The formats in which a GPU's kernels read KV, by the bytes of the compute dtype and the
    compute capability: 8 bits only with 16-bit products."""
    if dtype_bytes != 2:
        return ("auto",)
    return KV_CACHE_DTYPES if capability >= _FLOAT8_CAPABILITY else ("auto", "int8")
