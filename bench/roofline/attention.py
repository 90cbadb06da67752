"""Attention over the paged KV: decode, the tree's shared prefixes, a long prompt, a mixed step.

Each case is compared with the reference in float32 before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .ceilings import causal_flop, flash_sdpa
from .context import Context
from .paged_batches import PagedBatch, make_batch, relative_error
from .rows import Row, Target, at_least, at_most, attempt
from .timing import Call, Timing

MAX_ERROR = {torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 1.5e-2}
"""||out - reference|| / ||reference||: float32 products may run as tf32."""
_CHECKED_QUERIES = 256  # of a long prompt, the last ones: the reference holds all their scores


def decode(ctx: Context) -> Iterator[Row]:
    """Long contexts, one token each, against reading their KV once at the copy rate."""
    yield from attempt("bf16, pages of 16 and 1", _decode, ctx)


def _decode(ctx: Context) -> Iterator[Row]:
    batch, tokens = ctx.sizes.decode_batch, ctx.sizes.decode_tokens
    made = make_batch(ctx, [(1, tokens)] * batch, page_size=16, heads=ctx.sizes.heads)
    single = make_batch(ctx, [(1, tokens)] * batch, page_size=1, heads=ctx.sizes.heads)
    cases: list[tuple[str, PagedBatch, Target | None]] = [
        ("page size 16", made, at_least(0.85)),
        ("page size 1", single, at_least(0.75)),
        ("fp8 KV, page size 16", made.quantized(torch.float8_e4m3fn), None),
        ("int8 KV, page size 16", made.quantized(torch.int8), None),
    ]
    calls: dict[str, list[Call]] = {}
    for name, one, _ in cases:
        found = list(attempt(name, _prepared, ctx, name, one, calls))
        yield from found
    times = ctx.timer.time(calls)
    for name, one, target in cases:
        if name in times:
            yield _bandwidth_row(ctx, f"{batch} x {tokens}, {name}", one, times[name], target)


def _prepared(
    ctx: Context, name: str, batch: PagedBatch, calls: dict[str, list[Call]]
) -> Iterator[Row]:
    """The row of its error; and, where the error is small, a call to time."""
    call = bound_call(ctx, batch)
    row = error_row(f"{name}, error", call(), batch.expected(), batch.q.dtype)
    yield row
    if row.verdict(not ctx.has_gpu) == "met":
        calls[name] = [call]


def _bandwidth_row(
    ctx: Context, case: str, batch: PagedBatch, timing: Timing, target: Target | None
) -> Row:
    rate = batch.kv_bytes / timing.median_s
    return Row(
        case, rate / 1e9, "GB/s", rate / ctx.ceilings.copy_bytes_s, "copy bandwidth", target,
        details={**timing.details(), "kv_bytes": batch.kv_bytes},
    )  # fmt: skip


def tree(ctx: Context) -> Iterator[Row]:
    """Sequences with a common prefix, planned as a tree, and the same rows without segments."""
    for shared, target in zip(ctx.sizes.tree_shared, (at_least(4.0), at_least(8.0))):
        case = f"{ctx.sizes.tree_batch} share {shared} of {shared + ctx.sizes.tree_own}"
        yield from attempt(case, _tree, ctx, shared, case, target)


def _tree(ctx: Context, shared: int, case: str, target: Target) -> Iterator[Row]:
    lengths = [(1, shared + ctx.sizes.tree_own)] * ctx.sizes.tree_batch
    batch = make_batch(ctx, lengths, page_size=16, heads=ctx.sizes.heads, shared=[shared])
    whole, plain = bound_call(ctx, batch), bound_call(ctx, batch.without_segments())
    expected = batch.expected()
    yield error_row(f"{case}, error", whole(), expected, ctx.dtype)
    yield error_row(f"{case}, error without segments", plain(), expected, ctx.dtype)
    del expected
    apart = bound_call(ctx, make_batch(ctx, lengths, page_size=16, heads=ctx.sizes.heads))
    times = ctx.timer.time({"tree": [whole], "plain": [plain], "apart": [apart]})
    took, base = times["tree"], times["plain"]
    read_once = shared * batch.bytes_per_token + ctx.sizes.tree_batch * (
        ctx.sizes.tree_own * batch.bytes_per_token
    )
    yield Row(
        case, took.median_s * 1e3, "ms", base.median_s / took.median_s, "the plain kernel", target,
        details={
            **took.details(),
            "plain": base.details(),
            "apart": times["apart"].details(),  # a copy of the prefix for each row: nothing shared
            "times_apart": times["apart"].median_s / took.median_s,
            "bytes_read_once": read_once,
            "share_of_copy": read_once / took.median_s / ctx.ceilings.copy_bytes_s,
            "plain_share_of_copy": batch.kv_bytes / base.median_s / ctx.ceilings.copy_bytes_s,
        },
    )  # fmt: skip


def extend(ctx: Context) -> Iterator[Row]:
    """A long causal prompt, against the matrix product's rate and torch's flash attention."""
    yield from attempt("causal prompt", _extend, ctx)
    yield from attempt("mixed step", _mixed, ctx)


def _extend(ctx: Context) -> Iterator[Row]:
    length, heads = ctx.sizes.extend_tokens, ctx.sizes.heads
    batch = make_batch(ctx, [(length, length)], page_size=16, heads=heads)
    call = bound_call(ctx, batch)
    q, k, v = _dense(batch)
    ours, theirs = call(), flash_sdpa(q, k, v)[0].transpose(0, 1)
    case = f"{length} causal"
    yield error_row(f"{case}, error against SDPA", ours, theirs, ctx.dtype)
    last = replace(
        batch,
        q=batch.q[-_CHECKED_QUERIES:],
        rows=replace(
            batch.rows,
            query_start=batch.rows.query_start.clip(max=_CHECKED_QUERIES),
        ),
    )
    yield error_row(f"{case}, error", ours[-_CHECKED_QUERIES:], last.expected(), ctx.dtype)
    times = ctx.timer.time({"ours": [call], "sdpa": [lambda: flash_sdpa(q, k, v)]})
    took, peer = times["ours"], times["sdpa"]
    rate = causal_flop(length, heads) / took.median_s
    details = {**took.details(), "sdpa": peer.details()}
    yield Row(
        case, rate / 1e12, "TFLOP/s", rate / ctx.ceilings.gemm_flop_s, "gemm", at_least(0.4),
        details=details,
    )  # fmt: skip
    yield Row(
        f"{case}, SDPA's time through ours", took.median_s * 1e3, "ms",
        peer.median_s / took.median_s, "torch's flash SDPA", at_least(0.9), details=details,
    )  # fmt: skip


def _mixed(ctx: Context) -> Iterator[Row]:
    """Decode rows and a chunk after a cached prefix, in one call."""
    sizes = ctx.sizes
    chunk = sizes.extend_tokens // 4
    lengths = [(1, sizes.decode_tokens)] * sizes.decode_batch
    lengths += [(chunk, chunk + sizes.mixed_prefix)]
    batch = make_batch(ctx, lengths, page_size=16, heads=sizes.heads)
    call = bound_call(ctx, batch)
    case = f"{sizes.decode_batch} decodes and a chunk of {chunk} behind {sizes.mixed_prefix}"
    yield error_row(f"{case}, error", call(), batch.expected(), ctx.dtype)
    decodes = make_batch(ctx, lengths[:-1], page_size=16, heads=sizes.heads)
    prompt = make_batch(ctx, lengths[-1:], page_size=16, heads=sizes.heads)
    times = ctx.timer.time(
        {
            "mixed": [call],
            "decodes": [bound_call(ctx, decodes)],
            "chunk": [bound_call(ctx, prompt)],
        }
    )
    apart = times["decodes"].median_s + times["chunk"].median_s
    yield Row(
        case, times["mixed"].median_s * 1e3, "ms", apart / times["mixed"].median_s,
        "decodes and chunk apart", details={name: t.details() for name, t in times.items()},
    )  # fmt: skip


def bound_call(ctx: Context, batch: PagedBatch) -> Callable[[], Tensor]:
    """The attention of a batch, planned and on the device."""
    kernels = ctx.kernels_of(batch.q.dtype)
    plan = batch.bound(kernels)
    return lambda: kernels.paged_attention(batch.q, batch.kv_layer, plan)


def error_row(
    case: str, found: object, expected: Tensor, dtype: torch.dtype, bound: float | None = None
) -> Row:
    """The error of a result; NaN is a miss."""
    assert isinstance(found, Tensor)
    error, most = relative_error(found, expected)
    limit = MAX_ERROR[dtype] if bound is None else bound
    return Row(
        case, error, "relative", error, "the reference in float32", at_most(limit), is_timed=False,
        details={"largest_difference": most, "shape": list(found.shape), "dtype": str(dtype)},
    )  # fmt: skip


def _dense(batch: PagedBatch) -> Sequence[Tensor]:
    """Queries, keys and values of its one row, [1, heads.query, length, heads.dim]."""
    assert isinstance(batch.kv_layer, Tensor)
    slots = torch.from_numpy(batch.rows.slots(0, 0, int(batch.rows.seq_lens[0]))).to(batch.q.device)
    kv = batch.kv_layer.index_select(2, slots)
    group = batch.heads.query // batch.heads.kv
    k, v = kv.repeat_interleave(group, dim=1)
    return batch.q.transpose(0, 1)[None].contiguous(), k[None].contiguous(), v[None].contiguous()
