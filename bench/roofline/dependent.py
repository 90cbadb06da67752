"""Programmatic dependent launch: the launches of decode layers, dependent and not.

Layers of random weights as in the first model's, recorded in one graph as an engine's step is;
both ways must give the same bits. Off in the engine until these rows say what it wins
(kernels/triton/dependent_launch.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...kernels.triton.dependent_launch import dependent_launches
from .context import Context
from .paged_batches import make_batch
from .rows import Row, at_least, attempt
from .small_ops import rotary

_EPS = 1e-5

Layer = Callable[[Tensor | None, Tensor], tuple[Tensor, Tensor]]
"""What the layer before adds, None for the first, and the residual stream [T, hidden] -> the same
behind this one; the residual stream may be changed."""


def dependent(ctx: Context) -> Iterator[Row]:
    """As many decoding rows as the small ops have."""
    for num_rows in ctx.sizes.small_tokens:
        yield from attempt(f"decode layers, batch {num_rows}", _chain, ctx, num_rows)


def _chain(ctx: Context, num_rows: int) -> Iterator[Row]:
    layers = [_layer(ctx, num_rows, seed) for seed in range(ctx.sizes.chain_layers)]
    start = ctx.random(num_rows, ctx.sizes.hidden, seed=99)
    results = {name: torch.zeros_like(start) for name in ("plain", "dependent")}

    def run(name: str) -> None:
        x: Tensor | None = None
        residual = start.clone()
        for layer in layers:
            x, residual = layer(x, residual)
        assert x is not None
        torch.add(x, residual, out=results[name])

    def run_dependent() -> None:
        with dependent_launches():
            run("dependent")

    times = ctx.timer.time({"plain": [lambda: run("plain")], "dependent": [run_dependent]})
    plain, other = times["plain"], times["dependent"]
    case = f"{len(layers)} decode layers, batch {num_rows}"
    is_same = torch.equal(results["plain"], results["dependent"])
    yield Row(
        f"{case}, dependent, the same bits", float(is_same), "", float(is_same), "plain launches",
        at_least(1.0), is_timed=False,
    )  # fmt: skip
    yield Row(
        f"{case}, dependent", other.median_s * 1e6 / len(layers), "us a layer",
        other.median_s / plain.median_s, "plain launches (less: faster)",
        details={"plain": plain.details(), **other.details()},
    )  # fmt: skip


def _layer(ctx: Context, num_rows: int, seed: int) -> Layer:
    """Attention and a gated feed-forward block, by the kernels that a decoder would use."""
    sizes, kernels = ctx.sizes, ctx.kernels
    heads, hidden, size = sizes.heads, sizes.hidden, sizes.intermediate
    batch = make_batch(
        ctx, [(1, sizes.step_prompt)] * num_rows, page_size=sizes.page_size, heads=heads
    )
    plan = batch.bound(kernels)
    last = [
        batch.rows.slots(row, sizes.step_prompt - 1, sizes.step_prompt) for row in range(num_rows)
    ]
    slots = torch.tensor([int(one[0]) for one in last], device=ctx.tensors)
    cos, sin = rotary(ctx.random(2, num_rows, 1, heads.dim // 2))

    def weight(rows: int, width: int, number: int) -> Tensor:
        numbers = ctx.random(rows, width, seed=8 * seed + number)
        return numbers.mul_(1 / math.sqrt(width))

    norms = [ctx.random(hidden, seed=8 * seed + number) for number in (0, 1)]
    projection = weight((heads.query + 2 * heads.kv) * heads.dim, hidden, 2)
    gate_up = weight(2 * size, hidden, 3)
    output = kernels.make_linear(weight(hidden, heads.query * heads.dim, 4), None)
    down = kernels.make_linear(weight(hidden, size, 5), None)

    def attend(projected: Tensor) -> Tensor:
        by_head = projected.view(num_rows, -1, heads.dim)
        kernels.rotate_and_store(by_head, cos, sin, batch.kv_layer, slots)
        attended = kernels.paged_attention(by_head[:, : heads.query], batch.kv_layer, plan)
        return output(attended.reshape(num_rows, -1))

    make = kernels.make_normed_linear
    fused = make and make(projection, None, norms[0], _EPS)
    fused_up = make and make(gate_up, None, norms[1], _EPS, "silu")
    if fused and fused_up and num_rows <= fused.max_tokens:
        project, feed = fused, fused_up

        def few(x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
            total, behind = torch.empty_like(residual), torch.empty_like(residual)
            x = attend(project(x, residual, total))
            return down(feed(x, total, behind)), behind

        return few
    before, after = (kernels.make_rms_norm(norm, _EPS) for norm in norms)
    linear = kernels.make_linear(projection, None)
    gated = kernels.make_gated_linear(gate_up, None)

    def many(x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        normed = before(residual) if x is None else before(x, residual)
        x = attend(linear(normed))
        return down(gated(after(x, residual))), residual

    return many
