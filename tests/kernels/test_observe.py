"""`observe` against attention probabilities written out, and the compiled one against the plain."""

from __future__ import annotations

import pytest
import torch

from stemma.kernels.model_options import AttentionOptions
from stemma.kernels.native.bindings import why_not_native
from stemma.kernels.reference.observe import observe

OPTIONS = [AttentionOptions(), AttentionOptions(scale=0.3, soft_cap=2.0)]
# queries, keys, heads, KV heads, head_dim
SHAPES = [(1, 1, 1, 1, 16), (1, 17, 4, 2, 32), (32, 64, 6, 2, 64), (65, 65, 4, 4, 16),
          (63, 200, 12, 4, 80), (130, 300, 3, 1, 64)]  # fmt: skip


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    num_queries, num_keys, num_heads, num_kv_heads, head_dim = shape
    torch.manual_seed(sum(shape))
    queries = torch.randn(num_queries, num_heads, head_dim, dtype=torch.float64)
    keys = torch.randn(num_kv_heads, num_keys, head_dim, dtype=torch.float64)
    return queries.to(dtype), keys.to(dtype)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_keys_get_the_sums_of_probabilities(
    shape: tuple[int, ...], options: AttentionOptions
) -> None:
    queries, keys = _inputs(shape, torch.float64)
    num_queries, num_keys, num_heads, num_kv_heads, head_dim = shape
    expected = torch.zeros(num_kv_heads, num_keys, dtype=torch.float64)
    for query in range(num_queries):
        seen = num_keys - num_queries + query + 1
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            scale = head_dim**-0.5 if options.scale is None else options.scale
            scores = keys[kv_head, :seen] @ queries[query, head] * scale
            if options.soft_cap is not None:
                scores = options.soft_cap * (scores / options.soft_cap).tanh()
            expected[kv_head, :seen] += scores.softmax(0)
    torch.testing.assert_close(observe(queries, keys, options), expected)


@pytest.mark.skipif(
    why_not_native(torch.bfloat16) is not None, reason=str(why_not_native(torch.bfloat16))
)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_compiled_one_is_the_plain_one(
    shape: tuple[int, ...], dtype: torch.dtype, options: AttentionOptions
) -> None:
    from stemma.kernels.native.observe import observe as compiled

    queries, keys = _inputs(shape, dtype)
    expected = observe(queries.double(), keys.double(), options)
    observed = compiled(queries, keys, options)
    assert observed.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    torch.testing.assert_close(observed.double(), expected, rtol=1e-4, atol=1e-5)
