"""Attention beside other kernels, in one run and on the same KV: torch's flash attention and
cuDNN's, FlashInfer's and vLLM's where they are importable.

What is missing, or refuses these shapes, has a row that says so and no time. Calls of FlashInfer
and vLLM follow their documentation; they have not run here yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .attention import bound_call, error_row
from .context import Context
from .paged_batches import PagedBatch, make_batch
from .rows import Row, attempt
from .timing import Call

_PAGE_SIZE = 16
_WORKSPACE_BYTES = 256 << 20
_TORCH = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cuDNN": SDPBackend.CUDNN_ATTENTION}
_MODULES = {"FlashInfer": "flashinfer", "vLLM": "vllm.vllm_flash_attn"}


def peers(ctx: Context) -> Iterator[Row]:
    """A long prompt, and decoding."""
    sizes = ctx.sizes
    for case, lengths in (
        (f"prompt of {sizes.extend_tokens}", [(sizes.extend_tokens, sizes.extend_tokens)]),
        (f"{sizes.decode_batch} x {sizes.decode_tokens}",
         [(1, sizes.decode_tokens)] * sizes.decode_batch),
    ):  # fmt: skip
        yield from attempt(case, _beside, ctx, case, lengths)


def _beside(ctx: Context, case: str, lengths: list[tuple[int, int]]) -> Iterator[Row]:
    batch = make_batch(ctx, lengths, page_size=_PAGE_SIZE, heads=ctx.sizes.heads)
    ours = bound_call(ctx, batch)
    expected = ours()
    calls: dict[str, list[Call]] = {"ours": [ours]}
    for name, make in _makers(batch).items():
        yield from attempt(
            f"{case}, {name}", _prepared, f"{case}, {name}", make, expected, ctx, calls, name
        )
    times = ctx.timer.time(calls)
    took = times.pop("ours")
    for name, timing in times.items():
        yield Row(
            f"{case}, {name}", timing.median_s * 1e6, "us", timing.median_s / took.median_s,
            "ours (more: slower than ours)", details={"ours": took.details(), **timing.details()},
        )  # fmt: skip


def _prepared(
    case: str,
    make: Callable[[], Call],
    expected: Tensor,
    ctx: Context,
    calls: dict[str, list[Call]],
    name: str,
) -> Iterator[Row]:
    """A row that says why there is no time; else the row of the difference from ours, and a call to
    time."""
    try:
        call = make()
        found = call()
    except (ImportError, RuntimeError, TypeError, AttributeError, ValueError) as refusal:
        yield Row(f"{case}: not here", details={"why": str(refusal)[:500]})
        return
    assert isinstance(found, Tensor)
    yield error_row(f"{case}, from ours", found.reshape(expected.shape), expected, ctx.dtype)
    calls[name] = [call]


def _makers(batch: PagedBatch) -> dict[str, Callable[[], Call]]:
    is_decode = int(batch.rows.seq_lens.max()) != len(batch.q)
    found: dict[str, Callable[[], Call]] = {
        name: partial(_torch, batch, backend) for name, backend in _TORCH.items()
    }
    flashinfer = _flashinfer_decode if is_decode else _flashinfer_prompt
    found["FlashInfer"] = partial(flashinfer, batch, _MODULES["FlashInfer"])
    found["vLLM"] = partial(_vllm, batch, _MODULES["vLLM"])
    return found


def _torch(batch: PagedBatch, backend: SDPBackend) -> Call:
    """Over KV that is gathered before: what dense kernels reach without pages."""
    k, v = _dense(batch)
    num_rows = len(k)
    q = batch.q.view(num_rows, -1, *batch.q.shape[1:]).transpose(1, 2).contiguous()
    is_causal = q.shape[2] > 1

    def call() -> Tensor:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        return out.transpose(1, 2)

    return call


def _flashinfer_prompt(batch: PagedBatch, module: str) -> Call:
    flashinfer: Any = import_module(module)
    k, v = (x[0].transpose(0, 1).contiguous() for x in _dense(batch))
    return lambda: flashinfer.single_prefill_with_kv_cache(batch.q, k, v, causal=True)


def _flashinfer_decode(batch: PagedBatch, module: str) -> Call:
    flashinfer: Any = import_module(module)
    pages, heads, device = _pages(batch), batch.heads, batch.q.device
    rows = batch.rows
    counts = -(-torch.from_numpy(rows.seq_lens) // _PAGE_SIZE)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int().to(device)
    table = torch.from_numpy(rows.page_table)
    ids = torch.cat([table[row, :count] for row, count in enumerate(counts.tolist())])
    last = ((torch.from_numpy(rows.seq_lens) - 1) % _PAGE_SIZE + 1).int().to(device)
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        starts, ids.int().to(device), last, heads.query, heads.kv, heads.dim, _PAGE_SIZE,
        q_data_type=batch.q.dtype, kv_data_type=batch.q.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(batch.q, pages)


def _vllm(batch: PagedBatch, module: str) -> Call:
    attention: Any = import_module(module).flash_attn_varlen_func
    rows, device = batch.rows, batch.q.device
    k, v = _pages(batch)
    starts = torch.from_numpy(rows.query_start).int().to(device)
    lengths = torch.from_numpy(rows.seq_lens).int().to(device)
    table = torch.from_numpy(rows.page_table).int().to(device)
    most_queries = int((rows.query_start[1:] - rows.query_start[:-1]).max())
    return lambda: attention(
        batch.q, k, v, max_seqlen_q=most_queries, cu_seqlens_q=starts,
        max_seqlen_k=int(rows.seq_lens.max()), seqused_k=lengths, block_table=table, causal=True,
    )  # fmt: skip


def _dense(batch: PagedBatch) -> tuple[Tensor, Tensor]:
    """Keys and values [rows, heads.kv, length, heads.dim] of rows of one length."""
    assert isinstance(batch.kv_layer, Tensor)
    length = int(batch.rows.seq_lens[0])
    rows = [
        batch.kv_layer.index_select(2, torch.from_numpy(slots).to(batch.q.device))
        for slots in (batch.rows.slots(row, 0, length) for row in range(batch.rows.num_rows))
    ]
    k, v = torch.stack(rows, 1)
    return k, v


def _pages(batch: PagedBatch) -> tuple[Tensor, Tensor]:
    """Keys and values as pages [pages, page size, heads.kv, heads.dim]."""
    assert isinstance(batch.kv_layer, Tensor)
    paged = batch.kv_layer.view(2, batch.heads.kv, -1, _PAGE_SIZE, batch.heads.dim)
    k, v = paged.permute(0, 2, 3, 1, 4).contiguous()
    return k, v
