"""The ops between the products: as a share of the copy's bandwidth, each call on data of its own.

The data of all calls together is larger than the second-level cache where `small_bytes` allows it;
a call of one token is short of anything to do, and its microseconds say more than its share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.sampling_rows import AdjustedRows, SamplingRows
from .context import Context
from .rows import Row, attempt
from .timing import Call


@dataclass(frozen=True, slots=True)
class Op:
    """`make(seed)` returns a call on new data, which moves `num_bytes`, read and written."""

    name: str
    num_bytes: int
    make: Callable[[int], Call]


def small_ops(ctx: Context) -> Iterator[Row]:
    """Norm, rotary embedding and store, activation; adjusting, masking and sampling of logits."""
    for num_tokens in ctx.sizes.small_tokens:
        for make in (_norm, _rotate, _activation, _greedy, _drawn, _adjust, _mask, _logprobs):
            case = f"{make.__name__.strip('_')}, {num_tokens}"
            yield from attempt(case, _measured, ctx, make, num_tokens)


def _measured(ctx: Context, make: Callable[[Context, int], Op], num_tokens: int) -> Iterator[Row]:
    op = make(ctx, num_tokens)
    sizes = ctx.sizes
    num_calls = max(1, min(sizes.small_calls, sizes.small_bytes // op.num_bytes))
    calls = [op.make(seed) for seed in range(num_calls)]
    timing = ctx.timer.time({op.name: calls})[op.name]
    rate = op.num_bytes / timing.median_s
    yield Row(
        op.name, timing.median_s * 1e6, "us", rate / ctx.ceilings.copy_bytes_s, "copy bandwidth",
        details={**timing.details(), "num_bytes": op.num_bytes, "calls": num_calls},
    )  # fmt: skip


def _norm(ctx: Context, num_tokens: int) -> Op:
    size, item = ctx.sizes.hidden, ctx.dtype.itemsize
    norm = ctx.kernels.make_rms_norm(ctx.random(size), 1e-5)

    def make(seed: int) -> Call:
        x, residual = (ctx.random(num_tokens, size, seed=seed) for _ in range(2))
        return lambda: norm(x, residual)

    # x and residual are read, residual and the result written
    return Op(f"rms_norm with residual, {num_tokens}", (4 * num_tokens + 1) * size * item, make)


def _rotate(ctx: Context, num_tokens: int) -> Op:
    heads, item = ctx.sizes.heads, ctx.dtype.itemsize
    num_slots = max(64, num_tokens * ctx.sizes.small_calls)
    kv = ctx.random(2, heads.kv, num_slots, heads.dim)
    cos, sin = rotary(ctx.random(2, num_tokens, 1, heads.dim // 2))

    def make(seed: int) -> Call:
        tokens = ctx.random(num_tokens, heads.query + 2 * heads.kv, heads.dim, seed=seed)
        first = seed * num_tokens
        slots = torch.arange(first, first + num_tokens, device=ctx.tensors) % num_slots
        return lambda: ctx.kernels.rotate_and_store(tokens, cos, sin, kv, slots)

    # queries are read and written, keys and values read and stored; cos and sin are read
    num_bytes = num_tokens * heads.dim * item * (2 * heads.query + 4 * heads.kv + 2)
    return Op(f"rotate_and_store, {num_tokens}", num_bytes, make)


def _activation(ctx: Context, num_tokens: int) -> Op:
    size, item = ctx.sizes.intermediate, ctx.dtype.itemsize

    def make(seed: int) -> Call:
        gate_up = ctx.random(num_tokens, 2 * size, seed=seed)
        return lambda: ctx.kernels.act_and_mul(gate_up)

    return Op(f"act_and_mul, {num_tokens}", 3 * num_tokens * size * item, make)


def _greedy(ctx: Context, num_rows: int) -> Op:
    return _sampling(ctx, num_rows, "sample, greedy", temperature=0.0)


def _drawn(ctx: Context, num_rows: int) -> Op:
    return _sampling(
        ctx, num_rows, "sample, top-k, top-p, min-p", temperature=0.8, top_k=50, top_p=0.9,
        min_p=0.02,
    )  # fmt: skip


def _sampling(
    ctx: Context, num_rows: int, name: str, *, temperature: float, top_k: int = 0,
    top_p: float = 1.0, min_p: float = 0.0,
) -> Op:  # fmt: skip
    rows = sampling_rows(
        ctx, num_rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )

    def make(seed: int) -> Call:
        logits = make_logits(ctx, num_rows, seed)
        return lambda: ctx.kernels.sample(logits, rows)

    return Op(f"{name}, {num_rows}", _logits_bytes(ctx, num_rows), make)


def _adjust(ctx: Context, num_rows: int) -> Op:
    rows = adjusted_rows(ctx, num_rows, num_entries=min(512, ctx.sizes.vocab // 2))
    previous = torch.zeros(num_rows, dtype=torch.int64, device=ctx.tensors)

    def make(seed: int) -> Call:
        logits = make_logits(ctx, num_rows, seed)
        return lambda: ctx.kernels.adjust_logits(logits, rows, previous)

    # an entry: a logit read and written, 8 bytes of id, count, bias each, and a flag
    return Op(f"adjust_logits, {num_rows}", len(rows.token_id) * (2 * 4 + 3 * 8 + 1), make)


def _mask(ctx: Context, num_rows: int) -> Op:
    masks = token_masks(ctx, num_rows)
    rows = torch.arange(num_rows, device=ctx.tensors)

    def make(seed: int) -> Call:
        logits = make_logits(ctx, num_rows, seed)
        return lambda: ctx.kernels.apply_token_mask(logits, rows, masks)

    return Op(f"apply_token_mask, {num_rows}", _logits_bytes(ctx, num_rows) + masks.nbytes, make)


def _logprobs(ctx: Context, num_rows: int) -> Op:
    ids = torch.arange(num_rows, device=ctx.tensors)

    def make(seed: int) -> Call:
        logits = make_logits(ctx, num_rows, seed)
        return lambda: ctx.kernels.token_logprobs(logits, ids)

    return Op(f"token_logprobs, {num_rows}", _logits_bytes(ctx, num_rows), make)


def rotary(halves: Tensor) -> tuple[Tensor, Tensor]:
    """[2, T, 1, dim / 2] -> cosines and sines, [T, 1, dim] each: the first half of the sines is
    negated."""
    cos, sin = halves.unbind()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def make_logits(ctx: Context, num_rows: int, seed: int = 0) -> Tensor:
    """[num_rows, vocab] float32 with the spread of a language model's logits."""
    return ctx.random(num_rows, ctx.sizes.vocab, dtype=torch.float32, seed=seed) * 3.0


def sampling_rows(
    ctx: Context, num_rows: int, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> SamplingRows:
    """Rows that differ only in their seeds."""

    def floats(value: float) -> Tensor:
        return torch.full((num_rows,), value, dtype=torch.float64, device=ctx.tensors)

    def integers(first: int, step: int) -> Tensor:
        return torch.arange(num_rows, device=ctx.tensors) * step + first

    return SamplingRows(
        temperature=floats(temperature),
        top_k=integers(top_k, 0),
        top_p=floats(top_p),
        min_p=floats(min_p),
        seed=integers(1234, 77),
        position=integers(1000, 1),
    )


def adjusted_rows(ctx: Context, num_rows: int, num_entries: int) -> AdjustedRows:
    """Every penalty, for `num_entries` tokens of each row."""
    device = ctx.tensors

    def floats(count: int, value: float) -> Tensor:
        return torch.full((count,), value, dtype=torch.float64, device=device)

    total = num_rows * num_entries
    token_id = torch.arange(num_entries, device=device).repeat(num_rows) * 2
    return AdjustedRows(
        place=torch.arange(num_rows, device=device),
        repetition=floats(num_rows, 1.1),
        frequency=floats(num_rows, 0.3),
        presence=floats(num_rows, 0.2),
        latest=torch.arange(num_rows, device=device),
        entry_start=torch.arange(num_rows + 1, device=device) * num_entries,
        token_id=token_id % ctx.sizes.vocab,
        count=torch.arange(total, device=device) % 3,
        is_in_prompt=torch.arange(total, device=device) % 2 == 0,
        bias=torch.zeros(total, dtype=torch.float64, device=device),
    )


def token_masks(ctx: Context, num_rows: int) -> Tensor:
    """[num_rows, ceil(vocab / 32)] int32, half of the tokens allowed."""
    words = -(-ctx.sizes.vocab // 32)
    generator = torch.Generator(ctx.tensors).manual_seed(5)
    return torch.randint(
        -(2**31), 2**31, (num_rows, words), dtype=torch.int32, device=ctx.tensors,
        generator=generator,
    )  # fmt: skip


def _logits_bytes(ctx: Context, num_rows: int) -> int:
    return num_rows * ctx.sizes.vocab * 4
