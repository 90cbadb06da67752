"""Adapters beside a linear layer: every backend against the product with each token's own matrix.

The Triton kernels run in the interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import pytest
import torch

from stemma.kernels.cpu import lora as cpu
from stemma.kernels.native import lora as native
from stemma.kernels.native.bindings import why_not_native
from stemma.kernels.ops import Activation, DevicePlan, Weight
from stemma.kernels.quantized_tensors import QuantizedWeight
from stemma.kernels.reference import lora as reference
from stemma.kernels.registry import select_kernels
from stemma.kernels.triton import lora as triton_lora
from stemma.runtime.checkpoint.quantized.rounding import round_to_4_bits, round_to_8_bits

BACKENDS = [reference, cpu, triton_lora]
NUM_SLOTS, RANK = 3, 5
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 0.15}


def _tables(
    out_features: Sequence[int], in_features: int, dtype: torch.dtype, rank: int = RANK
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(out_features))
    a = torch.randn(NUM_SLOTS, len(out_features) * rank, in_features, generator=generator)
    b = torch.randn(NUM_SLOTS, sum(out_features), rank, generator=generator)
    return (a / in_features**0.5).to(dtype), b.to(dtype)


def _run(
    backend: ModuleType,
    slots: Sequence[int],
    out_features: Sequence[int],
    in_features: int,
    dtype: torch.dtype,
    padded_tokens: int | None = None,
    rank: int = RANK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a backend makes of random inputs, and the truth in float64; padding's rows last."""
    a, b = _tables(out_features, in_features, dtype, rank)
    num_rows = padded_tokens or len(slots)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(num_rows, in_features, generator=generator).to(dtype)
    y = torch.randn(num_rows, sum(out_features), generator=generator).to(dtype)
    expected = y.double()
    for token, slot in enumerate(slots):
        first = 0
        for part, size in enumerate(out_features):
            if slot:
                own = a[slot - 1, part * rank : (part + 1) * rank].double()
                columns = slice(first, first + size)
                delta = b[slot - 1, columns].double() @ (own @ x[token].double())
                expected[token, columns] += delta
            first += size
    plan = backend.plan_lora(np.array(slots, dtype=np.int32), NUM_SLOTS, padded_tokens)
    if isinstance(plan, DevicePlan):
        arrays = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
        plan = plan.bind(arrays, torch.empty(0))
    backend.make_lora(a, b, out_features)(x, y, plan)
    return y, expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("slots", "out_features", "in_features"),
    [
        ([1], (40,), 48),
        ([0], (40,), 48),
        ([2, 2, 0, 1, 3, 1], (24, 8, 8), 33),  # stacked, adapters not side by side
        ([0, 3, 3, 3], (130, 130), 1100),  # more columns than a tile, inputs split
        ([1] * 20 + [2] * 3 + [0], (16,), 16),  # more than one block an adapter
        ([3, 1] * 40, (16,), 16),  # a prompt's blocks
    ],
)
def test_each_token_gets_its_own_adapter(
    backend: ModuleType,
    slots: list[int],
    out_features: tuple[int, ...],
    in_features: int,
    dtype: torch.dtype,
) -> None:
    found, expected = _run(backend, slots, out_features, in_features, dtype)
    error = (found.double() - expected).abs().max().item()
    assert error <= TOLERANCE[dtype] * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("rank", [2, 5, 16, 34])
@pytest.mark.parametrize(
    ("slots", "out_features", "in_features"),
    [
        ([1], (40,), 64),
        ([2, 2, 0, 1, 3, 1], (24, 8, 9), 33),
        ([0, 3, 1] * 4, (300, 130, 256, 3), 100),  # more than a chunk of outputs
        ([1] * 7 + [2] * 3 + [0], (16, 33), 70),  # blocks of one to four tokens
        ([1] * 65 + [2] * 3 + [0], (16,), 16),  # more tokens than one call takes
        ([0], (16,), 16),
    ],
)
def test_the_compiled_kernel_in_bfloat16(
    slots: list[int],
    out_features: tuple[int, ...],
    in_features: int,
    rank: int,
) -> None:
    if reason := why_not_native(torch.bfloat16):
        pytest.skip(reason)
    inputs = (slots, out_features, in_features, torch.bfloat16)
    found, expected = _run(native, *inputs, rank=rank)
    error = (found.double() - expected).abs().max().item()
    assert error <= 0.02 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("backend", [reference, cpu])
def test_other_dtypes_on_a_cpu(backend: ModuleType, dtype: torch.dtype) -> None:
    found, expected = _run(backend, [1, 1, 0, 2], (24, 8), 32, dtype)
    assert (found.double() - expected).abs().max().item() <= TOLERANCE[dtype]


def test_rows_of_padding_and_without_an_adapter_stay_bit_by_bit() -> None:
    found, expected = _run(triton_lora, [0, 2, 0], (24,), 32, torch.float32, padded_tokens=8)
    assert torch.equal(found[[0, 2, 3, 4, 5, 6, 7]].double(), expected[[0, 2, 3, 4, 5, 6, 7]])


@pytest.mark.parametrize("padded_tokens", [8, 64, 65, 512])
def test_the_shapes_of_a_plan_depend_on_the_padded_size_alone(padded_tokens: int) -> None:
    mixes = [[0] * 8, [1] * 8, [1, 2, 3, 1, 2, 3, 0, 0], [3]]
    plans = [triton_lora.plan_lora(np.array(m, np.int32), NUM_SLOTS, padded_tokens) for m in mixes]
    shapes = {tuple((n, x.shape, x.dtype) for n, x in plan.arrays.items()) for plan in plans}
    assert len(shapes) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slot_that_nobody_uses_is_not_read(backend: ModuleType) -> None:
    a, b = _tables((16,), 16, torch.float32)
    a[1], b[1] = torch.nan, torch.nan
    x, y = torch.ones(2, 16), torch.zeros(2, 16)
    plan = backend.plan_lora(np.array([1, 3], np.int32), NUM_SLOTS)
    if isinstance(plan, DevicePlan):
        arrays = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
        plan = plan.bind(arrays, torch.empty(0))
    backend.make_lora(a, b, (16,))(x, y, plan)
    assert y.isfinite().all()


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("size", [16, 33, 80])
def test_a_gated_layer_in_bfloat16_adds_adapters_ahead_of_its_activation(
    size: int, activation: Activation, bits: int | None
) -> None:
    """A token without one gets the same bits as where no token has one."""
    if reason := why_not_native(torch.bfloat16):
        pytest.skip(reason)
    torch.manual_seed(size)
    num_inputs, slots = 64, np.array([0, 2, 1, 0, 2], dtype=np.int32)
    dense = torch.randn(2 * size, num_inputs) / 8
    weight: Weight = dense.bfloat16()
    if bits is not None:
        weight = round_to_8_bits(dense) if bits == 8 else round_to_4_bits(dense, 32)
    bias = torch.randn(2 * size).bfloat16()
    kernels, truth = select_kernels(torch.bfloat16), select_kernels(torch.float32, mode="reference")
    a, b = _tables((size, size), num_inputs, torch.bfloat16, rank=4)
    x = torch.randn(len(slots), num_inputs).bfloat16()
    lora = kernels.make_lora(a, b, (size, size))
    gated = kernels.make_gated_linear_with_lora(weight, bias, activation, lora)
    plain = gated(x, None)
    assert torch.equal(plain, kernels.make_gated_linear(weight, bias, activation)(x))
    found = gated(x, kernels.plan_lora(slots, NUM_SLOTS))
    assert torch.equal(found[slots == 0], plain[slots == 0])
    wide = truth.make_lora(a.float(), b.float(), (size, size))
    exact = truth.make_gated_linear_with_lora(
        weight if isinstance(weight, QuantizedWeight) else weight.float(),
        bias.float(), activation, wide,
    )  # fmt: skip
    expected = exact(x.float(), truth.plan_lora(slots, NUM_SLOTS))
    assert (found - expected).abs().max() <= 0.02 * expected.abs().max()
    assert (found - plain)[slots > 0].abs().max() > 0.2 * expected.abs().max()
