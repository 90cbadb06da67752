"""Torch's attention of prompts beside another kernel: against the reference, in float64."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_trees import Branch, quantized, random_kv, row, rows_of
from device_plans import device_kernels
from fused_attention import plain_attention
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stemma.kernels import prefill_attention
from stemma.kernels.attention_rows import AttentionRows
from stemma.kernels.model_options import DEFAULT_OPTIONS, AttentionOptions
from stemma.kernels.ops import DevicePlan, KVLayer
from stemma.kernels.prefill_attention import (
    FusedAttention,
    PrefillChoice,
    cudnn_attention,
    flash_attention,
    with_prefill_attention,
)
from stemma.kernels.reference import paged_attention as reference
from stemma.kernels.registry import Kernels, select_kernels

PLAIN = PrefillChoice("torch's plain", plain_attention, min_tokens=12, unit_tokens=4)
TREE = Branch(3, (Branch(1), Branch(1, num_queries=3, num_own=9)))
STEPS = {
    "a prompt": [row(16, 16)],
    "a prompt with an end": [row(19, 19)],
    "several": [row(12, 12), row(15, 15), row(20, 20)],
    "mixed": [row(1, 33), row(16, 16), row(20, 83), row(13, 13), TREE, row(1, 5)],
    "short": [row(11, 11), row(1, 1)],
}
NUM_BEGUN = {"a prompt": 16, "a prompt with an end": 16, "several": 44, "mixed": 28, "short": 0}


def kernels_of(dtype: torch.dtype, choice: PrefillChoice = PLAIN) -> Kernels:
    """With the reference for the rest of a step in float64, the GPU's kernels in float32."""
    if dtype is torch.float64:
        return with_prefill_attention(device_kernels(dtype), choice)
    return with_prefill_attention(select_kernels(dtype, "cuda"), choice)


def run(
    kernels: Kernels,
    q: Tensor,
    kv_layer: KVLayer,
    rows: AttentionRows,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Tensor:
    plan = kernels.plan_attention(rows, kv_layer, q.shape[1], options)
    assert isinstance(plan, DevicePlan)
    lists = {name: torch.from_numpy(array.copy()) for name, array in plan.arrays.items()}
    return kernels.paged_attention(q, kv_layer, plan.bind(lists, torch.from_numpy(rows.page_table)))


def expected_of(
    q: Tensor, kv_layer: KVLayer, rows: AttentionRows, options: AttentionOptions = DEFAULT_OPTIONS
) -> Tensor:
    plan = reference.plan_attention(rows, kv_layer, q.shape[1], options)
    return reference.paged_attention(q, kv_layer, plan)


def queries(rows: AttentionRows, num_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """A slice of a layer's queries, keys and values."""
    torch.manual_seed(1)
    return torch.randn(int(rows.query_start[-1]), num_heads + 3, head_dim, dtype=dtype)[
        :, :num_heads
    ]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the prompts that torch's kernel computes."""
    lengths: list[int] = []
    attend = prefill_attention.attend_whole

    def noted(q: Tensor, *args: object) -> Tensor:
        lengths.append(len(q))
        return attend(q, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(prefill_attention, "attend_whole", noted)
    return lengths


@pytest.mark.parametrize(
    ("dtype", "num_heads", "num_kv_heads"),
    [(torch.float64, 4, 1), (torch.float64, 3, 3), (torch.float64, 6, 2), (torch.float32, 4, 2)],
)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_gives_what_the_reference_gives(
    step: str, dtype: torch.dtype, num_heads: int, num_kv_heads: int, asked: list[int]
) -> None:
    rows = rows_of(STEPS[step], 3)
    kv_layer = random_kv(rows, num_kv_heads, 16).to(dtype)
    q = queries(rows, num_heads, 16, dtype)
    found = run(kernels_of(dtype), q, kv_layer, rows)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-5
    torch.testing.assert_close(found, expected_of(q, kv_layer, rows), atol=tolerance, rtol=0)
    assert sum(asked) == NUM_BEGUN[step]


def test_a_prompt_gives_the_same_bits_whatever_is_beside_it() -> None:
    alone, among = rows_of([row(19, 19)], 4), rows_of([row(1, 33), row(19, 19), TREE], 4)
    kv_layer = random_kv(among, 2, 16)
    q = queries(among, 4, 16, torch.float32)
    first = slice(*among.query_start[1:3].tolist())
    alone = replace(alone, page_table=among.page_table, table_rows=among.table_rows[1:2])
    kernels = kernels_of(torch.float32)
    assert torch.equal(
        run(kernels, q, kv_layer, among)[first], run(kernels, q[first], kv_layer, alone)
    )


@pytest.mark.parametrize(
    "options",
    [AttentionOptions(window=9), AttentionOptions(chunk=8), AttentionOptions(soft_cap=2.0)],
)
def test_other_attention_stays_with_the_other_kernel(
    options: AttentionOptions, asked: list[int]
) -> None:
    rows = rows_of([row(16, 16), row(1, 5)], 4)
    q, kv_layer = queries(rows, 2, 16, torch.float32), random_kv(rows, 1, 16)
    found = run(kernels_of(torch.float32), q, kv_layer, rows, options)
    expected = expected_of(q, kv_layer, rows, options)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    in_8_bits = quantized(kv_layer, torch.int8)
    run(kernels_of(torch.float16), q.half(), in_8_bits, rows)
    assert asked == []


def test_the_scale_is_the_models(asked: list[int]) -> None:
    rows, options = rows_of([row(18, 18), row(1, 5)], 4), AttentionOptions(scale=0.7)
    q, kv_layer = queries(rows, 2, 16, torch.float32), random_kv(rows, 1, 16)
    found = run(kernels_of(torch.float32), q, kv_layer, rows, options)
    expected = expected_of(q, kv_layer, rows, options)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert asked


def test_a_step_with_prompts_is_not_captured() -> None:
    """Its lengths are no data; one without any is planned as ever."""
    kernels, own = kernels_of(torch.float32), select_kernels(torch.float32, "cuda")
    for step, num_begun in NUM_BEGUN.items():
        rows = rows_of(STEPS[step], 4)
        plan = kernels.plan_attention(rows, random_kv(rows, 2, 16), 4, padded_tokens=256)
        assert isinstance(plan, DevicePlan) and plan.is_replayable == (num_begun == 0)
        if plan.is_replayable:
            expected = own.plan_attention(rows, random_kv(rows, 2, 16), 4, padded_tokens=256)
            assert isinstance(expected, DevicePlan)
            shapes = {name: array.shape for name, array in plan.arrays.items()}
            assert shapes == {name: array.shape for name, array in expected.arrays.items()}


def test_what_torch_refuses_the_other_kernel_computes_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture, asked: list[int]
) -> None:
    """cuDNN's on a CPU: a backend that is not there."""
    kernels = kernels_of(torch.float64, replace(PLAIN, name="cuDNN", fused=cudnn_attention))
    rows = rows_of(STEPS["mixed"], 4)
    q, kv_layer = queries(rows, 4, 16, torch.float64), random_kv(rows, 2, 16).double()
    expected = expected_of(q, kv_layer, rows)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # of two layers' calls or steps
            found = run(kernels, q, kv_layer, rows)
            torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert asked == [16, 12]
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(",")[0] for text in said] == [
        "cuDNN refuses prompts of 16 tokens", "cuDNN refuses prompts of 12 tokens",
    ]  # fmt: skip


@pytest.mark.parametrize("fused", [cudnn_attention, flash_attention])
def test_torchs_kernel_is_called_as_it_is_declared_and_no_other_threads_attention_is_changed(
    fused: FusedAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tensors without memory: their shapes, strides and arguments are checked, nothing runs."""
    calls: list[tuple[str, dict[str, Any], bool]] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            is_plain_left = torch.backends.cuda.math_sdp_enabled()
            names = [each.name for each in func._schema.arguments]
            given = {**dict(zip(names, args)), **(kwargs or {})}
            calls.append((func._schema.name, given, is_plain_left))
            return func(*args, **(kwargs or {}))

    for name in ("can_use_cudnn_attention", "can_use_flash_attention"):
        monkeypatch.setattr(torch.backends.cuda, name, lambda *_: True)
    heads = torch.empty(24, 4 + 2 * 2, 16, dtype=torch.bfloat16, device="meta")
    q, keys = heads[:, :4].transpose(0, 1)[None], heads[:, 4:6].transpose(0, 1)[None]
    with Noting():
        out = fused(q, keys, keys, 0.5)
    assert out.shape == q.shape and out[0].transpose(0, 1).is_contiguous()
    ((name, options, is_plain_left),) = calls
    assert name.startswith("aten::_scaled_dot_product") and is_plain_left
    assert options["is_causal"] is True and options["scale"] == 0.5
    assert options.get("attn_bias") is None and not options.get("dropout_p")


def test_torch_is_asked_for_the_reasons_of_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_why: list[bool] = []

    def can_use(_: object, is_asked_why: bool) -> bool:
        asked_why.append(is_asked_why)
        return False

    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", can_use)
    q = torch.ones(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match="does not allow it"):
        flash_attention(q, q, q, None)
    assert asked_why == [False, True]


def test_memory_that_does_not_suffice_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("not enough")

    monkeypatch.setattr(prefill_attention, "attend_whole", no_memory)
    rows = rows_of(STEPS["a prompt"], 4)
    q, kv_layer = queries(rows, 4, 16, torch.float64), random_kv(rows, 2, 16).double()
    with pytest.raises(torch.OutOfMemoryError):
        run(kernels_of(torch.float64), q, kv_layer, rows)


def test_the_doctor_is_told_of_it() -> None:
    told = {c.op: c for c in kernels_of(torch.float32).describe()}["prefill_attention"]
    assert (told.implementation, told.reason) == (
        "torch", "torch's plain, of prompts from 12 tokens on",
    )  # fmt: skip
