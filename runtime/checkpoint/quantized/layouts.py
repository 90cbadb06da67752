"""What is written for each linear of a quantized checkpoint, and what config.json says of it.

Weights alone are in AWQ's layout (4 bits) or GPTQ's: vLLM reads zero points in the first alone, and
the first has 4 bits alone. Where inputs are rounded, too (W8A8), it is compressed-tensors'
`int-quantized`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ....kernels.quantized_tensors import QuantizedWeight
from .awq_layout import awq_shapes, awq_tensors, fits_awq
from .gptq_layout import Shapes, fits_gptq, gptq_shapes, gptq_tensors
from .quantization_config import OUR_QUANTIZER
from .quantizing import bits_for, is_output
from .rounding import group_size_for


@dataclass(frozen=True, slots=True)
class Layout:
    """The form of a checkpoint's linears."""

    bits: Literal[8, 4, 3]
    group_size: int  # at most; of 8 bits a row has one scale
    activations: Literal["exact", "int8"] = "exact"  # "int8": with 8 bits
    form: Literal["awq", "gptq"] = "gptq"  # of weights alone; "awq": with 4 bits

    def plan(self, linears: Mapping[str, tuple[int, int]]) -> dict[str, PlannedLinear]:
        """Those of a model's linears that are quantized; the output projection is not, since few
        engines read it in another form."""
        quantization: Literal["int8", "int4"] = "int8" if self.bits == 8 else "int4"
        rounded = {}
        for name, (num_outputs, num_inputs) in linears.items():
            size = num_inputs if self.bits == 8 else group_size_for(num_inputs, self.group_size)
            is_rounded = bits_for([name], num_inputs, quantization) is not None
            if is_output([name]) or not is_rounded or size is None:
                continue
            if self._fits(num_outputs, num_inputs):
                rounded[name] = PlannedLinear(self, size, (num_outputs, num_inputs))
        if self.form == "awq":  # which has one size for all
            size = min((plan.group_size for plan in rounded.values()), default=self.group_size)
            rounded = {name: replace(plan, group_size=size) for name, plan in rounded.items()}
        return rounded

    def _fits(self, num_outputs: int, num_inputs: int) -> bool:
        if self.activations == "int8":
            return True
        if self.form == "awq":
            return fits_awq(num_outputs)
        return fits_gptq(num_outputs, num_inputs, self.bits)

    def section(
        self, rounded: Mapping[str, PlannedLinear], kept: Sequence[str], version: str
    ) -> dict[str, Any]:
        """`quantization_config`; kept: the linears that stay floating, but for the output
        projection."""
        meta = {"quantizer": [f"{OUR_QUANTIZER}:{version}"]}
        if self.activations == "int8":
            return {**_compressed_section(kept), "meta": meta}
        of_form = self._awq_section if self.form == "awq" else self._gptq_section
        return {**of_form(rounded, kept), "meta": meta}

    def _awq_section(
        self, rounded: Mapping[str, PlannedLinear], kept: Sequence[str]
    ) -> dict[str, Any]:
        """AutoAWQ's fields."""
        sizes = {plan.group_size for plan in rounded.values()}
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": sizes.pop() if sizes else self.group_size,
            "zero_point": True,
            "modules_to_not_convert": [*kept, "lm_head"],
        }

    def _gptq_section(
        self, rounded: Mapping[str, PlannedLinear], kept: Sequence[str]
    ) -> dict[str, Any]:
        """GPTQModel's fields; `dynamic` names the linears that stay floating, and those whose
        inputs no full group divides."""
        dynamic: dict[str, dict[str, int]] = {f"-:^{re.escape(name)}$": {} for name in kept}
        dynamic |= {
            f"+:^{re.escape(name)}$": {"group_size": plan.group_size}
            for name, plan in rounded.items()
            if self.bits != 8 and plan.group_size != self.group_size
        }
        return {
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
            "bits": self.bits,
            "group_size": -1 if self.bits == 8 else self.group_size,
            "sym": self.bits == 8,
            "desc_act": False,
            "lm_head": False,
            "true_sequential": False,
            **({"dynamic": dynamic} if dynamic else {}),
        }


@dataclass(frozen=True, slots=True)
class PlannedLinear:
    """How a linear is written."""

    layout: Layout
    group_size: int
    shape: tuple[int, int]  # of its weight

    def shapes(self, name: str) -> Shapes:
        """Of `tensors`, before these are made."""
        if self.layout.activations == "int8":
            return {
                f"{name}.weight": (self.shape, torch.int8),
                f"{name}.weight_scale": ((self.shape[0], 1), torch.float32),
            }
        if self.layout.form == "awq":
            return awq_shapes(name, *self.shape, self.group_size)
        return gptq_shapes(name, *self.shape, self.layout.bits, self.group_size)

    def tensors(self, name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Those of the module `name`."""
        if self.layout.activations == "int8":
            return {f"{name}.weight": weight.values, f"{name}.weight_scale": weight.scales}
        if self.layout.form == "awq":
            return awq_tensors(name, weight)
        return gptq_tensors(name, weight, self.layout.bits)


def _compressed_section(kept: Sequence[str]) -> dict[str, Any]:
    """compressed-tensors' fields: a scale a row, and a scale a token of the inputs."""
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": {**numbers, "strategy": "channel", "dynamic": False},
        "input_activations": {**numbers, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": [*kept, "lm_head"],
    }
