"""Scans of recurrent layers: a matrix a head, changed by one token after the other.

    few tokens    _scan_tokens    a program a row, head and block of value columns, token by token
    long rows     _relate_tokens  a program a chunk and head: what its tokens are to each other
                  _scan_chunks    a program a row, head and block of value columns, by chunks

A decode step is bound by the states: each is read once and written once, in vectors of 16 bytes,
and all else is small. A prompt's chunks need only products: within one of C tokens what each token
writes depends on what those before it have written through a triangular system, whose inverse is
found once (WY representation: Yang et al., "Parallelizing linear transformers with the delta rule
over sequence length", NeurIPS 2024; with decay: "Gated Delta Networks", 2024, section 3.3. Chunks
of Mamba-2 have no system: Dao and Gu, 2024, section 6). Only the state is passed on between chunks.

With a decay for each number of a key (Kimi Linear) what two tokens are to each other is a sum and
no product: such chunks have 16 tokens.

A token's write is `rate (v - k . S)`, or, for Mamba-2, `rate v`; rates are in the dtype of the
states, float32, as are all sums. Products of chunks have TF32's precision; float32 models, for
which that would be too little, are scanned token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .device_multiprocessor import multiprocessor_of
from .language import tl, triton
from .recurrence_rows import CHUNK_TOKENS, RecurrencePlan

_CHANNEL_CHUNK_TOKENS = 16
_RELATED_KEYS = tl.constexpr(32)  # of two tokens by 16, at a time
_SCAN_COLUMNS = 32  # of a state a program: rows of 128 bytes, 16 KB with 128 rows
# What a program holds of a state between chunks; more spills where a system's solution is held too.
_CHUNK_COLUMNS, _SYSTEM_COLUMNS = 32, 16


@dataclass(frozen=True, slots=True)
class Scan:
    """One op's tokens and states."""

    q: Tensor | None  # [T, num_groups, key_dim]; None: outputs are not wanted
    k: Tensor
    v: Tensor  # [T, num_heads, value_dim]
    log_decay: Tensor  # [T, num_heads] or [T, num_heads, key_dim] float32
    rates: Tensor  # [T, num_heads] float32
    states: Tensor  # [num_slots, num_heads, key_dim, value_dim] float32
    is_delta: bool

    @property
    def has_channels(self) -> bool:
        """Whether each number of a key has a decay."""
        return self.log_decay.dim() == 3

    def of(self, tokens: Tensor) -> Scan:
        """Only these, without their outputs; a copy."""
        k, v, log_decay, rates = (
            x.index_select(0, tokens) for x in (self.k, self.v, self.log_decay, self.rates)
        )
        return Scan(None, k, v, log_decay, rates, self.states, self.is_delta)

    def strides(self) -> tuple[int, int, int]:
        """From a token's queries, keys and values to the next one's."""
        return 0 if self.q is None else self.q.stride(0), self.k.stride(0), self.v.stride(0)

    def constants(self) -> dict[str, int | bool]:
        """Of all kernels."""
        num_heads, key_dim = self.states.shape[1:3]
        return {
            "HEADS": num_heads,
            "SHARE": num_heads // self.k.shape[1],
            "KEY_DIM": key_dim,
            "IS_DELTA": self.is_delta,
            "HAS_CHANNELS": self.has_channels,
        }


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    plan: object,
) -> Tensor:
    rates = beta.to(states.dtype).contiguous()
    return _run(Scan(q, k, v, log_decay.contiguous(), rates, states, True), plan)


def state_space_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: Tensor,
    decay: Tensor,
    states: Tensor,
    plan: object,
) -> Tensor:
    return _run(Scan(q, k, v, steps * decay, steps.contiguous(), states, False), plan)


def _run(scan: Scan, plan: object) -> Tensor:
    assert isinstance(plan, RecurrencePlan), "a plan of this backend"
    assert scan.states.dtype is torch.float32 and scan.states.is_contiguous()
    for x in (scan.q, scan.k, scan.v):
        assert x is not None and x.stride()[1:] == (x.shape[2], 1), "a token's heads lie together"
    out = torch.empty_like(scan.v, memory_format=torch.contiguous_format)
    if plan.drafts is not None:
        plan.kept.append(_moving_on(scan.of(plan.drafts)))
    if scan.v.dtype is torch.float32 or not plan.long.shape[1]:
        _scan_few(scan, out, plan.rows)
        return out
    _scan_long(scan, out, plan)
    _scan_few(scan, out, plan.few)
    return out


def _moving_on(drafts: Scan) -> Callable[[Tensor], None]:
    return lambda rows: _scan_few(drafts, None, rows)


def _scan_few(scan: Scan, out: Tensor | None, rows: Tensor) -> None:
    num_heads, key_dim, value_dim = scan.states.shape[1:]
    columns = min(_SCAN_COLUMNS, triton.next_power_of_2(value_dim))
    _scan_tokens[rows.shape[1], num_heads, triton.cdiv(value_dim, columns)](
        scan.q, scan.k, scan.v, scan.log_decay, scan.rates, scan.states, out, rows, rows.shape[1],
        *scan.strides(), VALUE_DIM=value_dim, BLOCK_V=columns,
        BLOCK_K=triton.next_power_of_2(key_dim), **scan.constants(), num_warps=4,
    )  # fmt: skip


def _scan_long(scan: Scan, out: Tensor, plan: RecurrencePlan) -> None:
    num_heads, key_dim, value_dim = scan.states.shape[1:]
    chunk_tokens = _CHANNEL_CHUNK_TOKENS if scan.has_channels else CHUNK_TOKENS
    parts = CHUNK_TOKENS // chunk_tokens
    num_chunks = len(plan.chunks) * parts
    shape = (num_chunks, num_heads, chunk_tokens, chunk_tokens)
    reads = scan.states.new_empty(shape)
    writes = scan.states.new_empty(shape) if scan.is_delta else None
    has_system = scan.is_delta and not scan.has_channels
    most = _SYSTEM_COLUMNS if has_system else _CHUNK_COLUMNS
    columns = min(most, max(16, triton.next_power_of_2(value_dim)))
    strides = scan.strides()
    multiprocessor = multiprocessor_of(scan.states.device)
    is_small = multiprocessor.is_small
    options = {**scan.constants(), "CHUNK": chunk_tokens, "PARTS": parts}
    tile = {"VALUE_DIM": value_dim, "BLOCK_K": max(16, triton.next_power_of_2(key_dim))}
    _relate_tokens[num_chunks, num_heads](
        scan.q, scan.k, scan.log_decay, scan.rates, reads, writes, plan.chunks, *strides[:2],
        LOG_CHUNK=chunk_tokens.bit_length() - 1, **options, num_warps=4,
        num_stages=1 if multiprocessor.has_tensor_memory else 3,
    )  # fmt: skip
    _scan_chunks[plan.long.shape[1], num_heads, triton.cdiv(value_dim, columns)](
        scan.q, scan.k, scan.v, scan.log_decay, scan.rates, reads, writes, scan.states, out,
        plan.long, plan.long.shape[1], *strides, BLOCK_V=columns, **tile, **options,
        num_warps=4 if scan.has_channels and not is_small else 8,
        num_stages=1 if is_small and has_system else 2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _scan_tokens(
    q, k, v, log_decay, rates, states, out, rows, num_rows, q_stride, k_stride, v_stride,
    HEADS: tl.constexpr, SHARE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, IS_DELTA: tl.constexpr,
    HAS_CHANNELS: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of one head's state, behind all of a row's tokens; what is left behind is the
    state before its first draft. Both products with the old state are made at once, and a token's
    own write is added to what it reads."""
    row, head = tl.program_id(0), tl.program_id(1)
    first, known = tl.load(rows + row), tl.load(rows + num_rows + row)
    end = tl.load(rows + 2 * num_rows + row)
    if first < end:
        keys = tl.arange(0, BLOCK_K)
        columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        is_key, is_column = keys < KEY_DIM, columns < VALUE_DIM
        slot = tl.load(rows + 3 * num_rows + row).to(tl.int64)
        begins = tl.load(rows + 4 * num_rows + row)
        at = states + (slot * HEADS + head) * (KEY_DIM * VALUE_DIM)
        at += keys[:, None] * VALUE_DIM + columns[None, :]
        is_inside = is_key[:, None] & is_column[None, :]
        state = tl.load(at, mask=is_inside & (begins == 0), other=0.0)
        start = first.to(tl.int64)
        for step in range(end - first):
            if step == known - first:
                tl.store(at, state, mask=is_inside)
            place = start + step
            key = _unit_vector(k, place * k_stride, head // SHARE, KEY_DIM, BLOCK_K, IS_DELTA)
            if HAS_CHANNELS:
                decay = log_decay + (place * HEADS + head) * KEY_DIM + keys
                state *= tl.exp(tl.load(decay, mask=is_key, other=0.0))[:, None]
            else:
                state *= tl.exp(tl.load(log_decay + place * HEADS + head))
            value = tl.load(v + place * v_stride + head * VALUE_DIM + columns, mask=is_column)
            write = value.to(tl.float32)
            if IS_DELTA:
                write -= tl.sum(state * key[:, None], axis=0)
            write *= tl.load(rates + place * HEADS + head)
            if out is not None:
                query = _unit_vector(q, place * q_stride, head // SHARE, KEY_DIM, BLOCK_K, IS_DELTA)
                if IS_DELTA:
                    query *= KEY_DIM**-0.5
                read = tl.sum(state * query[:, None], axis=0) + tl.sum(query * key, axis=0) * write
                to = out + (place * HEADS + head) * VALUE_DIM + columns
                tl.store(to, read.to(out.dtype.element_ty), mask=is_column)
            state += key[:, None] * write[None, :]
        if known == end:
            tl.store(at, state, mask=is_inside)


@triton.jit
def _unit_vector(
    x, token_at, group, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr, IS_DELTA: tl.constexpr
):
    """A token's query or key [BLOCK_K], for the delta rule of unit length."""
    keys = tl.arange(0, BLOCK_K)
    given = tl.load(x + token_at + group * KEY_DIM + keys, mask=keys < KEY_DIM, other=0.0)
    wide = given.to(tl.float32)
    if IS_DELTA:
        wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) + 1e-6)
    return wide


@triton.jit
def _rows_of(x, tokens, is_token, stride, group, start, KEY_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH numbers from `start` on of the queries or keys of a chunk's tokens [CHUNK, WIDTH];
    zeros past its end."""
    keys = start + tl.arange(0, WIDTH)
    at = x + tokens.to(tl.int64)[:, None] * stride + group * KEY_DIM + keys[None, :]
    return tl.load(at, mask=is_token[:, None] & (keys < KEY_DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _scales(rows):
    """By which they become unit vectors, [CHUNK]."""
    return tl.rsqrt(tl.sum(rows * rows, axis=1) + 1e-6)


@triton.jit
def _summed_decays(
    log_decay, tokens, is_token, head, start,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, WIDTH: tl.constexpr, HAS_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Since the chunk's begin, logarithms: [CHUNK, WIDTH] from `start` on, or [CHUNK, 1]. Tokens
    past its end have none of their own."""
    if HAS_CHANNELS:
        keys = start + tl.arange(0, WIDTH)
        at = log_decay + (tokens.to(tl.int64) * HEADS + head)[:, None] * KEY_DIM + keys[None, :]
        each = tl.load(at, mask=is_token[:, None] & (keys < KEY_DIM)[None, :], other=0.0)
        return tl.cumsum(each, axis=0)
    else:
        each = tl.load(log_decay + tokens.to(tl.int64) * HEADS + head, mask=is_token, other=0.0)
        return tl.cumsum(each, axis=0)[:, None]


@triton.jit
def _relate_tokens(
    q, k, log_decay, rates, reads, writes, chunks, q_stride, k_stride,
    HEADS: tl.constexpr, SHARE: tl.constexpr, KEY_DIM: tl.constexpr, IS_DELTA: tl.constexpr,
    HAS_CHANNELS: tl.constexpr, CHUNK: tl.constexpr, LOG_CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Of a chunk and a head [CHUNK, CHUNK] each, from columns' tokens to rows': `reads`, how much
    of a token's write a later token reads, or itself; `writes`, how much of what a token would
    write for itself goes into what a later one writes, or itself, rate included."""
    part, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(chunks + part // PARTS * 2) + part % PARTS * CHUNK
    end = min(first + CHUNK, tl.load(chunks + part // PARTS * 2 + 1))
    if first < end:
        places = tl.arange(0, CHUNK)
        tokens = first + places
        is_token = tokens < end
        group = head // SHARE
        read = tl.zeros([CHUNK, CHUNK], tl.float32)
        held = tl.zeros([CHUNK, CHUNK], tl.float32)
        query_square = tl.full([CHUNK], 1e-6, tl.float32)
        key_square = tl.full([CHUNK], 1e-6, tl.float32)
        for start in range(0, KEY_DIM, _RELATED_KEYS):
            query = _rows_of(q, tokens, is_token, q_stride, group, start, KEY_DIM, _RELATED_KEYS)
            key = _rows_of(k, tokens, is_token, k_stride, group, start, KEY_DIM, _RELATED_KEYS)
            query_square += tl.sum(query * query, axis=1)
            key_square += tl.sum(key * key, axis=1)
            if HAS_CHANNELS:
                decays = _summed_decays(
                    log_decay, tokens, is_token, head, start, HEADS, KEY_DIM, _RELATED_KEYS, True
                )
                # To tokens before it a decay would grow: these are cut off below.
                kept = tl.exp(tl.minimum(decays[:, None, :] - decays[None, :, :], 0.0))
                kept *= key[None, :, :]
                read += tl.sum(query[:, None, :] * kept, axis=2)
                held += tl.sum(key[:, None, :] * kept, axis=2)
            else:
                read = tl.dot(query, tl.trans(key), read)
                if IS_DELTA:
                    held = tl.dot(key, tl.trans(key), held)
        if not HAS_CHANNELS:
            decays = _summed_decays(
                log_decay, tokens, is_token, head, 0, HEADS, KEY_DIM, _RELATED_KEYS, False
            )
            until = tl.sum(decays, axis=1)
            kept = tl.exp(tl.minimum(until[:, None] - until[None, :], 0.0))
            read *= kept
            held *= kept
        at = (part.to(tl.int64) * HEADS + head) * (CHUNK * CHUNK)
        at += places[:, None] * CHUNK + places[None, :]
        if IS_DELTA:
            key_scale = tl.rsqrt(key_square)
            read *= (tl.rsqrt(query_square) * KEY_DIM**-0.5)[:, None] * key_scale[None, :]
        tl.store(reads + at, tl.where(places[:, None] >= places[None, :], read, 0.0))
        if IS_DELTA:
            rate_at = rates + tokens.to(tl.int64) * HEADS + head
            rate = tl.load(rate_at, mask=is_token, other=0.0)
            held *= (key_scale * rate)[:, None] * key_scale[None, :]
            tl.store(writes + at, _inverse(held, CHUNK, LOG_CHUNK) * rate[None, :])


@triton.jit
def _inverse(held, CHUNK: tl.constexpr, LOG_CHUNK: tl.constexpr):
    """Of 1 + what is below the diagonal of `held` [CHUNK, CHUNK].

    From blocks of the diagonal whose inverse is known to blocks of twice their size: that below the
    two is -(inverse of the lower) (what lies there) (inverse of the upper), which unlike powers of
    the whole stays small where keys are alike.
    """
    places = tl.arange(0, CHUNK)
    inverse = tl.where(places[:, None] == places[None, :], 1.0, 0.0)
    for doubling in range(LOG_CHUNK):
        lower, upper = places[:, None] >> doubling, places[None, :] >> doubling
        is_below = (lower >> 1 == upper >> 1) & (lower > upper)
        found = tl.dot(tl.where(is_below, held, 0.0), inverse)
        inverse -= tl.dot(inverse, found)
    return inverse


@triton.jit(do_not_specialize=["num_rows"])
def _scan_chunks(
    q, k, v, log_decay, rates, reads, writes, states, out, rows, num_rows,
    q_stride, k_stride, v_stride,
    HEADS: tl.constexpr, SHARE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, IS_DELTA: tl.constexpr,
    HAS_CHANNELS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of one head's state and results, over all of a row's chunks."""
    row, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(rows + row), tl.load(rows + num_rows + row)
    if first < end:
        slot = tl.load(rows + 2 * num_rows + row).to(tl.int64)
        begins = tl.load(rows + 3 * num_rows + row)
        chunk = tl.load(rows + 4 * num_rows + row).to(tl.int64) * PARTS
        keys, places = tl.arange(0, BLOCK_K), tl.arange(0, CHUNK)
        columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        is_column = columns < VALUE_DIM
        group = head // SHARE
        state_at = states + (slot * HEADS + head) * (KEY_DIM * VALUE_DIM)
        state_at += keys[:, None] * VALUE_DIM + columns[None, :]
        is_inside = (keys < KEY_DIM)[:, None] & is_column[None, :]
        state = tl.load(state_at, mask=is_inside & (begins == 0), other=0.0)
        matrix_at = (chunk * HEADS + head) * (CHUNK * CHUNK)
        matrix_at += places[:, None] * CHUNK + places[None, :]
        for start in range(first, end, CHUNK):
            tokens = start + places
            is_token = tokens < end
            key = _rows_of(k, tokens, is_token, k_stride, group, 0, KEY_DIM, BLOCK_K)
            if IS_DELTA:
                key *= _scales(key)[:, None]
            decays = _summed_decays(
                log_decay, tokens, is_token, head, 0, HEADS, KEY_DIM, BLOCK_K, HAS_CHANNELS
            )
            whole = tl.sum(tl.where((places == CHUNK - 1)[:, None], decays, 0.0), axis=0)
            since = tl.exp(decays)
            value_at = v + tokens.to(tl.int64)[:, None] * v_stride + head * VALUE_DIM
            is_value = is_token[:, None] & is_column[None, :]
            value = tl.load(value_at + columns[None, :], mask=is_value, other=0.0).to(tl.float32)
            # A decay that all numbers of a key share is applied to what comes of their product.
            if IS_DELTA:
                held = tl.dot(key * since if HAS_CHANNELS else key, state)
                value -= held if HAS_CHANNELS else held * since
                write = tl.dot(tl.load(writes + matrix_at), value)
            else:
                rate_at = rates + tokens.to(tl.int64) * HEADS + head
                write = value * tl.load(rate_at, mask=is_token, other=0.0)[:, None]
            query = _rows_of(q, tokens, is_token, q_stride, group, 0, KEY_DIM, BLOCK_K)
            if IS_DELTA:
                query *= _scales(query)[:, None] * KEY_DIM**-0.5
            if HAS_CHANNELS:
                query *= since
            read = tl.dot(query, state)
            if not HAS_CHANNELS:
                read *= since
            read = tl.dot(tl.load(reads + matrix_at), write, read)
            to = out + (tokens.to(tl.int64) * HEADS + head)[:, None] * VALUE_DIM + columns[None, :]
            tl.store(to, read.to(out.dtype.element_ty), mask=is_value)
            left = tl.exp(whole[None, :] - decays)
            if HAS_CHANNELS:
                key *= left
            else:
                write *= left
            state *= tl.exp(whole)[:, None]
            state = tl.dot(tl.trans(key), write, state)
            matrix_at += HEADS * (CHUNK * CHUNK)
        tl.store(state_at, state, mask=is_inside)
