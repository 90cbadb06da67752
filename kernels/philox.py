"""Philox-4x32-10, a counter-based random generator: a keyed mixing of a counter, no state.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011),
section 3; constants and test vectors of Random123. docs/how-it-works/sampling.md derives draws.
Numbers of 32 bits are held in uint64 arrays, so that products are exact.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

NUM_ROUNDS = 10
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_KEY_STEP_0 = np.uint64(0x9E3779B9)
_KEY_STEP_1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

Words = tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array]


def philox_4x32(counter: Words, key: tuple[UInt64Array, UInt64Array]) -> Words:
    """Four random words for each counter; all arrays hold values below 2**32 and broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0 = (product_1 >> _SHIFT) ^ c1 ^ k0
        c1 = product_1 & _LOW
        c2 = (product_0 >> _SHIFT) ^ c3 ^ k1
        c3 = product_0 & _LOW
        k0 = (k0 + _KEY_STEP_0) & _LOW
        k1 = (k1 + _KEY_STEP_1) & _LOW
    return c0, c1, c2, c3
