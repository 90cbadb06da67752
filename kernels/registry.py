"""Which implementation of each op runs, and why.

One `Kernels` object is chosen for a device and dtype when a model is loaded and handed to the
model: there is no global switch. `describe()` is what `stemma doctor` prints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from . import ops
from .cpu import dense as cpu_dense
from .cpu import linear as cpu_linear
from .cpu import paged_attention as cpu_attention
from .reference import dense as reference_dense
from .reference import paged_attention as reference_attention

KernelMode = Literal["auto", "reference"]


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """One row of the doctor's table."""

    op: str
    implementation: str  # "reference", "cpu"
    reason: str


@dataclass(frozen=True, slots=True)
class Kernels:
    """One implementation an op; the contracts are in `ops`."""

    make_linear: ops.MakeLinear
    make_rms_norm: ops.MakeRMSNorm
    apply_rope: ops.ApplyRope
    silu_and_mul: ops.SiluAndMul
    store_kv: ops.StoreKV
    plan_attention: ops.PlanAttention
    paged_attention: ops.PagedAttention
    choices: tuple[KernelChoice, ...]

    def describe(self) -> list[KernelChoice]:
        """What was chosen for each op, and why."""
        return list(self.choices)


def select_kernels(
    dtype: torch.dtype, device: torch.device | str = "cpu", mode: KernelMode = "auto"
) -> Kernels:
    """The best implementations for `dtype` on `device`, or the plain torch ones."""
    device_type = torch.device(device).type
    if mode == "reference":
        return _assemble("reference", "asked for", "reference", "asked for")
    if device_type != "cpu":
        reason = f"no kernels for {device_type} yet"
        return _assemble("reference", reason, "reference", reason)
    refusal = cpu_linear.why_not_packed(dtype)
    if refusal is not None:
        return _assemble("cpu", "few torch calls", "reference", refusal)
    return _assemble("cpu", "few torch calls", "cpu", f"oneDNN weights packed for {dtype}")


def _assemble(backend: str, reason: str, linear_backend: str, linear_reason: str) -> Kernels:
    is_cpu = backend == "cpu"
    dense = cpu_dense if is_cpu else reference_dense
    attention = cpu_attention if is_cpu else reference_attention
    make_linear: Callable[..., ops.Linear] = (
        cpu_linear.make_linear if linear_backend == "cpu" else reference_dense.make_linear
    )
    others = ("rms_norm", "apply_rope", "silu_and_mul", "store_kv", "paged_attention")
    choices = (
        KernelChoice("linear", linear_backend, linear_reason),
        *(KernelChoice(op, backend, reason) for op in others),
    )
    return Kernels(
        make_linear=make_linear,
        make_rms_norm=dense.make_rms_norm,
        apply_rope=dense.apply_rope,
        silu_and_mul=dense.silu_and_mul,
        store_kv=dense.store_kv,
        plan_attention=attention.plan_attention,
        paged_attention=attention.paged_attention,
        choices=choices,
    )
