"""The values of `--kv-cache-dtype`. No torch."""

from __future__ import annotations

from typing import Literal

KVCacheDtype = Literal["auto", "int8", "fp8", "int4"]
"""auto: KV in the compute dtype; others: 8 or 4 bits a number, see reference/kv_store.py."""

KV_CACHE_DTYPES: tuple[KVCacheDtype, ...] = ("auto", "int8", "fp8", "int4")

INT4_STEP = 32
"""4 bits take heads of a multiple of so many numbers: a Hadamard transform mixes at least these."""

_FLOAT8_CAPABILITY = (8, 9)  # the first at which a GPU converts 8-bit floats


def kv_cache_dtypes_of_gpu(
    dtype_bytes: int, capability: tuple[int, int]
) -> tuple[KVCacheDtype, ...]:
    """The formats in which a GPU's kernels read KV, by the bytes of the compute dtype and the
    compute capability: 8 bits only with 16-bit products; 4 bits are a CPU's."""
    if dtype_bytes != 2:
        return ("auto",)
    return ("auto", "int8", "fp8") if capability >= _FLOAT8_CAPABILITY else ("auto", "int8")
