"""Every kernel on the device against the reference in float32: a wrong one has a row that names it.

The shapes are those of the tests in the interpreter, and what these cannot say: bfloat16, float16,
8-bit KV, and 300 pages of context, so that a row's KV is split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...kernels.model_options import DEFAULT_OPTIONS, AttentionOptions
from ...kernels.registry import Kernels, select_kernels
from ...runtime.execute.dtype_name import dtype_name
from .attention import error_row
from .context import Context
from .latent import latent_call
from .paged_batches import Lengths, make_batch, quantize, widened
from .rows import Row, at_most, attempt
from .scans import bound_plans, scan_results, state_rows
from .sizes import Heads, ScanSizes
from .small_ops import adjusted_rows, make_logits, rotary, sampling_rows, token_masks

_HEADS = Heads(8, 2, 128)
_NUM_PLAIN = 10  # cases run in every dtype; the others only in the model's


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A batch with (queries, tokens with KV) per row, and the attention's options."""

    name: str
    lengths: Lengths
    shared: tuple[int, ...] = ()
    heads: Heads = _HEADS
    page_size: int = 16
    options: AttentionOptions = DEFAULT_OPTIONS
    quantized: torch.dtype | None = None


def checks(ctx: Context) -> Iterator[Row]:
    """This process's share of all checks: attention in all its forms, then every other op."""
    first, step = ctx.shard
    for name, check in list(_all_checks(ctx))[first::step]:
        yield from attempt(name, check)


def first_checks(ctx: Context) -> Iterator[Row]:
    """A few, which compile in seconds: what a decode step runs."""
    case = (_attention_cases() if ctx.has_gpu else _tiny_cases())[0]
    yield from attempt("attention", _attention, ctx, case, case.name, ctx.dtype)
    for check in (_norm, _rotate, _activation, _gated, _normed):
        name = check.__name__.strip("_")
        yield from attempt(name, _compared, ctx, name, ctx.dtype, check)
    yield from attempt("sample", _sample, ctx)


def _all_checks(ctx: Context) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if ctx.has_gpu else (ctx.dtype,)
    cases = _attention_cases() if ctx.has_gpu else _tiny_cases()
    for dtype in dtypes:
        for case in cases if dtype is ctx.dtype else cases[:_NUM_PLAIN]:
            name = f"{case.name}, {_short(dtype)}"
            yield name, partial(_attention, ctx, case, name, dtype)
        for check in (
            _norm, _norm_heads, _rotate, _activation, _store, _output, _gated, _normed,
            _short_convolution,
        ):  # fmt: skip
            name = f"{check.__name__.strip('_')}, {_short(dtype)}"
            yield name, partial(_compared, ctx, name, dtype, check)
        for scan in ctx.sizes.scans:
            name = f"scan of {scan.name}, {_short(dtype)}"
            yield name, partial(_scan, ctx, name, scan, dtype)
    for name, lengths, shared in _latent_cases(ctx):
        yield name, partial(_latent, ctx, name, lengths, shared)
    for rows in (_store_quantized, _sample, _adjust, _mask, _logprobs, _inputs, _pages, _page_copy):
        yield rows.__name__.strip("_"), partial(rows, ctx)


def _attention_cases() -> list[AttentionCase]:
    """Decode, chunks, both, trees of one and two levels; options; head sizes; page sizes."""
    decode: Lengths = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 700), (1, 4800)]
    chunks: Lengths = [(1, 1), (17, 17), (130, 130), (64, 500), (3, 1000), (300, 333)]
    tree: Lengths = [(1, 600 + 30 * row) for row in range(6)]
    mixed: Lengths = [(1, 900)] * 3 + [(200, 900)]
    windowed = AttentionOptions(window=100, num_sink_tokens=4)
    shapes = [
        AttentionCase("decode", decode),
        AttentionCase("decode, page size 1", decode, page_size=1),
        AttentionCase("decode, page size 64", decode, page_size=64),
        AttentionCase("chunks", chunks),
        AttentionCase("chunks, page size 1", chunks, page_size=1),
        AttentionCase("mixed", mixed),
        AttentionCase("tree", tree, (512,)),
        AttentionCase("tree of two levels", tree, (256, 512)),
        AttentionCase("tree with chunks", [(9, 600 + 30 * row) for row in range(6)], (512,)),
        AttentionCase("decode, 4 x 128 tokens", [(1, 128)] * 4),
    ]
    for heads in (Heads(32, 8, 128), Heads(8, 8, 64), Heads(8, 1, 64), Heads(4, 2, 256),
                  Heads(6, 2, 96)):  # fmt: skip
        label = f"heads {heads.query}/{heads.kv} of {heads.dim}"
        shapes.append(AttentionCase(f"decode, {label}", decode, heads=heads))
        shapes.append(AttentionCase(f"chunks, {label}", chunks, heads=heads))
        shapes.append(AttentionCase(f"tree, {label}", tree, (512,), heads=heads))
    for label, options in (
        ("window and sinks", windowed),
        ("window", AttentionOptions(window=50)),
        ("soft cap", AttentionOptions(soft_cap=30.0)),
        ("scale", AttentionOptions(scale=0.05)),
    ):
        shapes.append(AttentionCase(f"decode, {label}", decode, options=options))
        shapes.append(AttentionCase(f"chunks, {label}", chunks, options=options))
    for quantized in (torch.int8, torch.float8_e4m3fn):
        label = _short(quantized)
        shapes.append(AttentionCase(f"decode, {label} KV", decode, quantized=quantized))
        shapes.append(AttentionCase(f"chunks, {label} KV", chunks, quantized=quantized))
        shapes.append(AttentionCase(f"tree, {label} KV", tree, (512,), quantized=quantized))
    return shapes


def _tiny_cases() -> list[AttentionCase]:
    heads = Heads(4, 2, 64)
    tree: Lengths = [(1, 20), (1, 23)]
    return [
        AttentionCase("decode", [(1, 1), (1, 17)], heads=heads),
        AttentionCase("chunks", [(3, 5), (1, 18)], heads=heads, page_size=1),
        AttentionCase("tree", tree, (16,), heads=heads),
        AttentionCase("decode, int8 KV", [(1, 17)], heads=heads, quantized=torch.int8),
        AttentionCase(
            "decode, window and sinks", [(1, 40)], heads=heads,
            options=AttentionOptions(window=8, num_sink_tokens=2),
        ),
    ]  # fmt: skip


def _attention(ctx: Context, case: AttentionCase, name: str, dtype: torch.dtype) -> Iterator[Row]:
    """Run twice: the second time must give the same bits, else there is a race."""
    batch = make_batch(
        ctx, case.lengths, page_size=case.page_size, heads=case.heads, shared=case.shared,
        dtype=dtype,
    )  # fmt: skip
    if case.quantized is not None:
        batch = batch.quantized(case.quantized)
        dtype = batch.q.dtype
    kernels = ctx.kernels_of(dtype)
    plan = batch.bound(kernels, case.options)
    first, second = (kernels.paged_attention(batch.q, batch.kv_layer, plan) for _ in range(2))
    yield error_row(f"attention: {name}", first, batch.expected(case.options), dtype)
    if not torch.equal(first, second):
        yield _mismatches(f"attention: {name}, run twice", first, second)


def _latent_cases(ctx: Context) -> list[tuple[str, Lengths, tuple[int, ...]]]:
    if not ctx.has_gpu:
        return [("latent decode", [(1, 17)], ()), ("latent chunks", [(3, 5), (1, 18)], ())]
    return [
        ("latent decode", [(1, 1), (1, 17), (1, 700), (1, 4800)], ()),
        ("latent chunks", [(1, 1), (17, 17), (130, 400)], ()),
        ("latent tree", [(1, 600 + 30 * row) for row in range(6)], (512,)),
    ]


def _latent(ctx: Context, name: str, lengths: Lengths, shared: tuple[int, ...]) -> Iterator[Row]:
    """Few heads and many."""
    reference = _reference(ctx)
    for sizes in ctx.sizes.latents:
        expected = latent_call(ctx, sizes, lengths, reference, torch.float32, shared)()
        found = latent_call(ctx, sizes, lengths, ctx.kernels, ctx.dtype, shared)()
        yield error_row(f"{name}, {sizes.heads} heads", found, expected, ctx.dtype)


Compared = Callable[[Context, Kernels, torch.dtype], Tensor]
"""One result of an op of these kernels; of the reference, from the same numbers widened."""


def _compared(ctx: Context, name: str, dtype: torch.dtype, check: Compared) -> Iterator[Row]:
    reference = select_kernels(torch.float32, ctx.device, "reference")
    expected = check(ctx, reference, torch.float32)
    yield error_row(name, check(ctx, ctx.kernels_of(dtype), dtype), expected, dtype)


def _numbers(ctx: Context, *shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """The same numbers in any dtype: those that bfloat16 can hold."""
    return ctx.random(*shape, dtype=torch.bfloat16, seed=seed).to(dtype)


def _norm(ctx: Context, kernels: Kernels, dtype: torch.dtype) -> Tensor:
    size = ctx.sizes.hidden
    x, residual = (_numbers(ctx, 7, size, dtype=dtype, seed=s) for s in (1, 2))
    normed = kernels.make_rms_norm(_numbers(ctx, size, dtype=dtype), 1e-5)(x, residual)
    return torch.stack([normed, residual])


def _norm_heads(ctx: Context, kernels: Kernels, dtype: torch.dtype) -> Tensor:
    heads = ctx.sizes.heads
    tokens = _numbers(ctx, 5, heads.query + 2 * heads.kv, heads.dim, dtype=dtype)
    query, key = (_numbers(ctx, heads.dim, dtype=dtype, seed=s) for s in (1, 2))
    kernels.make_query_key_norm(query, key, heads.query, heads.kv, 1e-6)(tokens)
    return tokens


def _rotate(ctx: Context, kernels: Kernels, dtype: torch.dtype) -> Tensor:
    heads = ctx.sizes.heads
    tokens = _numbers(ctx, 5, heads.query + 2 * heads.kv, heads.dim, dtype=dtype)
    cos, sin = rotary(_numbers(ctx, 2, 5, 1, heads.dim // 2, dtype=dtype, seed=1))
    kv = torch.zeros(2, heads.kv, 12, heads.dim, dtype=dtype, device=ctx.tensors)
    slots = torch.tensor([3, 11, 0, 7, 5], device=ctx.tensors)
    kernels.rotate_and_store(tokens, cos, sin, kv, slots)
    return torch.cat([tokens[:, : heads.query].flatten(), kv.flatten()])


def _store(ctx: Context, kernels: Kernels, dtype: torch.dtype) -> Tensor:
    heads = ctx.sizes.heads
    k, v = (_numbers(ctx, 3, heads.kv, heads.dim, dtype=dtype, seed=s) for s in (1, 2))
    kv = torch.zeros(2, heads.kv, 8, heads.dim, dtype=dtype, device=ctx.tensors)
    kernels.store_kv(k, v, kv, torch.tensor([6, 0, 3], device=ctx.tensors))
    return kv


def _store_quantized(ctx: Context) -> Iterator[Row]:
    """Values stored in 8 bits, against the originals: both ways of storing."""
    heads = ctx.sizes.heads
    tokens = _numbers(ctx, 3, heads.query + 2 * heads.kv, heads.dim, dtype=ctx.dtype)
    k, v = tokens[:, heads.query : -heads.kv], tokens[:, -heads.kv :]
    expected = torch.stack([k, v]).transpose(1, 2).float()
    slots = torch.tensor([6, 0, 3], device=ctx.tensors)
    still = rotary(
        torch.stack([torch.ones(3, 1, heads.dim // 2), torch.zeros(3, 1, heads.dim // 2)])
    )
    cos, sin = (half.to(ctx.tensors, ctx.dtype) for half in still)
    for dtype, bound in ((torch.int8, 1e-2), (torch.float8_e4m3fn, 4e-2)):
        stored, rotated = (
            quantize(torch.zeros(2, heads.kv, 8, heads.dim, device=ctx.tensors), dtype)
            for _ in range(2)
        )
        ctx.kernels.store_kv(k, v, stored, slots)
        ctx.kernels.rotate_and_store(tokens.clone(), cos, sin, rotated, slots)
        for name, kv in (("store_kv", stored), ("rotate_and_store", rotated)):
            found = widened(kv)[:, :, slots]
            yield error_row(f"{name}, {_short(dtype)} KV", found, expected, ctx.dtype, bound)


def _activation(ctx: Context, kernels: Kernels, dtype: torch.dtype) -> Tensor:
    gate_up = _numbers(ctx, 5, 2 * ctx.sizes.intermediate, dtype=dtype)
    return torch.stack([kernels.act_and_mul(gate_up, a) for a in ("silu", "gelu", "gelu_tanh")])


def _output(ctx: Context, kernels: Kernels, dtype: torch.dtype) -> Tensor:
    """The head: products of the model's dtype, float32 out."""
    weight = _numbers(ctx, 1000, ctx.sizes.hidden, dtype=dtype, seed=3)
    return kernels.make_output_linear(weight)(_numbers(ctx, 5, ctx.sizes.hidden, dtype=dtype))


def _gated(ctx: Context, kernels: Kernels, dtype: torch.dtype) -> Tensor:
    size = ctx.sizes.hidden
    weight = _numbers(ctx, 2 * 96, size, dtype=dtype, seed=3) * size**-0.5
    return kernels.make_gated_linear(weight, None)(_numbers(ctx, 5, size, dtype=dtype))


def _normed(ctx: Context, kernels: Kernels, dtype: torch.dtype) -> Tensor:
    """A gated product with the norm before it, in one launch where the kernels have that."""
    size = ctx.sizes.hidden
    weight = _numbers(ctx, 2 * 96, size, dtype=dtype, seed=3) * size**-0.5
    norm_weight = _numbers(ctx, size, dtype=dtype, seed=4)
    x, residual = (_numbers(ctx, 5, size, dtype=dtype, seed=s) for s in (1, 2))
    make = kernels.make_normed_linear
    fused = None if make is None else make(weight, None, norm_weight, 1e-5, "silu")
    if fused is not None:
        return fused(x, residual, torch.empty_like(x))
    return kernels.make_gated_linear(weight, None)(
        kernels.make_rms_norm(norm_weight, 1e-5)(x, residual)
    )


def _short_convolution(ctx: Context, kernels: Kernels, dtype: torch.dtype) -> Tensor:
    """Results and tails, of rows of one token and of three, and of none."""
    channels = ctx.sizes.hidden
    x, bias = (_numbers(ctx, n, channels, dtype=dtype, seed=n) for n in (4, 1))
    taps = _numbers(ctx, 4, channels, dtype=torch.float32, seed=2)
    tails = _numbers(ctx, 5, 3, channels, dtype=dtype, seed=3)
    rows = state_rows([1, 3])
    plan = bound_plans(ctx, kernels, rows)()
    convolved = kernels.recurrence.short_convolution(x, taps, bias[0], tails, plan, has_silu=True)
    return torch.cat([convolved, tails.flatten(0, 1)])


def _scan(ctx: Context, name: str, sizes: ScanSizes, dtype: torch.dtype) -> Iterator[Row]:
    """Rows of a token, of a few and of more than a chunk."""
    lengths = [1, 3, 130, 1] if ctx.has_gpu else [1, 3, 33]
    found, expected = scan_results(ctx, sizes, lengths, ctx.kernels_of(dtype), dtype)
    yield error_row(name, found, expected, dtype)


def _sample(ctx: Context) -> Iterator[Row]:
    """Compares sampled tokens: draws are in float64, the same everywhere."""
    num_rows = 9 if ctx.has_gpu else 1
    logits = make_logits(ctx, num_rows)
    logits[-1, : ctx.sizes.vocab // 2] = -torch.inf
    ways = [
        ("greedy", 0.0, 0, 1.0, 0.0), ("all of them", 1.0, 100, 0.9, 0.01),
        ("all tokens", 1.0, 0, 1.0, 0.0), ("top-k", 0.7, 40, 1.0, 0.0),
        ("top-p", 1.3, 0, 0.8, 0.0), ("min-p", 1.0, 0, 1.0, 0.05),
    ]  # fmt: skip
    for name, temperature, top_k, top_p, min_p in ways if ctx.has_gpu else ways[:2]:
        rows = sampling_rows(
            ctx, num_rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )
        found, is_finite = ctx.kernels.sample(logits.clone(), rows)
        expected, _ = _reference(ctx).sample(logits.clone(), rows)
        yield _mismatches(f"sample: {name}", found, expected)
        yield _mismatches(f"sample: {name}, finite", is_finite, torch.ones_like(is_finite))


def _adjust(ctx: Context) -> Iterator[Row]:
    rows = adjusted_rows(ctx, 5, num_entries=min(300, ctx.sizes.vocab // 2))
    previous = torch.arange(5, device=ctx.tensors) * 7
    ours, theirs = make_logits(ctx, 5), make_logits(ctx, 5)
    ctx.kernels.adjust_logits(ours, rows, previous)
    _reference(ctx).adjust_logits(theirs, rows, previous)
    yield error_row("adjust_logits", ours, theirs, torch.float32, 1e-6)


def _mask(ctx: Context) -> Iterator[Row]:
    masks = token_masks(ctx, 2)
    rows = torch.tensor([4, 1], device=ctx.tensors)
    ours, theirs = make_logits(ctx, 5), make_logits(ctx, 5)
    ctx.kernels.apply_token_mask(ours, rows, masks)
    _reference(ctx).apply_token_mask(theirs, rows, masks)
    yield _mismatches("apply_token_mask", ours, theirs)


def _logprobs(ctx: Context) -> Iterator[Row]:
    logits = make_logits(ctx, 5)
    ids = torch.tensor([0, 5, 17, 100, ctx.sizes.vocab - 1], device=ctx.tensors)
    expected = _reference(ctx).token_logprobs(logits, ids)
    found = ctx.kernels.token_logprobs(logits, ids)
    yield error_row("token_logprobs", found, expected, torch.float32, 1e-5)


def _inputs(ctx: Context) -> Iterator[Row]:
    ids = torch.arange(300, device=ctx.tensors) * 3
    sources = torch.where(ids % 2 == 0, -1, ids % 7)
    previous = torch.arange(7, device=ctx.tensors) + 1000
    expected = _reference(ctx).take_inputs(ids, sources, previous)
    yield _mismatches("take_inputs", ctx.kernels.take_inputs(ids, sources, previous), expected)


def _pages(ctx: Context) -> Iterator[Row]:
    updates = [[2, 5, 77], [-1, 0, 0], [0, 0, 9], [7, 63, 12], [-1, 3, 3]]
    given = torch.tensor(updates, dtype=torch.int32, device=ctx.tensors)
    ours, theirs = (torch.zeros(8, 64, dtype=torch.int32, device=ctx.tensors) for _ in range(2))
    ctx.kernels.update_pages(ours, given)
    _reference(ctx).update_pages(theirs, given)
    yield _mismatches("update_pages", ours, theirs)


def _page_copy(ctx: Context) -> Iterator[Row]:
    """Copies out of some pages and into others."""
    layers = [ctx.random(4, 24, 16, seed=layer) for layer in range(2)]
    copy = ctx.kernels.make_page_copy(layers, 4)
    source, target = (torch.tensor(ids, device=ctx.tensors) for ids in ([4, 0, 3], [1, 5, 2]))
    packed = torch.full((2, 4, 3, 4, 16), torch.nan, dtype=ctx.dtype, device=ctx.tensors)
    copy.pack(source, packed)
    copy.unpack(target, packed)
    found, expected = (
        torch.stack([layer.view(4, 6, 4, 16)[:, pages] for layer in layers])
        for pages in (target, source)
    )
    yield _mismatches("page copy, packed", packed, expected)
    yield _mismatches("page copy, unpacked", found, expected)


def _reference(ctx: Context) -> Kernels:
    return select_kernels(torch.float32, ctx.device, "reference")


def _mismatches(case: str, found: Tensor, expected: Tensor) -> Row:
    """The number of unequal elements, which must be 0."""
    count = float((found != expected).sum())
    return Row(
        case, count, "elements differ", count, "the reference", at_most(0.0), is_timed=False,
        details={"shape": list(found.shape)},
    )  # fmt: skip


def _short(dtype: torch.dtype) -> str:
    return {torch.float8_e4m3fn: "fp8"}.get(dtype, dtype_name(dtype))
