"""Which kernels are chosen for a device, and what is said where they cannot be."""

from __future__ import annotations

import sys

import pytest
import torch

from stemma.errors import InvalidRequest
from stemma.kernels.registry import select_kernels
from stemma.kernels.triton import availability
from stemma.kernels.triton.availability import why_not_triton

LANGUAGE = "stemma.kernels.triton.language"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As on a machine with a GPU of capability 9.0, compiling."""
    monkeypatch.setattr(availability, "is_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return monkeypatch


def test_a_gpu_gets_tritons_kernels_and_a_cpu_only_where_asked(gpu: pytest.MonkeyPatch) -> None:
    assert why_not_triton("cuda", torch.bfloat16) is None
    chosen = {c.op: c for c in select_kernels(torch.float16, "cuda").describe()}
    assert chosen["rms_norm"].implementation == "triton"
    assert chosen["linear"].implementation == "torch" and "cuBLAS" in chosen["linear"].reason
    on_a_cpu = select_kernels(torch.float32, "cpu").describe()
    assert "triton" not in {c.implementation for c in on_a_cpu}
    assert [c.op for c in on_a_cpu] == list(chosen)


def test_the_interpreter_serves_both_devices_and_says_so() -> None:
    for device in ("cuda", "cpu"):
        choices = select_kernels(torch.float32, device, "triton").describe()
        norm = next(c for c in choices if c.op == "rms_norm")
        assert "interpreted" in norm.reason


def test_what_has_no_kernels_falls_back_to_the_reference_with_the_reason() -> None:
    choices = select_kernels(torch.float64, "cuda").describe()
    assert {c.implementation for c in choices} == {"reference"}
    assert all("float64" in c.reason for c in choices)
    asked_for = select_kernels(torch.bfloat16, "cuda", "reference").describe()
    assert {c.reason for c in asked_for} == {"asked for"}


def test_a_mode_that_cannot_run_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="float64"):
        select_kernels(torch.float64, "cuda", "triton")
    with pytest.raises(InvalidRequest, match="on cuda one of auto, triton, reference"):
        select_kernels(torch.float32, "cuda", "cpu")


def test_a_missing_or_old_triton_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from stemma.kernels.triton.language import triton

    monkeypatch.setattr(triton, "__version__", "3.5.1")
    assert "3.5.1 is too old" in (why_not_triton("cuda", torch.bfloat16) or "")
    monkeypatch.delitem(sys.modules, LANGUAGE)
    monkeypatch.setitem(sys.modules, "triton", None)
    reason = why_not_triton("cuda", torch.bfloat16)
    assert reason == "triton is not installed: pip install 'stemma-lm[gpu]'"
    assert not availability.is_interpreted()


def test_a_device_that_will_not_do_is_named(gpu: pytest.MonkeyPatch) -> None:
    assert "TRITON_INTERPRET=1" in (why_not_triton("cpu", torch.float32) or "")
    assert why_not_triton("meta", torch.float32) == "no Triton kernels for meta"
    gpu.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert why_not_triton("cuda", torch.float16) == "compute capability 7.5 is below 8.0 (Ampere)"
    gpu.setattr(torch.cuda, "is_available", lambda: False)
    gpu.setattr(torch.version, "cuda", None)
    assert "built without CUDA: pip install torch" in (why_not_triton("cuda", torch.float16) or "")
    gpu.setattr(torch.version, "cuda", "13.0")
    assert "nvidia-smi" in (why_not_triton("cuda", torch.float16) or "")


def test_the_interpreter_says_which_numpy_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability.np, "__version__", "2.4.1")
    assert "numpy<2.4" in (why_not_triton("cpu", torch.float32) or "")
