"""Latent attention (MLA) over compressed KV: against what bounds it, bytes or operations.

With 128 heads a row of KV is used so often that a decode step is bound by products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ...kernels.registry import Kernels, select_kernels
from .attention import error_row
from .context import Context
from .paged_batches import Lengths, bind, make_rows
from .rows import Row, attempt
from .sizes import LatentSizes


def latent(ctx: Context) -> Iterator[Row]:
    """Decode and a prompt chunk, for each number of heads."""
    sizes = ctx.sizes
    decode: Lengths = [(1, sizes.decode_tokens)] * sizes.decode_batch
    chunk = sizes.extend_tokens // 4
    extend: Lengths = [(chunk, chunk + sizes.mixed_prefix)]
    for one in sizes.latents:
        for name, lengths in (("decode", decode), ("chunk", extend)):
            tokens = lengths[0][1]
            case = f"{one.name}, {name}, {len(lengths)} x {tokens}, {one.heads} heads"
            yield from attempt(case, _case, ctx, one, case, lengths)


def _case(ctx: Context, sizes: LatentSizes, case: str, lengths: Lengths) -> Iterator[Row]:
    call = latent_call(ctx, sizes, lengths, ctx.kernels, ctx.dtype)
    reference = select_kernels(torch.float32, ctx.device, "reference")
    expected = latent_call(ctx, sizes, lengths, reference, torch.float32)()
    yield error_row(f"{case}, error", call(), expected, ctx.dtype)
    del expected
    timing = ctx.timer.time({case: [call]})[case]
    width = sizes.latent + sizes.rope
    read = sum(tokens for _, tokens in lengths) * width * ctx.dtype.itemsize
    seen = sum(n * (tokens - n) + n * (n + 1) // 2 for n, tokens in lengths)
    flop = 2 * seen * sizes.heads * (width + sizes.latent)
    floors = {
        "copy bandwidth": read / ctx.ceilings.copy_bytes_s,
        "gemm": flop / ctx.ceilings.gemm_flop_s,
    }
    bound = max(floors, key=lambda name: floors[name])
    yield Row(
        case, timing.median_s * 1e6, "us", floors[bound] / timing.median_s, bound,
        details={**timing.details(), "kv_bytes": read, "flop": flop, "floors_s": floors},
    )  # fmt: skip


def latent_call(
    ctx: Context,
    sizes: LatentSizes,
    lengths: Lengths,
    kernels: Kernels,
    dtype: torch.dtype,
    shared: Sequence[int] = (),
) -> Callable[[], Tensor]:
    """A call, planned and on the device; the same numbers in every dtype."""
    rows, num_slots = make_rows(lengths, ctx.sizes.page_size, shared)
    num_tokens, heads = int(rows.query_start[-1]), sizes.heads
    kv = ctx.random(num_slots, sizes.latent + sizes.rope, seed=1).to(dtype)
    q_latent = ctx.random(num_tokens, heads, sizes.latent, seed=2).to(dtype)
    q_rope = ctx.random(num_tokens, heads, sizes.rope, seed=3).to(dtype)
    scale = (sizes.latent + sizes.rope) ** -0.5
    plan = bind(kernels.plan_latent_attention(rows, kv, heads, scale), rows, ctx.tensors)
    return lambda: kernels.latent_attention(q_latent, q_rope, kv, plan)
