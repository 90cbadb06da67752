"""Which implementation of each op runs, and why.

One `Kernels` object is chosen for a device and dtype when a model is loaded and handed to the
model: there is no global switch. `describe()` is what `stemma doctor` prints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from . import ops
from .cpu import adjust as cpu_adjust
from .cpu import dense as cpu_dense
from .cpu import linear as cpu_linear
from .cpu import paged_attention as cpu_attention
from .cpu import sampling as cpu_sampling
from .cpu import token_mask as cpu_mask
from .native import dense as native_dense
from .native import linear as native_linear
from .native import paged_attention as native_attention
from .native import token_mask as native_mask
from .native.bindings import why_not_native
from .native.capture import capture as native_capture
from .reference import adjust as reference_adjust
from .reference import dense as reference_dense
from .reference import logprobs as reference_logprobs
from .reference import paged_attention as reference_attention
from .reference import sampling as reference_sampling
from .reference import token_mask as reference_mask

KernelMode = Literal["auto", "cpu", "reference"]
"""auto: the fastest that runs here; cpu: torch calls, nothing compiled; reference: the truth."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """One row of the doctor's table."""

    op: str
    implementation: str  # "reference", "cpu", "native"
    reason: str


@dataclass(frozen=True, slots=True)
class Kernels:
    """One implementation an op; the contracts are in `ops`."""

    make_linear: ops.MakeLinear
    make_output_linear: ops.MakeOutputLinear
    make_gated_linear: ops.MakeGatedLinear
    make_rms_norm: ops.MakeRMSNorm
    gather_rows: ops.GatherRows
    rotate_and_store: ops.RotateAndStore
    plan_attention: ops.PlanAttention
    paged_attention: ops.PagedAttention
    adjust_logits: ops.AdjustLogits
    apply_token_mask: ops.ApplyTokenMask
    sample: ops.Sample
    token_logprobs: ops.TokenLogprobs
    capture: ops.Capture | None  # None: this backend records nothing
    segment_cost_tokens: int  # what being in a segment costs a row, in tokens of KV read instead
    choices: tuple[KernelChoice, ...]

    def describe(self) -> list[KernelChoice]:
        """What was chosen for each op, and why."""
        return list(self.choices)


def select_kernels(
    dtype: torch.dtype, device: torch.device | str = "cpu", mode: KernelMode = "auto"
) -> Kernels:
    """The best implementations for `dtype` on `device`, or those that `mode` asks for."""
    device_type = torch.device(device).type
    if mode == "reference":
        return _reference("asked for")
    if device_type != "cpu":
        return _reference(f"no kernels for {device_type} yet")
    refusal = "not asked for" if mode == "cpu" else why_not_native(dtype)
    return _native() if refusal is None else _cpu(dtype, refusal)


def _reference(reason: str) -> Kernels:
    return Kernels(
        make_linear=reference_dense.make_linear,
        make_output_linear=reference_dense.make_output_linear,
        make_gated_linear=reference_dense.make_gated_linear,
        make_rms_norm=reference_dense.make_rms_norm,
        gather_rows=reference_dense.gather_rows,
        rotate_and_store=reference_dense.rotate_and_store,
        plan_attention=reference_attention.plan_attention,
        paged_attention=reference_attention.paged_attention,
        adjust_logits=reference_adjust.adjust_logits,
        apply_token_mask=reference_mask.apply_token_mask,
        sample=reference_sampling.sample,
        token_logprobs=reference_logprobs.token_logprobs,
        capture=None,
        segment_cost_tokens=0,  # segments are ignored
        choices=(
            *_choices("reference", reason, "reference", reason),
            *_sampling_choices("reference", reason),
        ),
    )


def _cpu(dtype: torch.dtype, refusal: str) -> Kernels:
    """Torch calls; linears packed by oneDNN where that works."""
    unpacked = cpu_linear.why_not_packed(dtype)
    linear = cpu_linear if unpacked is None else reference_dense
    linear_backend = "cpu" if unpacked is None else "reference"
    linear_reason = unpacked or f"oneDNN weights packed for {dtype}"
    return Kernels(
        make_linear=linear.make_linear,
        make_output_linear=linear.make_output_linear,
        make_gated_linear=linear.make_gated_linear,
        make_rms_norm=cpu_dense.make_rms_norm,
        gather_rows=cpu_dense.gather_rows,
        rotate_and_store=cpu_dense.rotate_and_store,
        plan_attention=cpu_attention.plan_attention,
        paged_attention=cpu_attention.paged_attention,
        adjust_logits=cpu_adjust.adjust_logits,
        apply_token_mask=cpu_mask.apply_token_mask,
        sample=cpu_sampling.sample,
        token_logprobs=reference_logprobs.token_logprobs,
        capture=None,
        segment_cost_tokens=cpu_attention.SEGMENT_COST_TOKENS,
        choices=(
            *_choices("cpu", f"compiled: {refusal}", linear_backend, linear_reason),
            *_sampling_choices("cpu", "numpy"),
        ),
    )


def _native() -> Kernels:
    reason = "compiled for this CPU, AVX512-BF16"
    return Kernels(
        make_linear=native_linear.make_linear,
        make_output_linear=native_linear.make_output_linear,
        make_gated_linear=native_linear.make_gated_linear,
        make_rms_norm=native_dense.make_rms_norm,
        gather_rows=native_dense.gather_rows,
        rotate_and_store=native_dense.rotate_and_store,
        plan_attention=native_attention.plan_attention,
        paged_attention=native_attention.paged_attention,
        adjust_logits=cpu_adjust.adjust_logits,
        apply_token_mask=native_mask.apply_token_mask,
        sample=cpu_sampling.sample,
        token_logprobs=reference_logprobs.token_logprobs,
        capture=native_capture,
        segment_cost_tokens=native_attention.SEGMENT_COST_TOKENS,
        choices=(
            *_choices("native", reason, "native", reason),
            *_sampling_choices("cpu", "numpy"),
        ),
    )


def _choices(
    backend: str, reason: str, linear_backend: str, linear_reason: str
) -> tuple[KernelChoice, ...]:
    return (
        KernelChoice("linear", linear_backend, linear_reason),
        *(
            KernelChoice(op, backend, reason)
            for op in ("rms_norm", "rotate_and_store", "paged_attention", "apply_token_mask")
        ),
    )


def _sampling_choices(backend: str, reason: str) -> tuple[KernelChoice, ...]:
    return (
        KernelChoice("adjust_logits", backend, reason),
        KernelChoice("sample", backend, reason),
        KernelChoice("token_logprobs", "reference", "two torch calls"),
    )
