"""Small Triton kernels in the interpreter, against the reference, over shapes, dtypes and edges."""

from __future__ import annotations

import pytest
import torch

from stemma.kernels.ops import Activation
from stemma.kernels.reference import dense as reference
from stemma.kernels.reference import kv_store as reference_page_table
from stemma.kernels.registry import KernelMode, Kernels, select_kernels
from stemma.kernels.sampling_rows import SamplingRows

# Infinities are part of the arithmetic; the interpreter's numpy warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = [torch.float32, torch.float16]
# Largest relative difference: a rounding of float32 at the values' size, or one of float16.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return select_kernels(torch.float32, mode="triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "size"), [(0, 64), (1, 64), (17, 64), (2, 1), (3, 80), (2, 1500), (1, 16384)]
)
@pytest.mark.parametrize("has_residual", [False, True])
def test_rms_norm_equals_the_reference_and_adds_the_residual_in_place(
    kernels: Kernels, dtype: torch.dtype, num_tokens: int, size: int, has_residual: bool
) -> None:
    x, residual, weight = (
        _randn(dtype, num_tokens, size),
        _randn(dtype, num_tokens, size) * 3,
        _randn(dtype, size),
    )
    before, expected_total = x.clone(), residual.clone()
    total = residual.clone()
    expected = reference.make_rms_norm(weight, 1e-5)(x, expected_total if has_residual else None)
    out = kernels.make_rms_norm(weight, 1e-5)(x, total if has_residual else None)
    assert torch.equal(total, expected_total)
    assert torch.equal(x, before) and out.dtype is dtype
    _assert_close(out, expected)


def test_rms_norm_of_a_row_does_not_depend_on_the_rows_beside_it(kernels: Kernels) -> None:
    norm = kernels.make_rms_norm(_randn(torch.float16, 96), 1e-6)
    x = _randn(torch.float16, 40, 96)
    assert torch.equal(norm(x)[33:34], norm(x[33:34].contiguous()))


def test_rms_norm_by_a_float32_weight_rounds_its_result_only(kernels: Kernels) -> None:
    x, weight = _randn(torch.float16, 5, 80), 1 + _randn(torch.float32, 80) / 1000
    expected = reference.make_rms_norm(weight, 1e-5)(x)
    assert expected.dtype is torch.float16
    assert not torch.equal(expected, reference.make_rms_norm(weight.half(), 1e-5)(x))
    out = kernels.make_rms_norm(weight, 1e-5)(x)
    assert (out != expected).float().mean() < 0.01, "another rounding"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 17])
@pytest.mark.parametrize(
    ("head_dim", "is_whole"), [(64, False), (80, False), (64, True), (80, True)]
)
def test_query_key_norm_equals_the_reference_and_leaves_values(
    kernels: Kernels, dtype: torch.dtype, num_tokens: int, head_dim: int, is_whole: bool
) -> None:
    num_heads, num_kv_heads = 4, 2
    heads = _randn(dtype, num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    sizes = (num_heads * head_dim, num_kv_heads * head_dim) if is_whole else (head_dim, head_dim)
    weights = [_randn(dtype, size) for size in sizes]
    found, expected = heads.clone(), heads.clone()
    for each, out in ((kernels, found), (select_kernels(dtype, mode="reference"), expected)):
        each.make_query_key_norm(*weights, num_heads, num_kv_heads, 1e-5)(out)
    assert torch.equal(found[:, -num_kv_heads:], heads[:, -num_kv_heads:])
    _assert_close(found, expected)


def test_rms_norm_of_too_long_rows_is_refused_at_load(kernels: Kernels) -> None:
    with pytest.raises(AssertionError, match="16385"):
        kernels.make_rms_norm(torch.ones(16385), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("num_tokens", "size"), [(0, 8), (1, 1), (3, 70), (2, 1025)])
def test_act_and_mul_equals_the_reference(
    kernels: Kernels, dtype: torch.dtype, activation: Activation, num_tokens: int, size: int
) -> None:
    gate_up = _randn(dtype, num_tokens, 2 * size) * 4
    expected = reference.act_and_mul(gate_up, activation)
    _assert_close(kernels.act_and_mul(gate_up, activation), expected)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations_of_huge_gates_are_theirs_or_zero(
    kernels: Kernels, activation: Activation
) -> None:
    gate_up = torch.tensor([[1e4, -1e4, 30.0, -30.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    out = kernels.act_and_mul(gate_up, activation)[0]
    torch.testing.assert_close(out, torch.tensor([1e4, 0.0, 30.0, 0.0, 0.0]), atol=1e-10, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_linear_equals_the_reference(kernels: Kernels, dtype: torch.dtype) -> None:
    x, weight, bias = _randn(dtype, 5, 48), _randn(dtype, 80, 48) / 4, _randn(dtype, 80)
    expected = reference.make_gated_linear(weight, bias)(x)
    _assert_close(kernels.make_gated_linear(weight, bias)(x), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_linear_is_wide(kernels: Kernels, dtype: torch.dtype) -> None:
    x, weight = _randn(dtype, 5, 48), _randn(dtype, 80, 48)
    out = kernels.make_output_linear(weight)(x)
    assert out.dtype is torch.float32
    _assert_close(out.to(dtype), (x.double() @ weight.double().T).to(dtype))


@pytest.mark.parametrize("mode", ["triton", "reference", "cpu", "auto"])
def test_results_are_left_where_they_are_wanted(mode: KernelMode) -> None:
    """Norms, logits and draws: as new tensors have them."""
    kernels = select_kernels(torch.float32, mode=mode)
    x, residual, weight = (_randn(torch.float32, *shape) for shape in [(3, 64), (3, 64), (20, 64)])
    norm, product = kernels.make_rms_norm(weight[0], 1e-5), kernels.make_output_linear(weight)
    hidden, logits = torch.empty(3, 64), torch.empty(3, 20)
    assert norm(x, residual.clone(), hidden) is hidden
    assert torch.equal(hidden, norm(x, residual.clone()))
    assert product(x, logits) is logits and torch.equal(logits, product(x))
    zeros, ones = torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.float64)
    rows = SamplingRows(ones, zeros, ones, 0 * ones, zeros, zeros)
    out = torch.empty(3, dtype=torch.int64), torch.empty(3, dtype=torch.bool)
    kernels.sample(logits, rows, out)
    assert all(map(torch.equal, out, kernels.sample(logits, rows)))


@pytest.mark.parametrize(
    ("shape", "num_tokens"), [((7, 33), 0), ((7, 1, 64), 1), ((7, 33), 40), ((300, 1100), 2)]
)
def test_gathered_rows_are_the_rows(
    kernels: Kernels, shape: tuple[int, ...], num_tokens: int
) -> None:
    table = _randn(torch.float16, *shape)
    index = torch.randint(len(table), (num_tokens,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(kernels.gather_rows(table, index), table[index])


@pytest.mark.parametrize("num_tokens", [0, 1, 200])
def test_inputs_are_what_the_step_before_sampled_or_what_is_known(
    kernels: Kernels, num_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    token_ids = torch.randint(2**40, (num_tokens,), generator=generator)
    sources = torch.randint(-3, 5, (num_tokens,), generator=generator).clamp(min=-1)
    previous = torch.randint(2**40, (5,), generator=generator)
    expected = [
        int(previous[source]) if source >= 0 else int(known)
        for source, known in zip(sources.tolist(), token_ids.tolist())
    ]
    known = token_ids.clone()
    for take_inputs in (kernels.take_inputs, reference_page_table.take_inputs):
        assert take_inputs(token_ids, sources, previous).tolist() == expected
    assert torch.equal(token_ids, known)


@pytest.mark.parametrize("num_updates", [0, 1, 150])
def test_pages_are_written_where_updates_say_and_padding_writes_none(
    kernels: Kernels, num_updates: int
) -> None:
    generator = torch.Generator().manual_seed(num_updates)
    table = torch.randint(1000, (6, 50), dtype=torch.int32, generator=generator)
    places = torch.randperm(table.numel(), generator=generator)[:num_updates]
    updates = torch.stack((places // 50, places % 50, torch.arange(num_updates)), 1).int()
    padding = torch.tensor([[-1, 7, 9]], dtype=torch.int32).expand(3, 3)
    updates = torch.cat((padding, updates, padding))
    expected = table.clone()
    for row, column, page in updates.tolist():
        if row >= 0:
            expected[row, column] = page
    for update_pages in (kernels.update_pages, reference_page_table.update_pages):
        found = table.clone()
        update_pages(found, updates)
        assert torch.equal(found, expected)


def _randn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def _assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape and found.dtype is expected.dtype
    tolerance = TOLERANCE[found.dtype]
    atol = tolerance * float(expected.double().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, atol=atol, rtol=tolerance)
