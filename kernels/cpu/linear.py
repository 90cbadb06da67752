"""Linear layers over weights that oneDNN has reordered once, at load.

`torch.ops.mkldnn._reorder_linear_weight` and `_linear_pointwise` are what torch.compile emits for
frozen weights. They are private, so they are looked up, and checked against F.linear once, before
they are used. Measured (AMD EPYC with AVX512-BF16, 2 threads, torch 2.13; us a call, plain ->
packed): bfloat16 768 -> 32000 at one row 2677 -> 570, 768 -> 4096 at one row 213 -> 67, at 32
rows 715 -> 472; float32 768 -> 4096 at one row 226 -> 99.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import Activation, Linear, OutputLinear, Weight
from ..quantized_tensors import QuantizedWeight
from ..reference.dense import act_and_mul, placed
from . import quantized_linear

_PACKED_DTYPES = (torch.bfloat16, torch.float32)


class PackedLinears:
    """Makes linears for x of one dtype; the caller has checked `why_not_packed` for it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def make_linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        if isinstance(weight, QuantizedWeight):
            return quantized_linear.make_linear(weight, bias, self._dtype)
        return _packed(weight, bias)

    def make_output_linear(self, weight: Weight) -> OutputLinear:
        """Logits: rounded to the dtype of x, then converted to float32."""
        linear = self.make_linear(weight, None)
        return lambda x, out=None: placed(linear(x).float(), out)

    def make_gated_linear(
        self, weight: Weight, bias: Tensor | None, activation: Activation = "silu"
    ) -> Linear:
        """Gate and up in one product."""
        linear = self.make_linear(weight, bias)

        def gated_linear(x: Tensor) -> Tensor:
            gate_up = linear(x)
            if activation != "silu":
                return act_and_mul(gate_up, activation)
            gate, up = gate_up.chunk(2, dim=-1)
            return F.silu(gate).mul_(up)

        return gated_linear


def _packed(weight: Tensor, bias: Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    run = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: Tensor) -> Tensor:
        return run(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]

    return linear


@functools.cache
def why_not_packed(dtype: torch.dtype) -> str | None:
    """None if packed linears work for `dtype` on this machine, else the reason."""
    if dtype not in _PACKED_DTYPES:
        return f"no packed linear for {dtype}"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "torch was built without oneDNN"
    try:
        return _try_packed(dtype)
    except (RuntimeError, AttributeError, TypeError) as error:
        return f"packed linear is not usable: {str(error).splitlines()[0]}"


def _try_packed(dtype: torch.dtype) -> str | None:
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        weight = torch.randn(48, 32, generator=generator).to(dtype)
        bias = torch.randn(48, generator=generator).to(dtype)
        for num_rows in (1, 5):
            x = torch.randn(num_rows, 32, generator=generator).to(dtype)
            error = (_packed(weight, bias)(x) - F.linear(x, weight, bias)).abs().max().item()
            if not error <= 0.25:  # a bf16 step at the values' size, up to 32, is 0.125
                return f"packed linear differs from F.linear by {error:.3g}"
    return None
