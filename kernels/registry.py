"""Selects the implementation of each op, with the reason.

One `Kernels` object is selected for a device and dtype when a model is loaded, and passed to the
model: there is no global switch. `describe()` is what `stemma doctor` prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch

from ..errors import InvalidRequest
from . import ops
from .cpu import adjust as cpu_adjust
from .cpu import dense as cpu_dense
from .cpu import experts as cpu_experts
from .cpu import key_selection as cpu_selection
from .cpu import latent_attention as cpu_latent
from .cpu import linear as cpu_linear
from .cpu import lora as cpu_lora
from .cpu import paged_attention as cpu_attention
from .cpu import recurrence as cpu_recurrence
from .cpu import sampling as cpu_mask
from .cpu import sampling as cpu_sampling
from .kv_cache_dtype import KV_CACHE_DTYPES, KVCacheDtype
from .native import dense as native_dense
from .native import deterministic as native_deterministic
from .native import latent_attention as native_latent
from .native import linear as native_linear
from .native import lora as native_lora
from .native import observe as native_observe
from .native import paged_attention as native_attention
from .native import token_mask as native_mask
from .native.bindings import description, why_not_native
from .native.capture import capture as native_capture
from .reference import dense as reference_dense
from .reference import experts as reference_experts
from .reference import experts as reference_routing
from .reference import key_selection as reference_selection
from .reference import kv_store as reference_page_copy
from .reference import kv_store as reference_page_table
from .reference import kv_store as reference_store
from .reference import latent_attention as reference_latent
from .reference import lora as reference_lora
from .reference import observe as reference_observe
from .reference import paged_attention as reference_attention
from .reference import recurrence as reference_recurrence
from .reference import sampling as reference_adjust
from .reference import sampling as reference_logprobs
from .reference import sampling as reference_mask
from .reference import sampling as reference_sampling
from .reference.dense import query_key_norm_of
from .triton.availability import is_interpreted, kv_cache_dtypes, why_not_triton

KernelMode = Literal["auto", "cpu", "triton", "reference", "deterministic"]
"""auto: the fastest that runs here; cpu: torch calls, nothing compiled; triton: the GPU's kernels,
on a CPU in their interpreter; reference: the ground truth, on any device; deterministic: those by
which no row depends on another."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """One row of the doctor's table."""

    op: str
    implementation: str  # "reference", "cpu", "native", "torch", "triton"
    reason: str


@dataclass(frozen=True, slots=True)
class Kernels:
    """One implementation an op; the contracts are in `ops`."""

    make_linear: ops.MakeLinear
    make_head_linear: ops.MakeHeadLinear
    make_output_linear: ops.MakeOutputLinear
    make_gated_linear: ops.MakeGatedLinear
    make_rms_norm: ops.MakeRMSNorm
    make_query_key_norm: ops.MakeQueryKeyNorm
    scale_in_place: ops.ScaleInPlace
    add_in_place: ops.AddInPlace
    route_experts: ops.RouteExperts
    make_experts: ops.MakeExperts
    make_lora: ops.MakeLora
    make_gated_linear_with_lora: ops.MakeGatedLinearWithLora
    plan_lora: ops.PlanLora
    gather_rows: ops.GatherRows
    join_columns: ops.JoinColumns
    gather_share: ops.GatherShare
    act_and_mul: ops.ActAndMul
    rotate_and_store: ops.RotateAndStore
    store_kv: ops.StoreKV
    take_inputs: ops.TakeInputs
    update_pages: ops.UpdatePages
    plan_attention: ops.PlanAttention
    paged_attention: ops.PagedAttention
    store_latent: ops.StoreLatent
    plan_latent_attention: ops.PlanLatentAttention
    latent_attention: ops.LatentAttention
    plan_selection: ops.PlanSelection
    select_keys: ops.SelectKeys
    recurrence: ops.Recurrence
    adjust_logits: ops.AdjustLogits
    apply_token_mask: ops.ApplyTokenMask
    sample: ops.Sample
    token_logprobs: ops.TokenLogprobs
    observe: ops.Observe
    make_page_copy: ops.MakePageCopy
    capture: ops.Capture | None  # None: this backend cannot record
    segment_cost_tokens: int  # a row's cost of being in a segment, in tokens of KV read
    kv_cache_dtypes: tuple[KVCacheDtype, ...]  # of KV_CACHE_DTYPES, those that attention can read
    latent_segment_cost_tokens: int  # the same for latent attention
    choices: tuple[KernelChoice, ...]
    make_normed_linear: ops.MakeNormedLinear | None = None  # None: a norm is a call of its own

    def describe(self) -> list[KernelChoice]:
        """The implementation chosen for each op, and why."""
        return list(self.choices)


def select_kernels(
    dtype: torch.dtype, device: torch.device | str = "cpu", mode: KernelMode = "auto"
) -> Kernels:
    """The best implementations for `dtype` on `device`, or those of `mode`.

    Raises:
        InvalidRequest: `mode` cannot run there; the message says why.
    """
    device = torch.device(device)
    if mode == "reference":
        return _reference("asked for")
    if mode == "deterministic":
        return _deterministic(dtype, device)
    if mode == "triton" or (mode == "auto" and device.type != "cpu"):
        refusal = why_not_triton(device, dtype)
        if refusal is None:
            return _triton(device, dtype)
        if mode == "triton":
            raise InvalidRequest.of("kernels", mode, refusal)
        return _reference(refusal)
    if device.type != "cpu":
        raise InvalidRequest.of("kernels", mode, f"on {device.type} one of auto, triton, reference")
    refusal = "not asked for" if mode == "cpu" else why_not_native(dtype)
    return _native() if refusal is None else _cpu(dtype, refusal)


def _reference(reason: str) -> Kernels:
    return Kernels(
        make_linear=reference_dense.make_linear,
        make_head_linear=reference_dense.make_head_linear,
        make_output_linear=reference_dense.make_output_linear,
        make_gated_linear=reference_dense.make_gated_linear,
        make_rms_norm=reference_dense.make_rms_norm,
        make_query_key_norm=query_key_norm_of(reference_dense.make_rms_norm),
        scale_in_place=reference_dense.scale_in_place,
        add_in_place=reference_dense.add_in_place,
        route_experts=reference_routing.route_experts,
        make_experts=reference_experts.make_experts,
        make_lora=reference_lora.make_lora,
        make_gated_linear_with_lora=reference_lora.gated_linear_with_lora_of(
            reference_dense.make_linear, reference_dense.act_and_mul
        ),
        plan_lora=reference_lora.plan_lora,
        gather_rows=reference_dense.gather_rows,
        join_columns=reference_dense.join_columns,
        gather_share=reference_dense.gather_share,
        act_and_mul=reference_dense.act_and_mul,
        rotate_and_store=reference_store.rotate_and_store,
        store_kv=reference_store.store_kv,
        take_inputs=reference_page_table.take_inputs,
        update_pages=reference_page_table.update_pages,
        plan_attention=reference_attention.plan_attention,
        paged_attention=reference_attention.paged_attention,
        store_latent=reference_latent.store_latent,
        plan_latent_attention=reference_latent.plan_latent_attention,
        latent_attention=reference_latent.latent_attention,
        plan_selection=reference_selection.plan_selection,
        select_keys=reference_selection.select_keys,
        recurrence=reference_recurrence.RECURRENCE,
        adjust_logits=reference_adjust.adjust_logits,
        apply_token_mask=reference_mask.apply_token_mask,
        sample=reference_sampling.sample,
        token_logprobs=reference_logprobs.token_logprobs,
        observe=reference_observe.observe,
        make_page_copy=reference_page_copy.PageCopy,
        capture=None,
        segment_cost_tokens=0,  # segments are ignored
        kv_cache_dtypes=KV_CACHE_DTYPES,
        latent_segment_cost_tokens=0,
        choices=_choices("reference", reason),
    )


def _cpu(dtype: torch.dtype, refusal: str) -> Kernels:
    """Torch calls; linears packed by oneDNN if that works."""
    unpacked = cpu_linear.why_not_packed(dtype)
    linear: Any = cpu_linear.PackedLinears(dtype) if unpacked is None else reference_dense
    linear_choice = (
        ("cpu", f"oneDNN weights packed for {dtype}")
        if unpacked is None
        else ("reference", unpacked)
    )
    return Kernels(
        make_linear=linear.make_linear,
        make_head_linear=reference_dense.make_head_linear,
        make_output_linear=linear.make_output_linear,
        make_gated_linear=linear.make_gated_linear,
        make_rms_norm=cpu_dense.make_rms_norm,
        make_query_key_norm=query_key_norm_of(cpu_dense.make_rms_norm),
        scale_in_place=reference_dense.scale_in_place,
        add_in_place=reference_dense.add_in_place,
        route_experts=reference_routing.route_experts,
        make_experts=partial(
            cpu_experts.make_experts,
            make_linear=linear.make_linear,
            make_gated_linear=linear.make_gated_linear,
        ),
        make_lora=cpu_lora.make_lora,
        make_gated_linear_with_lora=reference_lora.gated_linear_with_lora_of(
            linear.make_linear, reference_dense.act_and_mul
        ),
        plan_lora=cpu_lora.plan_lora,
        gather_rows=cpu_dense.gather_rows,
        join_columns=reference_dense.join_columns,
        gather_share=reference_dense.gather_share,
        act_and_mul=reference_dense.act_and_mul,
        rotate_and_store=cpu_dense.rotate_and_store,
        store_kv=reference_store.store_kv,
        take_inputs=reference_page_table.take_inputs,
        update_pages=reference_page_table.update_pages,
        plan_attention=cpu_attention.plan_attention,
        paged_attention=cpu_attention.paged_attention,
        store_latent=reference_latent.store_latent,
        plan_latent_attention=cpu_latent.plan_latent_attention,
        latent_attention=cpu_latent.latent_attention,
        plan_selection=cpu_selection.plan_selection,
        select_keys=cpu_selection.select_keys,
        recurrence=cpu_recurrence.RECURRENCE,
        adjust_logits=cpu_adjust.adjust_logits,
        apply_token_mask=cpu_mask.apply_token_mask,
        sample=cpu_sampling.sample,
        token_logprobs=reference_logprobs.token_logprobs,
        observe=reference_observe.observe,
        make_page_copy=reference_page_copy.PageCopy,
        capture=None,
        segment_cost_tokens=cpu_attention.SEGMENT_COST_TOKENS,
        kv_cache_dtypes=KV_CACHE_DTYPES,
        latent_segment_cost_tokens=cpu_latent.SEGMENT_COST_TOKENS,
        choices=_choices("cpu", f"compiled: {refusal}", {"linear": linear_choice, **_ON_A_CPU}),
    )


def _native() -> Kernels:
    return Kernels(
        make_linear=native_linear.make_linear,
        make_head_linear=reference_dense.make_head_linear,
        make_output_linear=native_linear.make_output_linear,
        make_gated_linear=native_linear.make_gated_linear,
        make_rms_norm=native_dense.make_rms_norm,
        make_query_key_norm=native_dense.make_query_key_norm,
        scale_in_place=native_dense.scale_in_place,
        add_in_place=native_dense.add_in_place,
        route_experts=reference_routing.route_experts,
        make_experts=partial(
            cpu_experts.make_experts,
            make_linear=native_linear.make_linear,
            make_gated_linear=native_linear.make_gated_linear,
        ),
        make_lora=native_lora.make_lora,
        make_gated_linear_with_lora=native_linear.make_gated_linear_with_lora,
        plan_lora=native_lora.plan_lora,
        gather_rows=native_dense.gather_rows,
        join_columns=native_dense.join_columns,
        gather_share=native_dense.gather_share,
        act_and_mul=reference_dense.act_and_mul,
        rotate_and_store=native_dense.rotate_and_store,
        store_kv=reference_store.store_kv,
        take_inputs=reference_page_table.take_inputs,
        update_pages=reference_page_table.update_pages,
        plan_attention=native_attention.plan_attention,
        paged_attention=native_attention.paged_attention,
        store_latent=reference_latent.store_latent,
        plan_latent_attention=native_latent.plan_latent_attention,
        latent_attention=native_latent.latent_attention,
        plan_selection=cpu_selection.plan_selection,
        select_keys=cpu_selection.select_keys,
        recurrence=cpu_recurrence.RECURRENCE,
        adjust_logits=cpu_adjust.adjust_logits,
        apply_token_mask=native_mask.apply_token_mask,
        sample=cpu_sampling.sample,
        token_logprobs=reference_logprobs.token_logprobs,
        observe=native_observe.observe,
        make_page_copy=reference_page_copy.PageCopy,
        capture=native_capture,
        segment_cost_tokens=native_attention.SEGMENT_COST_TOKENS,
        kv_cache_dtypes=KV_CACHE_DTYPES,
        latent_segment_cost_tokens=cpu_latent.SEGMENT_COST_TOKENS,
        choices=_choices(
            "native",
            description(),
            {
                **_ON_A_CPU,
                "latent_attention": ("native", "one KV head, whose keys are values"),
                "observe": ("native", description()),
                "lora": ("native", "compiled for few tokens of an adapter, else torch"),
            },
        ),
    )


def _deterministic(dtype: torch.dtype, device: torch.device) -> Kernels:
    if device.type != "cpu":
        raise native_deterministic.refusal(f"device=cpu (here {device.type})")
    if dtype not in (torch.bfloat16, torch.float32):
        raise native_deterministic.refusal(f"dtype=bfloat16 or float32 (here {dtype})")
    missing = why_not_native(torch.bfloat16)
    if missing is not None:
        raise native_deterministic.refusal(f"the compiled kernels of a CPU ({missing})")
    linears = native_deterministic.FixedLinears(dtype)
    fixed = replace(
        _native(),
        make_linear=linears.make_linear,
        make_head_linear=linears.make_head_linear,
        make_output_linear=linears.make_output_linear,
        make_gated_linear=linears.make_gated_linear,
        make_experts=partial(
            cpu_experts.make_experts,
            make_linear=linears.make_linear,
            make_gated_linear=linears.make_gated_linear,
        ),
        make_lora=native_deterministic.make_lora,
        make_gated_linear_with_lora=linears.make_gated_linear_with_lora,
        plan_lora=native_lora.plan_fixed_lora,
        plan_attention=native_deterministic.plan_attention,
        plan_latent_attention=native_deterministic.plan_latent_attention,
        plan_selection=reference_selection.plan_selection,
        select_keys=reference_selection.select_keys,
        recurrence=reference_recurrence.RECURRENCE,
        segment_cost_tokens=native_deterministic.SEGMENT_COST_TOKENS,
        choices=_choices(
            "native",
            "no row depends on another",
            {
                **_ON_A_CPU,
                "select_keys": ("reference", "query by query"),
                **dict.fromkeys(_RECURRENCE, ("reference", "token by token")),
            },
        ),
    )
    return fixed if dtype is torch.bfloat16 else _in_float32(fixed)


def _in_float32(fixed: Kernels) -> Kernels:
    """Where the compiled kernels are for bfloat16 alone, torch's calls that go row by row."""
    return replace(
        fixed,
        make_rms_norm=reference_dense.make_rms_norm,
        make_query_key_norm=query_key_norm_of(reference_dense.make_rms_norm),
        scale_in_place=reference_dense.scale_in_place,
        add_in_place=reference_dense.add_in_place,
        rotate_and_store=reference_store.rotate_and_store,
        capture=None,
        kv_cache_dtypes=("auto",),
    )


def _triton(device: torch.device, dtype: torch.dtype) -> Kernels:
    """For GPUs; imported here, so that starting on a CPU does not load it."""
    from .triton import (
        adjust,
        dense,
        experts,
        key_selection,
        kv_store,
        latent_attention,
        logprobs,
        lora,
        normed_linear,
        page_copy,
        page_table,
        paged_attention,
        recurrence,
        routing,
        sampling,
        token_mask,
    )

    return Kernels(
        make_linear=dense.make_linear,
        make_head_linear=reference_dense.make_head_linear,
        make_output_linear=dense.make_output_linear,
        make_gated_linear=dense.make_gated_linear,
        make_rms_norm=dense.make_rms_norm,
        make_query_key_norm=dense.make_query_key_norm,
        scale_in_place=reference_dense.scale_in_place,
        add_in_place=reference_dense.add_in_place,
        route_experts=routing.route_experts,
        make_experts=experts.make_experts,
        make_lora=lora.make_lora,
        make_gated_linear_with_lora=reference_lora.gated_linear_with_lora_of(
            dense.make_linear, dense.act_and_mul
        ),
        plan_lora=lora.plan_lora,
        gather_rows=dense.gather_rows,
        join_columns=reference_dense.join_columns,
        gather_share=reference_dense.gather_share,
        act_and_mul=dense.act_and_mul,
        rotate_and_store=kv_store.rotate_and_store,
        store_kv=kv_store.store_kv,
        take_inputs=page_table.take_inputs,
        update_pages=page_table.update_pages,
        plan_attention=paged_attention.plan_attention,
        paged_attention=paged_attention.paged_attention,
        store_latent=latent_attention.store_latent,
        plan_latent_attention=latent_attention.plan_latent_attention,
        latent_attention=latent_attention.latent_attention,
        plan_selection=key_selection.plan_selection,
        select_keys=cpu_selection.select_keys,
        recurrence=recurrence.RECURRENCE,
        adjust_logits=adjust.adjust_logits,
        apply_token_mask=token_mask.apply_token_mask,
        sample=sampling.sample,
        token_logprobs=logprobs.token_logprobs,
        observe=reference_observe.observe,
        make_page_copy=page_copy.PageCopy,
        capture=None,
        segment_cost_tokens=paged_attention.SEGMENT_COST_TOKENS,
        kv_cache_dtypes=kv_cache_dtypes(device, dtype),
        latent_segment_cost_tokens=latent_attention.SEGMENT_COST_TOKENS,
        choices=_choices(
            "triton",
            _why_triton(device),
            {
                "linear": ("torch", "cuBLAS has the fastest products"),
                "prefill_attention": ("triton", "or torch's, measured when a model is loaded"),
                "select_keys": ("torch", "a few calls a row; such steps are not captured"),
                **dict.fromkeys(("scale_in_place", "add_in_place"), ("torch", "one kernel each")),
                "join_columns": ("torch", "one call"),
                "gather_share": ("torch", "a few calls"),
                "observe": ("reference", "KV is compressed on CPUs"),
            },
        ),
        make_normed_linear=normed_linear.make_normed_linear,
    )


def _why_triton(device: torch.device) -> str:
    if is_interpreted():
        return "interpreted on a CPU (TRITON_INTERPRET)"
    major, minor = torch.cuda.get_device_capability(device)
    return f"compiled for compute capability {major}.{minor}"


_RECURRENCE = ("short_convolution", "gated_delta_rule", "state_space_scan")

# The order of the doctor's table.
_OPS = (
    "linear",
    "rms_norm",
    "query_key_norm",
    "scale_in_place",
    "add_in_place",
    "route_experts",
    "experts",
    "lora",
    "gather_rows",
    "join_columns",
    "gather_share",
    "act_and_mul",
    "rotate_and_store",
    "store_kv",
    "take_inputs",
    "update_pages",
    "page_copy",
    "paged_attention",
    "prefill_attention",
    "store_latent",
    "latent_attention",
    "select_keys",
    *_RECURRENCE,
    "adjust_logits",
    "apply_token_mask",
    "sample",
    "token_logprobs",
    "observe",
)
# Ops that the CPU path runs elsewhere, or only as part of another op; and ops in numpy.
_ON_A_CPU = {
    **dict.fromkeys(
        ("act_and_mul", "store_kv", "take_inputs", "update_pages", "page_copy"),
        ("reference", "not on a CPU's path"),
    ),
    **dict.fromkeys(("adjust_logits", "sample"), ("cpu", "numpy")),
    "token_logprobs": ("reference", "two torch calls"),
    "observe": ("reference", "torch calls, 64 queries at a time"),
    "route_experts": ("reference", "a few torch calls"),
    "experts": ("cpu", "sorted by expert, linears as above"),
    "store_latent": ("reference", "one torch call"),
    "latent_attention": ("cpu", "all heads of a row in one product"),
    "select_keys": ("cpu", "all heads of a row in one product"),
    "lora": ("cpu", "two products an adapter"),
    **dict.fromkeys(
        _RECURRENCE, ("cpu", "torch calls: rows of one token together, others in chunks")
    ),
}


def _choices(
    backend: str, reason: str, others: Mapping[str, tuple[str, str]] = MappingProxyType({})
) -> tuple[KernelChoice, ...]:
    """`others`: implementation and reason of the ops not from this backend."""
    return tuple(KernelChoice(op, *others.get(op, (backend, reason))) for op in _OPS)
