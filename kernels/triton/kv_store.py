"""Rotary embedding of queries and keys and the KV store, in one launch; plain or quantized KV.

A program processes one token's block of query heads, which it rotates in place, or of KV heads,
whose keys it rotates before it stores both. Rotation pairs element i with i + rotary_dim / 2, so a
head is loaded as two half tiles, each element once, by the thread that writes it: nothing is read
after it was overwritten. A head's largest magnitude and scale stay in registers. The 8-bit formats
match reference/kv_store.py, bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import KVLayer
from ..reference.kv_store import LARGEST, as_bytes
from .dependent_launch import await_inputs, launch_options
from .language import tl, triton

# Pairs rotated by a program: in 16 bits a vector of 16 bytes of either half for 64 threads.
_NUM_PAIRS = 512
_NUM_WARPS = 2


def rotate_and_store(
    heads: Tensor, cos: Tensor, sin: Tensor, kv_layer: KVLayer, slots: Tensor
) -> None:
    assert heads.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    values, scales, largest = _parts(kv_layer)
    num_tokens, num_all_heads, head_dim = heads.shape
    _, num_kv_heads, num_slots, _ = values.shape
    num_heads, rotary_dim = num_all_heads - 2 * num_kv_heads, cos.shape[-1]
    block, kv_block = _block(num_heads, head_dim), _block(num_kv_heads, head_dim)
    num_blocks = triton.cdiv(num_heads, block)
    if not num_tokens:
        return
    _rotate_and_store[num_tokens, num_blocks + triton.cdiv(num_kv_heads, kv_block)](
        heads, cos, sin, values, scales, slots, num_slots,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, NUM_BLOCKS=num_blocks, BLOCK=block,
        KV_BLOCK=kv_block, HEAD_DIM=head_dim, HALF=rotary_dim // 2, LARGEST=largest,
        num_warps=_NUM_WARPS, **launch_options(heads.device),
    )  # fmt: skip


def store_kv(k: Tensor, v: Tensor, kv_layer: KVLayer, slots: Tensor) -> None:
    values, scales, largest = _parts(kv_layer)
    _, num_kv_heads, num_slots, head_dim = values.shape
    assert all(x.stride()[1:] == (head_dim, 1) for x in (k, v)), "a token's heads lie together"
    block = _block(num_kv_heads, head_dim)
    if not len(k):
        return
    _store_kv[len(k), triton.cdiv(num_kv_heads, block)](
        k, v, k.stride(0), v.stride(0), values, scales, slots, num_slots,
        NUM_KV_HEADS=num_kv_heads, BLOCK=block, HEAD_DIM=head_dim, LARGEST=largest,
        num_warps=_NUM_WARPS, **launch_options(k.device),
    )  # fmt: skip


def _parts(kv_layer: KVLayer) -> tuple[Tensor, Tensor | None, float | None]:
    """Values (8-bit floats as uint8), scales and the format's largest number; the last two are None
    for plain KV."""
    if isinstance(kv_layer, Tensor):
        return kv_layer, None, None
    values = kv_layer.values
    is_float = values.dtype is torch.float8_e4m3fn
    return as_bytes(values) if is_float else values, kv_layer.scales, LARGEST[values.dtype]


def _block(num_heads: int, head_dim: int) -> int:
    """Heads of a program."""
    most = max(1, 2 * _NUM_PAIRS // triton.next_power_of_2(head_dim))
    block: int = min(most, triton.next_power_of_2(num_heads))
    return block


@triton.jit
def _rotate_and_store(
    heads, cos, sin, values, scales, slots, num_slots,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    LARGEST: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The first NUM_BLOCKS programs of a token process its queries, the others keys and values."""
    await_inputs(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    first = heads + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    angle = token * (2 * HALF)
    if block < NUM_BLOCKS:
        _rotate_queries(first, block, cos + angle, sin + angle, NUM_HEADS, BLOCK, HEAD_DIM, HALF)
    else:
        head = (block - NUM_BLOCKS) * KV_BLOCK + tl.arange(0, KV_BLOCK)
        slot = tl.load(slots + token)
        _store_rotated(
            first + NUM_HEADS * HEAD_DIM, head, cos + angle, sin + angle,
            values, scales, head.to(tl.int64) * num_slots + slot,
            NUM_KV_HEADS, HEAD_DIM, HALF, LARGEST,
        )  # fmt: skip
        _store_heads(
            first + (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM, head,
            values, scales, (NUM_KV_HEADS + head).to(tl.int64) * num_slots + slot,
            NUM_KV_HEADS, HEAD_DIM, LARGEST,
        )  # fmt: skip


@triton.jit
def _store_kv(
    k, v, k_stride, v_stride, values, scales, slots, num_slots,
    NUM_KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, LARGEST: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK heads of one token's keys and values a program."""
    await_inputs(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + token)
    _store_heads(
        k + token * k_stride, head, values, scales,
        head.to(tl.int64) * num_slots + slot, NUM_KV_HEADS, HEAD_DIM, LARGEST,
    )  # fmt: skip
    _store_heads(
        v + token * v_stride, head, values, scales,
        (NUM_KV_HEADS + head).to(tl.int64) * num_slots + slot, NUM_KV_HEADS, HEAD_DIM, LARGEST,
    )  # fmt: skip


@triton.jit
def _rotate_queries(
    queries, block, cos, sin,
    NUM_HEADS: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    head = block * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, triton.next_power_of_2(HALF))
    is_inside = (head < NUM_HEADS)[:, None] & (columns < HALF)[None, :]
    at = queries + head[:, None] * HEAD_DIM + columns[None, :]
    low, high = _rotated(at, is_inside, cos, sin, columns, HALF)
    tl.store(at, low, mask=is_inside)
    tl.store(at + HALF, high, mask=is_inside)


@triton.jit
def _store_rotated(
    keys, head, cos, sin, values, scales, place,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Stores a token's key heads from `keys` on at their places in the layer, in vectors."""
    columns = tl.arange(0, triton.next_power_of_2(HALF))
    is_head = head < NUM_KV_HEADS
    is_inside = is_head[:, None] & (columns < HALF)[None, :]
    source = keys + head[:, None] * HEAD_DIM
    to = values + place[:, None] * HEAD_DIM
    low, high = _rotated(source + columns[None, :], is_inside, cos, sin, columns, HALF)
    largest = tl.maximum(_largest(low), _largest(high))
    REST: tl.constexpr = HEAD_DIM - 2 * HALF  # elements that are not rotated
    if REST > 0:
        behind = 2 * HALF + tl.arange(0, triton.next_power_of_2(REST))
        is_behind = is_head[:, None] & (behind < HEAD_DIM)[None, :]
        rest = tl.load(source + behind[None, :], mask=is_behind, other=0.0)
        largest = tl.maximum(largest, _largest(rest))
    largest = largest.to(tl.float32, bitcast=True)
    if REST > 0:
        _store(to + behind[None, :], rest, largest, is_behind, LARGEST)
    _store(to + columns[None, :], low, largest, is_inside, LARGEST)
    _store(to + HALF + columns[None, :], high, largest, is_inside, LARGEST)
    _store_scales(scales, place, largest, is_head, LARGEST)


@triton.jit
def _rotated(at, is_inside, cos, sin, columns, HALF: tl.constexpr):
    """Both halves of heads, rotated and rounded to their dtype.

    Every thread loads the cosines and sines of its own columns, from the first-level cache.
    """
    low = tl.load(at, mask=is_inside, other=0.0)
    high = tl.load(at + HALF, mask=is_inside, other=0.0)
    angles = tl.broadcast_to(columns[None, :], at.shape)
    cosine = tl.load(cos + angles, mask=is_inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + HALF + angles, mask=is_inside, other=0.0).to(tl.float32)
    a, b = low.to(tl.float32), high.to(tl.float32)
    return (a * cosine - b * sine).to(low.dtype), (b * cosine + a * sine).to(low.dtype)


@triton.jit
def _store_heads(
    source, head, values, scales, place,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Stores a token's heads from `source` on at their places in the layer, counted in vectors."""
    columns = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    is_head = head < NUM_KV_HEADS
    is_inside = is_head[:, None] & (columns < HEAD_DIM)[None, :]
    x = tl.load(source + head[:, None] * HEAD_DIM + columns[None, :], mask=is_inside, other=0.0)
    largest = _largest(x).to(tl.float32, bitcast=True)
    _store(values + place[:, None] * HEAD_DIM + columns[None, :], x, largest, is_inside, LARGEST)
    _store_scales(scales, place, largest, is_head, LARGEST)


@triton.jit
def _largest(x):
    """Each row's largest magnitude, as float32 bits: ordered as integers, NaN last."""
    return tl.max(x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@triton.jit
def _store_scales(scales, place, largest, is_head, LARGEST: tl.constexpr):
    if LARGEST is not None:
        tl.store(scales + place, tl.div_rn(largest, LARGEST), mask=is_head)


@triton.jit
def _store(at, x, largest, is_inside, LARGEST: tl.constexpr):
    """Stores rows of x unchanged, or scaled so that `largest` becomes the format's LARGEST."""
    if LARGEST is None:
        tl.store(at, x, mask=is_inside)
    else:
        number = x.to(tl.float32) * tl.div_rn(LARGEST, largest)[:, None]
        number = tl.where(number == number, number, 0.0)  # 0 / 0 too
        number = tl.minimum(tl.maximum(number, -LARGEST), LARGEST)
        if at.dtype.element_ty == tl.int8:
            # Adding 1.5 * 2**23 leaves no bits for a fraction: rounds to the nearest, ties to even.
            tl.store(at, ((number + 12582912.0) - 12582912.0).to(tl.int8), mask=is_inside)
        else:
            tl.store(at, _float8_bits(number), mask=is_inside)


@triton.jit
def _float8_bits(x):
    """float8_e4m3fn of finite x up to 448, ties to even, as uint8.

    Computed by hand, since the interpreter's conversion is wrong where rounding carries, and GPUs
    below capability 8.9 have none.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Normal: round the last 20 of 23 bits away, then count the exponent from 2**-7, not 2**-127.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 codes are multiples of 2**-9: 1.5 * 2**14 leaves no bits for less.
    magnitude = size.to(tl.float32, bitcast=True)
    subnormal = (((magnitude + 24576.0) - 24576.0) * 512.0).to(tl.int32)
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
