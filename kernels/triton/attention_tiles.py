"""The tile sizes that attention is compiled with: a table, no search at run time.

Limits of each: shared memory holds (num_stages - 1) blocks of keys and values (227 KB a block of
threads, 228 KB a multiprocessor), registers hold a tile's scores and sums (255 a thread, 65,536 a
multiprocessor). Chosen from what the compiler reports for sm_90: no spills, and for narrow tiles at
least 40 KB of loads in flight a multiprocessor (docs/how-it-works/gpu-attention.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .multiprocessors import Multiprocessor

MOST_WITH_SINKS = 4  # programs a multiprocessor: 104 registers a thread, where 96 leave room for 5


@dataclass(frozen=True, slots=True)
class Tile:
    """The kernel's compile-time sizes for one width of items."""

    rows: int  # query tokens by query heads of a KV head
    keys: int  # of a block
    num_warps: int
    num_stages: int
    residents: int  # programs that a multiprocessor holds at the same time


def padded_head_dim(head_dim: int) -> int:
    """The size to which a head is padded in registers."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tile_rows(
    width: str, group: int, kv_itemsize: int, head_dim: int, multiprocessor: Multiprocessor
) -> int:
    """Rows of a tile; `group` query heads share a KV head.

    A narrow tile holds a token's heads, up to 64 of them (the tensor cores need at least 16), a
    wide one a power of two of rows that suits wgmma, if its queries leave room for keys.
    """
    is_small, is_long = multiprocessor.is_small, head_dim > 128
    most = 32 if kv_itemsize == 4 and is_long and is_small else 64
    if width == "narrow":
        return min(max(16, 1 << (group - 1).bit_length()), most)
    has_room = not (is_small or multiprocessor.has_tensor_memory or kv_itemsize == 1)
    is_tight = is_long and not has_room
    return most if kv_itemsize == 4 or is_tight else 128


def tile_of(
    width: str,
    head_dim: int,
    group: int,
    kv_itemsize: int,
    multiprocessor: Multiprocessor,
    *,
    has_sinks: bool = False,
) -> Tile:
    """kv_itemsize: bytes of a KV number; 1 is converted to the queries' 2. has_sinks: learned ones,
    for each head, which take registers."""
    rows = tile_rows(width, group, kv_itemsize, head_dim, multiprocessor)
    key = width, kv_itemsize, min(max(padded_head_dim(head_dim), 64), 256), rows
    tile = Tile(rows, *(_SMALL_TILES if multiprocessor.is_small else _TILES)[key])
    tile = residing(tile, 2 * key[2] * kv_itemsize, multiprocessor)
    if has_sinks:
        return replace(tile, residents=min(tile.residents, MOST_WITH_SINKS))
    return tile


def residing(tile: Tile, key_bytes: int, multiprocessor: Multiprocessor) -> Tile:
    """With no more residents than the multiprocessor's shared memory holds; key_bytes: of a key and
    its value. The loads in flight are most of what a tile takes, an eighth more is enough."""
    taken = (tile.num_stages - 1) * tile.keys * key_bytes * 9 // 8 + 1024
    fit = max(1, multiprocessor.shared_bytes // taken)
    return replace(tile, residents=min(tile.residents, fit))


# By width, bytes a number, head_dim and rows: keys, warps, stages, residents.
_TILES = {
    ("narrow", 2, 64, 16): (64, 4, 3, 5),
    ("narrow", 2, 64, 32): (64, 4, 3, 4),
    ("narrow", 2, 64, 64): (64, 4, 3, 3),
    ("narrow", 2, 128, 16): (64, 4, 3, 3),
    ("narrow", 2, 128, 32): (64, 4, 3, 2),
    ("narrow", 2, 128, 64): (64, 4, 3, 2),
    ("narrow", 2, 256, 16): (32, 4, 3, 2),
    ("narrow", 2, 256, 32): (32, 8, 3, 2),
    ("narrow", 2, 256, 64): (32, 8, 3, 1),
    ("narrow", 1, 64, 16): (64, 4, 4, 5),
    ("narrow", 1, 64, 32): (64, 4, 3, 3),
    ("narrow", 1, 64, 64): (64, 4, 3, 2),
    ("narrow", 1, 128, 16): (64, 4, 4, 3),
    ("narrow", 1, 128, 32): (32, 4, 4, 2),
    ("narrow", 1, 128, 64): (32, 4, 3, 2),
    ("narrow", 1, 256, 16): (32, 4, 4, 2),
    ("narrow", 1, 256, 32): (32, 8, 3, 1),
    ("narrow", 1, 256, 64): (16, 8, 3, 1),
    ("narrow", 4, 64, 16): (32, 4, 3, 4),
    ("narrow", 4, 64, 32): (32, 4, 3, 2),
    ("narrow", 4, 64, 64): (32, 8, 2, 2),
    ("narrow", 4, 128, 16): (16, 4, 3, 5),
    ("narrow", 4, 128, 32): (16, 4, 3, 2),
    ("narrow", 4, 128, 64): (32, 8, 2, 2),
    ("narrow", 4, 256, 16): (16, 4, 3, 2),
    ("narrow", 4, 256, 32): (16, 8, 2, 2),
    ("narrow", 4, 256, 64): (16, 8, 2, 1),
    ("wide", 2, 64, 128): (128, 8, 3, 1),
    ("wide", 2, 128, 128): (64, 8, 3, 1),
    ("wide", 2, 256, 64): (32, 8, 3, 1),
    ("wide", 2, 256, 128): (32, 8, 3, 1),
    ("wide", 1, 64, 128): (64, 8, 3, 1),
    ("wide", 1, 128, 128): (32, 8, 3, 1),
    ("wide", 1, 256, 64): (32, 8, 2, 1),
    ("wide", 4, 64, 64): (32, 8, 2, 2),
    ("wide", 4, 128, 64): (32, 8, 2, 2),
    ("wide", 4, 256, 64): (16, 8, 2, 1),
}
# Of a block of 99 KB, on GPUs without wgmma, which would read queries there.
_SMALL_TILES = _TILES | {
    ("narrow", 2, 256, 64): (16, 8, 3, 1),
    ("wide", 2, 256, 64): (32, 8, 2, 1),
    ("wide", 4, 256, 32): (16, 8, 2, 1),
}
