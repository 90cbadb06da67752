"""Linear layers of quantized weights: every backend against the definition in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from stemma.kernels.cpu import quantized_linear as cpu_quantized
from stemma.kernels.native import quantized_linear as native_quantized
from stemma.kernels.native.bindings import why_not_native
from stemma.kernels.ops import Activation
from stemma.kernels.quantized_tensors import QuantizedWeight
from stemma.kernels.reference import dense as reference
from stemma.kernels.reference.quantized import dequantize, round_rows
from stemma.kernels.registry import KernelMode, Kernels, select_kernels

# Name -> bits, group size (None: the whole row), has offsets, activations.
FORMATS: dict[str, tuple[Literal[8, 4], int | None, bool, Literal["exact", "int8"]]] = {
    "int8": (8, None, False, "exact"),
    "int8 with offsets": (8, None, True, "exact"),
    "int8 by 16 (Q6_K)": (8, 16, False, "exact"),
    "int8 by 32 (Q8_0)": (8, 32, False, "exact"),
    "int8 by 32 with offsets (Q5_K)": (8, 32, True, "exact"),
    "int8 by 128": (8, 128, True, "exact"),
    "w8a8": (8, None, False, "int8"),
    "w8a8 with offsets": (8, None, True, "int8"),
    "w8a8 by 32": (8, 32, True, "int8"),
    "w8a8 by 128": (8, 128, False, "int8"),
    "int4": (4, None, False, "exact"),
    "int4 by 32 (Q4_0)": (4, 32, False, "exact"),
    "int4 by 32 with offsets (Q4_K)": (4, 32, True, "exact"),
    "int4 by 64": (4, 64, False, "exact"),
    "int4 by 128 (AWQ, GPTQ)": (4, 128, True, "exact"),
    "int4 by 256": (4, 256, True, "exact"),
    "int4, activations may be rounded": (4, 128, True, "int8"),
    "fp4 by 32 (MXFP4)": (4, 32, False, "exact"),
    "fp4 by 64 with offsets": (4, 64, True, "exact"),
}
BACKENDS: list[tuple[KernelMode, torch.dtype]] = [
    ("auto", torch.bfloat16),
    ("cpu", torch.bfloat16),
    ("cpu", torch.float32),
    ("reference", torch.bfloat16),
    ("reference", torch.float32),
    ("reference", torch.float64),
]
# Of the largest result: rounding it, and with "cpu" the weights or their scales, to bfloat16.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.006}


def make_weight(name: str, num_outputs: int, num_inputs: int, seed: int = 0) -> QuantizedWeight:
    bits, group_size, has_offsets, activations = FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    group_size = group_size or num_inputs
    shape = (num_outputs, num_inputs // group_size)
    if bits == 8:
        values = torch.randint(-128, 128, (num_outputs, num_inputs), generator=generator)
    else:
        values = torch.randint(0, 256, (num_outputs, num_inputs // 2), generator=generator)
    scales = torch.rand(shape, generator=generator) * 2e-3 + 1e-4
    offsets = torch.randn(shape, generator=generator) * 0.01 if has_offsets else None
    dtype = torch.int8 if bits == 8 else torch.uint8
    weight = QuantizedWeight(bits, group_size, values.to(dtype), scales, offsets, activations)
    return replace(weight, codes="fp4") if name.startswith("fp4") else weight


def make_inputs(num_rows: int, num_inputs: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, num_inputs, generator=generator, dtype=torch.float64).to(dtype)


def exact(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """In float64, but that rounding of x follows its own precision."""
    if weight.activations == "int8" and weight.bits == 8:
        wide = x.double() if x.dtype is torch.float64 else x.float()
        numbers, scales = round_rows(wide)
        x = numbers.double() * scales.double()
    product = x.double() @ dequantize(weight, torch.float64).T
    return product if bias is None else product + bias.double()


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (found.double() - expected.double()).abs().max().item()
    assert error <= tolerance * expected.abs().max().item()


@pytest.fixture(params=BACKENDS, ids=lambda p: f"{p[0]} {str(p[1]).removeprefix('torch.')}")
def backend(request: pytest.FixtureRequest) -> tuple[Kernels, torch.dtype]:
    mode, dtype = request.param
    return select_kernels(dtype, "cpu", mode), dtype


def test_four_bit_numbers_lie_low_half_first_and_plus_eight() -> None:
    values = torch.tensor([[0x80, 0xF7]], dtype=torch.uint8)
    weight = QuantizedWeight(4, 2, values, torch.tensor([[1.0, 10.0]]), torch.tensor([[0.5, 0.0]]))
    expected = torch.tensor([[-7.5, 0.5, -10.0, 70.0]])
    assert torch.equal(dequantize(weight, torch.float32), expected)


def test_codes_of_four_bits_are_small_floats_by_their_definition() -> None:
    """A sign, 2 bits of exponent with a bias of 1, a bit of mantissa; doubled."""
    values = torch.arange(0, 16, 2, dtype=torch.uint8) | torch.arange(1, 16, 2).byte() << 4
    weight = QuantizedWeight(4, 16, values[None], torch.full((1, 1), 0.5), None, codes="fp4")
    expected = []
    for code in range(16):
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
        expected.append(-size if sign else size)
    assert dequantize(weight, torch.float32).tolist() == [expected]


def test_rows_are_rounded_half_to_even_and_what_is_not_finite_is_nan() -> None:
    rows = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0, 0, 0, 0], [1, torch.inf, 0, 0]])
    numbers, scales = round_rows(rows)
    assert numbers[0].tolist() == [127, 0, 2, -2] and scales[0] == 1
    assert numbers[1].tolist() == [0, 0, 0, 0] and scales[1].isfinite()
    assert numbers[2].isnan().all() and scales[2].isnan()


@pytest.mark.parametrize("num_rows", [0, 1, 3, 11, 70])
@pytest.mark.parametrize("name", FORMATS)
def test_linear_is_the_product_with_the_dequantized_weight(
    backend: tuple[Kernels, torch.dtype], name: str, num_rows: int
) -> None:
    kernels, dtype = backend
    weight = make_weight(name, 80, 256)
    bias = torch.linspace(-1, 1, 80).to(dtype)
    x = make_inputs(num_rows, 256, dtype)
    found = kernels.make_linear(weight, bias)(x)
    assert found.dtype is dtype and found.shape == (num_rows, 80)
    if num_rows:
        assert_close(found, exact(x, weight, bias), TOLERANCE[dtype])


@pytest.mark.parametrize("num_rows", [1, 11])
@pytest.mark.parametrize(
    "name",
    ["int8 by 16 (Q6_K)", "int8 by 128", "w8a8 by 32", "int4 by 64", "int4 by 128 (AWQ, GPTQ)"],
)
def test_inputs_may_be_in_another_order(
    backend: tuple[Kernels, torch.dtype], name: str, num_rows: int
) -> None:
    kernels, dtype = backend
    plain, x = make_weight(name, 80, 256), make_inputs(num_rows, 256, dtype)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3))
    weight = replace(plain, input_order=order.to(torch.int32))
    moved = x[:, order]
    assert torch.equal(dequantize(weight, dtype)[:, order], dequantize(plain, dtype))
    bias = torch.linspace(-1, 1, 80).to(dtype)
    for found, expected in (
        (kernels.make_linear(weight, bias)(x), kernels.make_linear(plain, bias)(moved)),
        (kernels.make_output_linear(weight)(x), kernels.make_output_linear(plain)(moved)),
        (
            kernels.make_gated_linear(weight, bias, "gelu")(x),
            kernels.make_gated_linear(plain, bias, "gelu")(moved),
        ),
    ):
        if kernels.make_linear is reference.make_linear:  # sums in the order of the inputs
            assert_close(found, expected, TOLERANCE[dtype])
        else:
            assert torch.equal(found, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_output_linear_is_wide(backend: tuple[Kernels, torch.dtype], name: str) -> None:
    kernels, dtype = backend
    weight, x = make_weight(name, 101, 256), make_inputs(5, 256, dtype)
    found = kernels.make_output_linear(weight)(x)
    assert found.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert_close(found, exact(x, weight), TOLERANCE[dtype])


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("name", ["int8", "w8a8 by 32", "int4 by 128 (AWQ, GPTQ)"])
def test_gated_linear_activates_gates_and_multiplies_ups(
    backend: tuple[Kernels, torch.dtype], name: str, activation: Activation
) -> None:
    kernels, dtype = backend
    weight, x = make_weight(name, 2 * 40, 256), make_inputs(3, 256, dtype)
    bias = torch.linspace(-1, 1, 80).to(dtype)
    found = kernels.make_gated_linear(weight, bias, activation)(x)
    expected = reference.act_and_mul(exact(x, weight, bias), activation)
    assert_close(found, expected, 3 * TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["int8 by 32 with offsets (Q5_K)", "w8a8", "int4 by 64"])
def test_experts_take_quantized_weights(backend: tuple[Kernels, torch.dtype], name: str) -> None:
    kernels, dtype = backend
    num_experts, size, hidden = 3, 64, 128
    stacks = []
    for shape in ((2 * size, hidden), (hidden, size)):
        each = [make_weight(name, *shape, seed) for seed in range(num_experts)]
        offsets = [weight.offsets for weight in each if weight.offsets is not None]
        stacks.append(
            replace(
                each[0],
                values=torch.stack([weight.values for weight in each]),
                scales=torch.stack([weight.scales for weight in each]),
                offsets=torch.stack(offsets) if offsets else None,
            )
        )
    ids = torch.tensor([[0, 2], [2, 1], [2, 0], [1, 2]])
    x, weights = make_inputs(4, hidden, dtype), torch.rand(4, 2, dtype=torch.float64)
    found = kernels.make_experts(*stacks, "silu")(x, ids, weights)
    truth = select_kernels(torch.float64, mode="reference").make_experts(*stacks, "silu")
    tolerance = 0.02 if stacks[0].activations == "exact" else 0.05  # what is rounded flips
    assert_close(found, truth(x.double(), ids, weights), max(tolerance, TOLERANCE[dtype]))


def test_torch_ops_that_are_missing_or_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_quantized, "_works", lambda op: False)
    for name in ("int8", "w8a8", "int4 by 128 (AWQ, GPTQ)"):
        weight, x = make_weight(name, 80, 256), make_inputs(4, 256, torch.bfloat16)
        linear = cpu_quantized.make_linear(weight, None, torch.bfloat16)
        assert isinstance(linear, cpu_quantized._Blockwise)
        assert_close(linear(x), exact(x, weight), TOLERANCE[torch.bfloat16])


needs_native = pytest.mark.skipif(
    why_not_native(torch.bfloat16) is not None, reason="nothing is compiled on this machine"
)


@needs_native
@pytest.mark.parametrize("num_inputs", [16, 48, 144, 2080])
@pytest.mark.parametrize("bits", [4, 8])
def test_compiled_rows_of_any_length_and_any_number_of_columns(
    bits: Literal[4, 8], num_inputs: int
) -> None:
    kernels = select_kernels(torch.bfloat16)
    for num_outputs in (1, 31, 32, 33):
        plain = make_weight("int8" if bits == 8 else "int4", num_outputs, num_inputs)
        x = make_inputs(7, num_inputs, torch.bfloat16)
        linear = kernels.make_output_linear(plain)
        assert isinstance(linear, native_quantized.PackedQuantized)
        assert_close(linear(x), exact(x, plain), 5e-4)  # of int4: its scales in float16


@needs_native
@pytest.mark.parametrize(("num_inputs", "group_size"), [(40, 40), (72, 24), (64, 8)])
def test_what_the_compiled_kernels_do_not_take_torch_multiplies(
    num_inputs: int, group_size: int
) -> None:
    values = torch.randint(-128, 128, (12, num_inputs), dtype=torch.int8)
    scales = torch.rand(12, num_inputs // group_size)
    weight = QuantizedWeight(8, group_size, values, scales, None)
    kernels, x = select_kernels(torch.bfloat16), make_inputs(3, num_inputs, torch.bfloat16)
    tolerance = TOLERANCE[torch.bfloat16]
    expected = exact(x, weight)
    assert_close(kernels.make_linear(weight, None)(x), expected, tolerance)
    assert_close(kernels.make_output_linear(weight)(x), expected, tolerance)
    gated = kernels.make_gated_linear(weight, None, "gelu")(x)
    assert_close(gated, reference.act_and_mul(expected, "gelu"), 3 * tolerance)


@needs_native
@pytest.mark.parametrize("name", FORMATS)
def test_a_rows_result_does_not_depend_on_the_rows_beside_it(name: str) -> None:
    kernels = select_kernels(torch.bfloat16)
    linear = kernels.make_linear(make_weight(name, 1270, 256), None)
    x = make_inputs(67, 256, torch.bfloat16)
    whole = linear(x)
    for size in (1, 2, 3, 4, 5, 6, 9, 11, 21, 33):
        parts = torch.cat([linear(part) for part in x.split(size)])
        assert torch.equal(parts, whole)


@needs_native
@pytest.mark.parametrize("name", ["int8", "int8 by 32 (Q8_0)", "int4 by 64"])
def test_inputs_within_128_of_the_largest_of_their_block_are_exact(name: str) -> None:
    weight = make_weight(name, 64, 256)
    powers = torch.randint(-6, 0, weight.scales.shape, generator=torch.Generator().manual_seed(1))
    weight = replace(weight, scales=torch.ldexp(torch.ones_like(weight.scales), powers))
    x = torch.randint(-127, 128, (6, 256), generator=torch.Generator().manual_seed(2)).bfloat16()
    # Sums of up to 2^24 units of the smallest scale: float32 holds each of them.
    assert torch.equal(
        select_kernels(torch.bfloat16).make_output_linear(weight)(x).double(), exact(x, weight)
    )


@needs_native
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e30])
def test_an_input_is_off_by_at_most_a_65536th_of_the_largest_of_its_block(size: float) -> None:
    weight = make_weight("int8", 64, 256)
    x = make_inputs(4, 256, torch.float64)
    x[:, 7] = 1000.0
    x = (x * size).bfloat16()
    found = select_kernels(torch.bfloat16).make_output_linear(weight)(x).double()
    matrix = dequantize(weight, torch.float64).abs()
    peaks = x.double().abs().view(4, 2, 128).amax(2).repeat_interleave(128, 1)
    in_sums = 1e-6 * x.double().abs() @ matrix.T  # float32's
    assert ((found - exact(x, weight)).abs() <= 2**-16 * peaks @ matrix.T + in_sums).all()


@pytest.mark.parametrize("name", ["int8", "w8a8", "w8a8 by 32", "int4 by 64"])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_row_that_is_not_finite_shows_and_spoils_no_other(
    backend: tuple[Kernels, torch.dtype], name: str, bad: float
) -> None:
    kernels, dtype = backend
    linear = kernels.make_linear(make_weight(name, 48, 128), None)
    x = make_inputs(3, 128, dtype)
    clean = linear(x)
    x[1, 5] = bad
    found = linear(x)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


def test_rows_of_zeros_give_the_bias(backend: tuple[Kernels, torch.dtype]) -> None:
    kernels, dtype = backend
    bias = torch.linspace(-1, 1, 48).to(dtype)
    for name in FORMATS:
        linear = kernels.make_linear(make_weight(name, 48, 256), bias)
        assert torch.equal(linear(torch.zeros(2, 256, dtype=dtype)), bias.expand(2, -1))


@needs_native
@pytest.mark.parametrize("name", ["int8", "w8a8", "int4 by 128 (AWQ, GPTQ)"])
def test_a_recorded_pass_reads_its_inputs_anew(name: str) -> None:
    kernels = select_kernels(torch.bfloat16)
    gated = kernels.make_gated_linear(make_weight(name, 256, 128), None)
    down = kernels.make_linear(make_weight(name, 128, 128), None)
    x = make_inputs(2, 128, torch.bfloat16)
    assert kernels.capture is not None
    _, captured = kernels.capture(lambda: down(gated(x)), [])
    assert captured is not None
    x.copy_(make_inputs(3, 128, torch.bfloat16)[:2])
    captured.replay([])
    assert torch.equal(captured.result, down(gated(x)))


@needs_native
@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_take_little_more_than_the_checkpoints(name: str) -> None:
    weight = make_weight(name, 512, 1024)
    linear = select_kernels(torch.bfloat16).make_linear(weight, None)
    assert isinstance(linear, native_quantized.PackedQuantized)
    assert linear._panels.nbytes + linear._column_scales.nbytes <= 1.15 * weight.num_bytes


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_gated_linear_of_bfloat16_takes_every_activation(activation: Activation) -> None:
    size = 40
    weight = torch.cat((torch.eye(size), torch.ones(size, size) / size)).bfloat16()
    x = torch.linspace(-9, 9, size).expand(3, -1).bfloat16() + 0.5
    found = select_kernels(torch.bfloat16).make_gated_linear(weight, None, activation)(x)
    expected = reference.act_and_mul(x.double() @ weight.double().T, activation)
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=1e-5)


@needs_native
def test_a_weight_with_another_order_of_inputs_is_recorded() -> None:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    weight = replace(make_weight("int4 by 64", 80, 256), input_order=order)
    kernels, x = select_kernels(torch.bfloat16), make_inputs(2, 256, torch.bfloat16)
    linear = kernels.make_linear(weight, None)
    assert kernels.capture is not None
    result, recording = kernels.capture(lambda: linear(x), [])
    assert recording is not None
    x.copy_(make_inputs(3, 256, torch.bfloat16)[:2])
    recording.replay([])
    assert torch.equal(result, linear(x))
