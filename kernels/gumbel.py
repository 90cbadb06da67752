"""Gumbel noise, a function of seed, position and token id (docs/how-it-works/sampling.md).

Philox-4x32-10 is a counter-based random generator: a keyed mixing of a counter, no state. Source:
Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3;
constants and test vectors of Random123. Numbers of 32 bits are held in uint64 arrays, so that
products are exact.
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


FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

WORDS_PER_BLOCK = 4
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def gumbel(seeds: UInt64Array, positions: UInt64Array, token_ids: Int64Array) -> FloatArray:
    """Gumbel noise of given tokens [K], each with its seed and position ([K], or broadcasting)."""
    words = _words(seeds, positions, (token_ids // WORDS_PER_BLOCK).astype(np.uint64))
    return gumbel_of_words(np.choose(token_ids % WORDS_PER_BLOCK, words))


def gumbel_of_all(
    seeds: UInt64Array, positions: UInt64Array, num_tokens: int, first_id: int = 0
) -> FloatArray:
    """Gumbel noise of every token id from `first_id`, a multiple of WORDS_PER_BLOCK, on under R
    seeds and positions [R] -> [R, num_tokens].

    The same numbers as `gumbel`'s at a quarter of the cost: four tokens share a Philox block.
    """
    first, num_blocks = first_id // WORDS_PER_BLOCK, -(-num_tokens // WORDS_PER_BLOCK)
    blocks = np.arange(first, first + num_blocks, dtype=np.uint64)
    words = np.stack(_words(seeds[:, None], positions[:, None], blocks), axis=-1)
    return gumbel_of_words(words.reshape(len(seeds), -1)[:, :num_tokens])


def gumbel_of_words(words: UInt64Array) -> FloatArray:
    """-log(-log(u)) with u = (word + 1/2) / 2**32, which lies in the open interval (0, 1)."""
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    noise: FloatArray = -np.log(-np.log(uniform))
    return noise


def _words(
    seeds: UInt64Array, positions: UInt64Array, blocks: UInt64Array
) -> tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array]:
    """Philox of counter (block, position low, position high, 0) under the seed's two halves."""
    zero = np.zeros((1,) * positions.ndim, dtype=np.uint64)
    counter = (blocks, positions & _LOW, positions >> _SHIFT, zero)
    return philox_4x32(counter, (seeds & _LOW, seeds >> _SHIFT))
