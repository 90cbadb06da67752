"""Measures this machine's CPU in about a second, with the kernels that would run the model, for
predictions before it is loaded."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from ..kernels.ops import Linear, Weight
from ..kernels.registry import select_kernels
from ..runtime.checkpoint.quantized.rounding import MAX_GROUP_SIZE, round_to_4_bits, round_to_8_bits
from ..runtime.execute.model_runner import resolve_dtype
from ..runtime.memory.sizing import available_memory_bytes
from .devices import DeviceModel, Rates
from .roofline import CostModel
from .served_model import ServedModel

# More than the caches of a laptop, or of a share of a server, hold together.
_LARGEST_BYTES = 192 << 20
_COMPUTED_WEIGHTS = 32 << 20  # at most, with many rows: about a tenth of a second
_ROWS = 256  # enough that only arithmetic takes time
_REPEATS = 7
# Besides arithmetic: of a step, a layer and a row that samples. Measured with the embedded model
# and llama-160m on 2 cores of an AMD EPYC (Zen 4).
_STEP_S = 150e-6
_LAYER_S = 10e-6
_ROW_S = 40e-6
# From docs/serve/lora.md: steps of 48 linear layers take 2.5 to 2.9 ms more if adapters are enabled
# and used, of which reading one is some 0.3 ms.
_ADAPTER_S = 50e-6


def cost_model(model: ServedModel) -> CostModel:
    """The model on this machine's CPU, measured with the model's format and a weight of its width;
    measured from the caches if all weights fit them."""
    dtype, quantization = resolve_dtype(model.format.dtype), model.format.name
    side = -(-model.config.hidden_size // 128) * 128
    kernels = select_kernels(dtype)
    with torch.inference_mode():
        numbers = torch.randn(side, side, generator=torch.Generator().manual_seed(0)).to(dtype)
        weight = _in_format(numbers / side**0.5, quantization)
        num_bytes = weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes
        count = max(2, min(model.weight_bytes, _LARGEST_BYTES) // num_bytes)
        linears = [kernels.make_linear(weight, None) for _ in range(count)]
        read_s = _seconds(linears, numbers[:1].contiguous())
        few = linears[: max(1, min(count, _COMPUTED_WEIGHTS // side**2))]
        compute_s = _seconds(few, numbers.repeat(-(-_ROWS // side), 1)[:_ROWS].contiguous())
    read_bytes_s = count * num_bytes / read_s
    flop_s = len(few) * 2 * side * side * _ROWS / compute_s
    device = DeviceModel(
        name="this CPU, measured",
        memory_bytes=available_memory_bytes(),
        rates={quantization: Rates(read_bytes_s, flop_s)},
        kv_bytes_s=read_bytes_s,
        attention_flop_s=flop_s,
        step_s=_STEP_S,
        layer_s=_LAYER_S,
        row_s=_ROW_S,
        adapter_s=_ADAPTER_S,
    )
    return CostModel(model, device)


def _in_format(weight: Tensor, quantization: str) -> Weight:
    if quantization == "none":
        return weight
    if quantization in ("int4", "mxfp4"):  # of mxfp4 nearly all weights are experts
        return round_to_4_bits(weight, MAX_GROUP_SIZE)
    return round_to_8_bits(weight, "int8" if quantization == "w8a8" else "exact")


def _seconds(linears: list[Linear], x: Tensor) -> float:
    """Times passes of one input through all of them: the median, without the first."""
    times = []
    for _ in range(1 + _REPEATS):
        started = time.perf_counter()
        for linear in linears:
            linear(x)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])
