"""In bfloat16 every kernel's error against float64 is of the size of the reference kernels' own, so
that which of a backend's paths computes a row matters no more than rounding does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attention_trees import Branch, random_kv, row, rows_of

from stemma.kernels.attention_rows import AttentionRows
from stemma.kernels.registry import KernelMode, Kernels, select_kernels

# Scores of about 20, where bfloat16 counts in steps of 1/8.
SHARPNESS = 5.0
# The compiled kernels round probabilities, before they are normalized, for their product.
SLACK: dict[KernelMode, float] = {"cpu": 1.02, "auto": 1.2}
STEPS = {
    "one short row": [row(1, 200)],  # which torch's own attention computes
    "decode": [row(1, 700), row(1, 640), row(1, 300)],
    "prompts": [row(40, 500), row(130, 300)],
    "shared": [Branch(400, (row(1, 30), row(3, 90), row(1, 5)))],
}


@pytest.mark.parametrize("mode", SLACK)
@pytest.mark.parametrize("step", STEPS)
def test_attention_errs_as_the_reference_does(mode: KernelMode, step: str) -> None:
    rows = rows_of(STEPS[step], 1)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(int(rows.query_start[-1]), 6, 64, generator=generator) * SHARPNESS
    q, kv_layer = q.bfloat16(), random_kv(rows, 2, 64).bfloat16()
    _check(mode, lambda kernels, dtype: _attend(kernels, q.to(dtype), kv_layer.to(dtype), rows))


@pytest.mark.parametrize("mode", SLACK)
def test_latent_attention_errs_as_the_reference_does(mode: KernelMode) -> None:
    rows = rows_of([row(1, 700), row(30, 300)], 1)
    generator = torch.Generator().manual_seed(3)
    num_tokens, num_slots = int(rows.query_start[-1]), int(rows.page_table.max()) + 1
    latents, ropes = (
        (torch.randn(num_tokens, 4, size, generator=generator) * SHARPNESS).bfloat16()
        for size in (48, 16)
    )
    kv_layer = torch.randn(num_slots, 64, generator=generator).bfloat16()

    def attend(kernels: Kernels, dtype: torch.dtype) -> torch.Tensor:
        plan = kernels.plan_latent_attention(rows, kv_layer.to(dtype), 4, 0.125)
        return kernels.latent_attention(
            latents.to(dtype), ropes.to(dtype), kv_layer.to(dtype), plan
        )

    _check(mode, attend)


@pytest.mark.parametrize("mode", SLACK)
def test_rotation_errs_as_the_reference_does(mode: KernelMode) -> None:
    generator = torch.Generator().manual_seed(3)
    heads = torch.randn(100, 4, 64, generator=generator).bfloat16()
    angle = torch.rand(100, 1, 32, generator=generator) * 6
    cos = torch.cat((angle.cos(), angle.cos()), -1).bfloat16()
    sin = torch.cat((-angle.sin(), angle.sin()), -1).bfloat16()

    def rotate(kernels: Kernels, dtype: torch.dtype) -> torch.Tensor:
        rotated, kv_layer = heads.to(dtype, copy=True), torch.zeros(2, 1, 100, 64, dtype=dtype)
        slots = torch.arange(100)
        kernels.rotate_and_store(rotated, cos.to(dtype), sin.to(dtype), kv_layer, slots)
        return torch.cat((rotated[:, :2], kv_layer[0].transpose(0, 1)), 1)

    _check(mode, rotate)


def _check(mode: KernelMode, run: Callable[[Kernels, torch.dtype], torch.Tensor]) -> None:
    dtype = torch.bfloat16
    exact = run(select_kernels(torch.float64, mode="reference"), torch.float64)
    theirs, mine = (
        (run(select_kernels(dtype, mode=kind), dtype).double() - exact).square().mean().sqrt()
        for kind in ("reference", mode)
    )
    assert mine <= SLACK[mode] * theirs


def _attend(
    kernels: Kernels, q: torch.Tensor, kv_layer: torch.Tensor, rows: AttentionRows
) -> torch.Tensor:
    return kernels.paged_attention(q, kv_layer, kernels.plan_attention(rows, kv_layer, q.shape[1]))
