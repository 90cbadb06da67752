"""Grouped expert products against a loop over the experts, in Triton's interpreter and on a CPU."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Literal, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.errors import ModelLoadError
from stemma.kernels.cpu import experts as cpu
from stemma.kernels.model_options import ClampedSwiGLU
from stemma.kernels.ops import Activation, MakeExperts, Weight
from stemma.kernels.quantized_tensors import QuantizedWeight
from stemma.kernels.reference import dense as reference_dense
from stemma.kernels.reference import experts as reference
from stemma.kernels.reference.quantized import dequantize
from stemma.kernels.triton import expert_blocks, experts
from stemma.kernels.triton.multiprocessors import MULTIPROCESSORS

Shape = tuple[int, int, int, int, int]  # tokens, k, experts, hidden size, expert's size

HOPPER = MULTIPROCESSORS[90]
ON_A_CPU: MakeExperts = partial(
    cpu.make_experts,
    make_linear=reference_dense.make_linear,
    make_gated_linear=reference_dense.make_gated_linear,
)
# Of the largest result, above what the same loop in this dtype errs by itself.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 16, 16),
        (1, 8, 8, 64, 32),
        (3, 2, 5, 72, 40),  # neither size a multiple of a block
        (17, 3, 4, 129, 33),  # nor of 16 bytes
        (2, 4, 12, 136, 96),  # more columns than a block, more experts than pairs
        (20, 5, 8, 256, 16),  # more than one block an expert
    ],
)
def test_few_pairs_an_expert(shape: Shape, dtype: torch.dtype) -> None:
    _check(experts.make_experts, shape, dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((30, 2, 2, 96, 72), torch.float16),
        ((170, 2, 2, 72, 40), torch.float16),
        ((30, 2, 2, 96, 40), torch.float32),
    ],
)
def test_many_pairs_an_expert(shape: Shape, dtype: torch.dtype) -> None:
    """Tiles 64 and 128 pairs wide."""
    num_pairs = shape[0] * shape[1]
    assert experts.choose_tile(dtype, num_pairs, shape[2], HOPPER, is_float=True).block_m >= 64
    _check(experts.make_experts, shape, dtype)


class Format(NamedTuple):
    """Of a weight; group: None for one scale a row."""

    bits: Literal[8, 4]
    group: int | None = None
    has_offsets: bool = False
    activations: Literal["exact", "int8"] = "exact"
    codes: Literal["integer", "fp4"] = "integer"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("gate_up", "down", "shape"),
    [
        (Format(8), Format(8), (3, 2, 5, 72, 40)),  # neither size a multiple of a block
        (Format(8, None, True), Format(8, 32), (5, 2, 3, 64, 32)),
        (Format(4, 128), Format(4, 64), (2, 2, 4, 256, 64)),
        (Format(4, 32, True), Format(8, 16), (5, 2, 3, 96, 48)),  # as GGUF's Q4_K and Q6_K
        (Format(4, 96, True), None, (5, 2, 3, 96, 16)),  # one stays floating
        (None, Format(4, 32), (5, 2, 3, 40, 32)),
        (Format(4, 32), Format(8), (30, 2, 2, 64, 64)),
        (Format(8), Format(4, 32, True), (170, 1, 1, 48, 64)),
    ],
)
def test_quantized_weights_are_taken_as_their_floats(
    gate_up: Format | None, down: Format | None, shape: Shape, dtype: torch.dtype
) -> None:
    """With few, some and many pairs an expert."""
    x, *weights, expert_ids, shares = _inputs(shape, dtype)
    up, down_weight = (_quantized(*pair) for pair in zip(weights, (gate_up, down), strict=True))
    floats = [
        weight.double() if isinstance(weight, torch.Tensor) else dequantize(weight, torch.float64)
        for weight in (up, down_weight)
    ]
    expected = reference.make_experts(*floats, "silu")(x.double(), expert_ids, shares.double())
    found = experts.make_experts(up, down_weight, "silu")(x, expert_ids, shares)
    assert found.dtype is dtype
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error <= (3e-6 if dtype is torch.float32 else 3e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_pairs", [1, 24, 25, 160, 161])
def test_floats_and_numbers_take_the_same_blocks(num_pairs: int, dtype: torch.dtype) -> None:
    """gate_up and down may be one of each."""
    tiles = [
        experts.choose_tile(dtype, num_pairs, 1, HOPPER, is_float=kind) for kind in (True, False)
    ]
    assert tiles[0].block_m == tiles[1].block_m


@pytest.mark.parametrize("num_tokens", [3, 30])
def test_with_8_bit_activations_tokens_and_hidden_states_are_rounded(num_tokens: int) -> None:
    x, *weights, expert_ids, shares = _inputs((num_tokens, 2, 2, 72, 40), torch.float32)
    rounding, exact = (
        [_quantized(weight, Format(8, activations=kind)) for weight in weights]
        for kind in ("int8", "exact")
    )
    expected = reference.make_experts(*rounding, "silu")(x, expert_ids, shares)
    found = experts.make_experts(*rounding, "silu")(x, expert_ids, shares)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    unrounded = experts.make_experts(*exact, "silu")(x, expert_ids, shares)
    assert (unrounded - expected).abs().max() > 1e-3 * expected.abs().max()


def test_inputs_in_an_order_of_their_own_are_refused() -> None:
    values = torch.zeros(2, 32, 32, dtype=torch.int8)
    order = torch.arange(31, -1, -1, dtype=torch.int32).repeat(2, 1)
    weight = QuantizedWeight(8, 32, values, torch.ones(2, 32, 1), None, input_order=order)
    with pytest.raises(ModelLoadError, match="act-order"):
        experts.make_experts(weight, weight, "silu")


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("make_experts", [experts.make_experts, ON_A_CPU])
def test_each_activation(make_experts: MakeExperts, activation: Activation) -> None:
    _check(make_experts, (5, 2, 3, 48, 24), torch.float32, activation)


FP4 = Format(4, 32, codes="fp4")


@pytest.mark.parametrize("make_experts", [experts.make_experts, ON_A_CPU], ids=["triton", "cpu"])
@pytest.mark.parametrize("kind", [None, FP4], ids=["floats", "fp4"])
@pytest.mark.parametrize("num_tokens", [1, 5, 60])
def test_biases_and_clamped_gates(
    make_experts: MakeExperts, kind: Format | None, num_tokens: int
) -> None:
    """As gpt-oss's experts; many gates and ups are beyond the limit."""
    shape = (num_tokens, 2, 3, 64, 32)
    x, *floats, expert_ids, shares = _inputs(shape, torch.float32)
    gate_up, down = (_quantized(weight * 3, kind) for weight in floats)
    biases = torch.linspace(-2, 2, 3 * 64).view(3, 64), torch.linspace(3, -3, 3 * 64).view(3, 64)
    activation = ClampedSwiGLU(alpha=1.3, limit=2.0)
    found = make_experts(gate_up, down, activation, *biases)(x, expert_ids, shares)
    expected = torch.zeros(num_tokens, 64, dtype=torch.float64)
    wide = [
        weight.double() if isinstance(weight, torch.Tensor) else dequantize(weight, torch.float64)
        for weight in (gate_up, down)
    ]
    num_clamped = 0
    for token, k in itertools.product(range(num_tokens), range(2)):
        expert = int(expert_ids[token, k])
        sums = wide[0][expert] @ x[token].double() + biases[0][expert]
        gate, up = sums[:32], sums[32:]
        num_clamped += int((gate > 2).sum() + (up.abs() > 2).sum())
        gate, up = gate.clamp(max=2), up.clamp(-2, 2)
        hidden = gate * torch.sigmoid(1.3 * gate) * (up + 1)
        expected[token] += shares[token, k] * (wide[1][expert] @ hidden + biases[1][expert])
    assert num_clamped > 5
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)


def test_what_is_not_a_number_stays_so_in_clamped_gates() -> None:
    x, gate_up, down, expert_ids, shares = _inputs((4, 1, 2, 32, 16), torch.float32)
    x[1, 3] = torch.nan
    for make_experts in (experts.make_experts, ON_A_CPU):
        found = make_experts(gate_up, down, ClampedSwiGLU())(x, expert_ids, shares)
        assert found.isnan().any(1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("make_experts", [experts.make_experts, ON_A_CPU])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_one_expert_has_all_tokens_and_the_others_none(
    make_experts: MakeExperts, num_tokens: int
) -> None:
    chosen = torch.full((num_tokens, 1), 2)
    _check(make_experts, (num_tokens, 1, 4, 32, 16), torch.float32, expert_ids=chosen)


@pytest.mark.parametrize("make_experts", [experts.make_experts, ON_A_CPU])
def test_an_expert_that_nobody_chose_is_not_read(make_experts: MakeExperts) -> None:
    x, gate_up, down, _, weights = _inputs((6, 2, 4, 32, 16), torch.float32)
    expert_ids = torch.tensor([[3, 0], [0, 3]]).repeat(3, 1)
    expected = reference.make_experts(gate_up, down, "silu")(x, expert_ids, weights)
    gate_up[1:3], down[1:3] = torch.nan, torch.nan
    found = make_experts(gate_up, down, "silu")(x, expert_ids, weights)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("make_experts", [experts.make_experts, ON_A_CPU])
def test_no_tokens_give_no_results(make_experts: MakeExperts) -> None:
    x, gate_up, down, expert_ids, weights = _inputs((0, 2, 4, 32, 16), torch.float32)
    assert make_experts(gate_up, down, "silu")(x, expert_ids, weights).shape == (0, 32)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_large_gate_is_no_overflow() -> None:
    """exp(-gate) is infinite in float32 for the gates of this token, whose silu is 0."""
    x = torch.full((1, 16), -100.0)
    gate_up, down = torch.ones(1, 32, 16), torch.ones(1, 16, 16)
    for activation in ("silu", "gelu", "gelu_tanh"):
        out = experts.make_experts(gate_up, down, activation)(  # type: ignore[arg-type]
            x, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
        )
        assert out.abs().max().item() == 0.0, activation


def test_weights_are_not_rounded_to_the_dtype_of_the_activations() -> None:
    x, gate_up, down, expert_ids, _ = _inputs((4, 2, 2, 32, 16), torch.float16)
    weights = torch.full((4, 2), 1.0 + 2.0**-12)
    run = experts.make_experts(gate_up, down, "silu")
    sums = run(x.clone(), expert_ids, torch.ones(4, 2)).float()
    scaled = run(x, expert_ids, weights * 2.0**10).float() * 2.0**-10
    assert not torch.equal(sums, scaled), "2 ** -12 more is seen where it turns a rounding"
    torch.testing.assert_close(sums, scaled, rtol=2e-3, atol=1e-6)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("make_experts", [experts.make_experts, reference.make_experts])
@pytest.mark.parametrize("num_tokens", [5, 60])
def test_choices_without_an_expert_add_nothing(make_experts: MakeExperts, num_tokens: int) -> None:
    x, gate_up, down, expert_ids, weights = _inputs((num_tokens, 3, 4, 32, 16), torch.float32)
    run = make_experts(gate_up, down, "silu")
    is_none = torch.rand(num_tokens, 3, generator=torch.Generator().manual_seed(1)) < 0.4
    is_none[-2:] = True  # padding
    expected = run(x, expert_ids, weights.masked_fill(is_none, 0.0))
    x[-2:] = torch.nan
    found = run(x, expert_ids.masked_fill(is_none, -1), weights)
    torch.testing.assert_close(found[:-2], expected[:-2])
    assert not found[-2:].count_nonzero()


def test_a_batch_of_many_tokens_on_a_cpu() -> None:
    _check(ON_A_CPU, (130, 3, 16, 64, 48), torch.float32)


@settings(max_examples=25, deadline=None)
@given(
    expert_ids=st.lists(st.integers(-1, 6), min_size=1, max_size=90),
    block_m=st.sampled_from([1, 4, 16]),
)
def test_blocks_hold_each_pair_once_and_experts_in_order(
    expert_ids: list[int], block_m: int
) -> None:
    found = expert_blocks.make_blocks(torch.tensor(expert_ids)[:, None], 7, block_m)
    own = [pair for pair, expert in enumerate(expert_ids) if expert >= 0]
    by_expert = sorted(own, key=lambda pair: expert_ids[pair])
    assert found.pairs.tolist()[: len(own)] == by_expert
    runs = []
    for expert in range(7):
        first = sum(0 <= other < expert for other in expert_ids)
        last = first + expert_ids.count(expert)
        runs += [[expert, at, min(at + block_m, last)] for at in range(first, last, block_m)]
    assert found.num_blocks.item() == len(runs) <= found.max_blocks
    assert found.blocks[: len(runs)].tolist() == runs


def test_pairs_past_one_chunk_keep_their_order() -> None:
    expert_ids = torch.arange(2500)[:, None] % 3
    found = expert_blocks.make_blocks(expert_ids, 3, 16)
    assert torch.equal(found.pairs.long(), expert_ids.flatten().argsort(stable=True))


@pytest.mark.parametrize(("num_pairs", "num_experts"), [(1, 8), (7, 8), (8, 8), (100, 8), (33, 1)])
def test_as_many_blocks_as_the_worst_choice_needs_and_no_more(
    num_pairs: int, num_experts: int
) -> None:
    """The worst choice: one pair each for all experts but one, which has the rest; then one more
    pair wherever it opens another block."""
    started = min(num_pairs, num_experts)
    counts = [1] * started
    for _ in range(num_pairs - started):
        full = [at for at, count in enumerate(counts) if count % 16 == 0]
        counts[full[0] if full else 0] += 1
    worst = sum(-(-count // 16) for count in counts)
    assert expert_blocks.max_blocks(num_pairs, num_experts, 16) == worst


def _check(
    make_experts: MakeExperts,
    shape: Shape,
    dtype: torch.dtype,
    activation: Activation = "silu",
    expert_ids: torch.Tensor | None = None,
) -> None:
    x, gate_up, down, chosen, weights = _inputs(shape, dtype)
    chosen = chosen if expert_ids is None else expert_ids
    exact = reference.make_experts(gate_up.double(), down.double(), activation)(
        x.double(), chosen, weights.double()
    )
    by_loop = reference.make_experts(gate_up, down, activation)(x, chosen, weights)
    allowed = (by_loop.double() - exact).abs().max() + TOLERANCE[dtype] * exact.abs().max()
    found = make_experts(gate_up, down, activation)(x, chosen, weights)
    assert found.dtype is dtype and found.shape == x.shape
    assert (found.double() - exact).abs().max() <= allowed


def _inputs(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, gate_up, down, expert_ids (distinct within a token), weights."""
    num_tokens, top_k, num_experts, hidden_size, expert_size = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    gate_up = normal(num_experts, 2 * expert_size, hidden_size) * hidden_size**-0.5
    down = normal(num_experts, hidden_size, expert_size) * expert_size**-0.5
    chosen = normal(num_tokens, num_experts).topk(top_k).indices
    weights = torch.rand(num_tokens, top_k, generator=generator)
    x = normal(num_tokens, hidden_size)
    return x.to(dtype), gate_up.to(dtype), down.to(dtype), chosen, weights


def _quantized(weight: torch.Tensor, kind: Format | None) -> Weight:
    """About as large as `weight`, of random numbers."""
    if kind is None:
        return weight
    *rows, width = weight.shape
    group = kind.group or width
    generator = torch.Generator().manual_seed(width)
    scales = (1 + torch.rand(*rows, width // group, generator=generator)) * width**-0.5
    offsets = torch.randn(scales.shape, generator=generator) * 0.1 if kind.has_offsets else None
    if kind.bits == 8:
        numbers = torch.randint(-128, 128, weight.shape, generator=generator, dtype=torch.int8)
        return QuantizedWeight(8, group, numbers, scales / 128, offsets, kind.activations)
    halves = torch.randint(0, 256, (*rows, width // 2), generator=generator, dtype=torch.uint8)
    return QuantizedWeight(4, group, halves, scales / 8, offsets, codes=kind.codes)
