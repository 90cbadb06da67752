"""A product with the norm before it, in Triton's interpreter, against the two of the reference."""

from __future__ import annotations

import pytest
import torch

from stemma.kernels.ops import Activation
from stemma.kernels.reference import dense as reference
from stemma.kernels.triton.normed_linear import MAX_TOKENS, make_normed_linear


@pytest.mark.parametrize("num_tokens", [0, 1, 3, MAX_TOKENS])
@pytest.mark.parametrize(
    ("num_rows", "width", "activation", "has_bias"),
    [
        (96, 128, None, False),
        (70, 200, None, True),  # rows and inputs that no block divides
        (128, 256, "silu", False),
        (2 * 35, 136, "gelu_tanh", True),  # ups begin within a block
    ],
)
def test_it_is_the_norm_and_the_product(
    num_tokens: int, num_rows: int, width: int, activation: Activation | None, has_bias: bool
) -> None:
    torch.manual_seed(num_rows + num_tokens)
    weight, norm_weight = torch.randn(num_rows, width), torch.rand(width) + 0.5
    bias = torch.randn(num_rows) if has_bias else None
    x, residual = torch.randn(num_tokens, width) * 3, torch.randn(num_tokens, width)
    before, added = residual.clone(), x.clone()
    fused = make_normed_linear(weight, bias, norm_weight, 1e-5, activation)
    assert fused is not None
    total = torch.full_like(residual, torch.nan)
    found = fused(x, residual, total)
    assert torch.equal(residual, before) and torch.equal(x, added)

    normed = reference.make_rms_norm(norm_weight, 1e-5)(x, residual)
    if activation is None:
        expected = reference.make_linear(weight, bias)(normed)
    else:
        expected = reference.make_gated_linear(weight, bias, activation)(normed)
    assert torch.equal(total, residual)  # the reference's, in place
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_without_anything_to_add_the_residual_is_normed_and_copied() -> None:
    fused = make_normed_linear(torch.randn(32, 64), None, torch.rand(64), 1e-5)
    assert fused is not None
    residual, total = torch.randn(3, 64), torch.empty(3, 64)
    found = fused(None, residual, total)
    assert torch.equal(total, residual)
    assert torch.equal(found, fused(torch.zeros(3, 64), residual, torch.empty(3, 64)))


def test_a_token_gives_the_same_among_others() -> None:
    """Bit for bit."""
    weight, norm_weight = torch.randn(64, 160), torch.rand(160)
    fused = make_normed_linear(weight, None, norm_weight, 1e-5)
    assert fused is not None
    x, residual = torch.randn(9, 160), torch.randn(9, 160)
    found = fused(x, residual, torch.empty_like(x))
    for token in range(9):
        one = slice(token, token + 1)
        alone = fused(x[one].clone(), residual[one].clone(), torch.empty(1, 160))
        assert torch.equal(alone, found[one])


def test_sums_that_share_memory_with_their_terms_are_refused() -> None:
    fused = make_normed_linear(torch.randn(32, 64), None, torch.ones(64), 1e-5)
    assert fused is not None
    x, residual = torch.randn(2, 64), torch.randn(2, 64)
    for total in (x, residual):
        with pytest.raises(AssertionError, match="others read these"):
            fused(x, residual, total)


def test_float16_and_quantized_weights_have_none() -> None:
    ones = torch.ones(64)
    assert make_normed_linear(torch.ones(32, 64).half(), None, ones.half(), 1e-5) is None
