"""What a first run on a GPU risks, each on its own, within a minute: what fails costs its row.

The first row says whether a few kernels are right at all. The others are what neither Triton's
interpreter nor compiling without a GPU can show: products with results in float32, pinned memory, a
capture that fails on the way, kernels that compile in the middle of serving.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from ...runtime.execute.accelerator import CudaAccelerator
from ...runtime.memory.host_pool import pin
from .attention import error_row
from .checks import first_checks
from .context import Context
from .rows import Row, at_least, at_most, attempt

_PINNED_BYTES = 256 << 20


def risks(ctx: Context) -> Iterator[Row]:
    """The verdict on kernels first."""
    yield from attempt("kernels", _kernels, ctx)
    yield from attempt("float32 of a product", _wide_product, ctx)
    yield from attempt("an odd step of experts", _odd_step, ctx)
    if ctx.has_gpu:
        yield from attempt("pinned memory", _pinned, ctx)
        yield from attempt("a capture that fails", _failed_capture, ctx)


def _kernels(ctx: Context) -> Iterator[Row]:
    """How many are right; those that are not have rows of their own behind it."""
    rows = list(first_checks(ctx))
    wrong = [row for row in rows if row.verdict(not ctx.has_gpu) != "met"]
    right = len(rows) - len(wrong)
    yield Row(
        f"{right} of {len(rows)} first results are right", right, "results", right / len(rows),
        "the reference in float32", at_least(1.0), is_timed=False,
    )  # fmt: skip
    yield from wrong


def _wide_product(ctx: Context) -> Iterator[Row]:
    x = ctx.random(64, ctx.sizes.hidden)
    weight = ctx.random(ctx.sizes.vocab, ctx.sizes.hidden, seed=1)
    place = torch.empty(64, ctx.sizes.vocab, dtype=torch.float32, device=ctx.tensors)
    found = ctx.kernels.make_output_linear(weight)(x, place)  # as graphs do
    assert found.data_ptr() == place.data_ptr(), "graphs read it there"
    yield error_row(
        f"logits in {str(found.dtype).removeprefix('torch.')}, error", found,
        x.float() @ weight.float().T, ctx.dtype,
    )  # fmt: skip


def _odd_step(ctx: Context) -> Iterator[Row]:
    """A step of a number of tokens that none had before, after the engine's kind of warm-up."""
    sizes = ctx.sizes.experts[-1]
    up = ctx.random(sizes.experts, 2 * sizes.intermediate, sizes.hidden) * sizes.hidden**-0.5
    down = ctx.random(sizes.experts, sizes.hidden, sizes.intermediate) * sizes.intermediate**-0.5
    layer = ctx.kernels.make_experts(up, down, "silu")

    def seconds(num_tokens: int) -> float:
        x = ctx.random(num_tokens, sizes.hidden)
        scores = ctx.random(num_tokens, sizes.experts, dtype=torch.float32)
        weights, chosen = scores.softmax(-1).topk(sizes.chosen)
        return _host_seconds(ctx, lambda: layer(x, chosen, weights))

    warm = (2048, 1024, 512) if ctx.has_gpu else (4, 2)
    for num_tokens in warm:
        seconds(num_tokens)
    even, odd = seconds(warm[1]), seconds(warm[1] - 1)
    yield Row(
        f"experts: {warm[1] - 1} tokens after {warm[1]}", odd * 1e3, "ms", odd / even,
        "the even step", at_most(5.0),
    )  # fmt: skip


def _pinned(ctx: Context) -> Iterator[Row]:
    """The tiers' way of pinning."""
    memory = torch.zeros(_PINNED_BYTES, dtype=torch.uint8)
    unpin = pin(memory)
    there = torch.empty_like(memory, device=ctx.tensors)
    for _ in range(2):
        took_s = _host_seconds(ctx, lambda: there.copy_(memory, non_blocking=True))
    unpin()
    yield Row("copy from pinned memory", memory.nbytes / took_s / 1e9, "GB/s")


def _failed_capture(ctx: Context) -> Iterator[Row]:
    """It must leave the device usable and the next capture whole."""
    accelerator = CudaAccelerator(ctx.tensors)
    x = torch.ones(1 << 20, device=ctx.tensors)
    torch.cuda.synchronize()

    def waits() -> None:  # which no capture allows
        (x * 2).sum().item()

    def counts() -> None:
        x.add_(1)

    with accelerator.queue():
        accelerator.capture(waits)()
        reserved = torch.cuda.memory_reserved()
        for _ in range(4):
            torch.empty(256 << 20, dtype=torch.uint8, device=ctx.tensors)
        accelerator.capture(counts)()
    torch.cuda.synchronize()
    grown = torch.cuda.memory_reserved() - reserved
    yield Row(
        "counts behind it", float(x[0]), "", float(x[0] == 3), "3: one run, one replay",
        at_least(1.0), is_timed=False, details={"reserved_bytes_grown": grown},
    )  # fmt: skip
    yield Row(
        "memory taken behind it", grown / 2**20, "MiB", grown / (256 << 20), "one tensor's",
        at_most(1.1), is_timed=False,
    )  # fmt: skip


def _host_seconds(ctx: Context, call: Callable[[], object]) -> float:
    if ctx.has_gpu:
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if ctx.has_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - started
