"""A prompt's attention by our kernels and by those of torch that an engine may choose instead.

Theirs are timed as the engine would use them, keys and values gathered from pages; that is what
`--prefill-attention auto` measures when a model is loaded. cuDNN makes a plan for a length that it
has not met: the host's time of such a call has a row, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from ...kernels.prefill_attention import UNIT_TOKENS
from ...kernels.prefill_choice import Prompt, PromptShape, refusal_of, torch_kernels
from .attention import error_row
from .ceilings import causal_flop
from .context import Context
from .rows import Row, attempt
from .timing import Call


def prefill(ctx: Context) -> Iterator[Row]:
    """Each length in turn."""
    for num_tokens in ctx.sizes.prompt_tokens:
        yield from attempt(f"prompt of {num_tokens}", _beside, ctx, num_tokens)


def _beside(ctx: Context, num_tokens: int) -> Iterator[Row]:
    heads, case = ctx.sizes.heads, f"prompt of {num_tokens}"
    shape = PromptShape(
        heads.query, heads.kv, heads.dim, ctx.dtype, ctx.sizes.page_size, num_tokens
    )
    prompt = Prompt.of(shape, num_tokens, ctx.tensors)
    own = prompt.call(ctx.kernels)
    expected = own()
    calls: dict[str, list[Call]] = {"ours": [own]}
    for name in torch_kernels():
        call = prompt.torch_call(name)
        refusal = refusal_of(call, expected)
        if refusal is not None:
            yield Row(f"{case}, {name}: not here", details={"why": refusal[:500]})
            continue
        yield error_row(f"{case}, {name} from ours", call(), expected, ctx.dtype)
        calls[name] = [call]
    times = ctx.timer.time(calls)
    took = times.pop("ours")
    rate = causal_flop(num_tokens, heads) / took.median_s
    yield Row(
        f"{case}, ours", rate / 1e12, "TFLOP/s", rate / ctx.ceilings.gemm_flop_s, "gemm",
        details=took.details(),
    )  # fmt: skip
    for name, timing in times.items():
        yield Row(
            f"{case}, {name}", timing.median_s * 1e6, "us", timing.median_s / took.median_s,
            "ours (less: faster than ours)", details={"ours": took.details(), **timing.details()},
        )  # fmt: skip
    if num_tokens > UNIT_TOKENS:
        for name in times:
            yield from attempt(f"{case}, {name}, another length", _first_call, ctx, shape, name)


def _first_call(ctx: Context, shape: PromptShape, name: str) -> Iterator[Row]:
    """The host's time of the first call at a length, and of the second."""
    num_tokens = shape.max_tokens - UNIT_TOKENS
    call = Prompt.of(shape, num_tokens, ctx.tensors).torch_call(name)
    first_s, second_s = _host_seconds(ctx, call), _host_seconds(ctx, call)
    yield Row(
        f"{name}, first call at {num_tokens}", first_s * 1e3, "ms", first_s / second_s,
        "the second",
    )  # fmt: skip


def _host_seconds(ctx: Context, call: Call) -> float:
    if ctx.has_gpu:
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
