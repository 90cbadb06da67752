"""Low-rank adapters for few tokens, in one call a layer; the C++ is in src/lora.cpp.

torch's products in bfloat16 cost 17 to 25 us each before they begin, but are faster for long runs
of tokens of one adapter. Measured (AMD EPYC with AVX512-BF16, one thread, rank 16, the
four linear layers of a llama-160m layer, us in all, compiled and torch): 1 token 43 and 290,
8 tokens of 8 adapters 299 and 2572, 32 of one 378 and 392, 64 of one 743 and 493.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..cpu import lora as cpu
from ..ops import Lora
from .calls import kernel

_MAX_TOKENS = 32  # of a run: see above
_MAX_MODULES = 4  # src/native.h


class _LoraTables(ctypes.Structure):
    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("num_inputs", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("num_modules", ctypes.c_int64),
        ("ends", ctypes.c_int64 * _MAX_MODULES),
    )


class _LoraRuns(ctypes.Structure):
    _fields_ = (("runs", ctypes.c_void_p), ("num_runs", ctypes.c_int64))


class NativeLoraPlan:
    """Short runs of tokens as src/lora.cpp reads them, long ones for torch."""

    def __init__(self, short: Sequence[tuple[int, int, int]], long: cpu.LoraRuns) -> None:
        self.short = np.array(short, dtype=np.int64).reshape(-1, 3)  # slot, first token, end
        self.long = long
        self._record = _LoraRuns(self.short.ctypes.data, len(short))
        self.address = ctypes.addressof(self._record)


def plan_lora(
    slots: npt.NDArray[np.int32], num_slots: int, padded_tokens: int | None = None
) -> NativeLoraPlan:
    runs = cpu.plan_lora(slots, num_slots).runs
    short = [run for run in runs if run[2] - run[1] <= _MAX_TOKENS]
    long = tuple(run for run in runs if run[2] - run[1] > _MAX_TOKENS)
    return NativeLoraPlan(short, cpu.LoraRuns(long))


def plan_fixed_lora(
    slots: npt.NDArray[np.int32], num_slots: int, padded_tokens: int | None = None
) -> NativeLoraPlan:
    """Runs of any length by the compiled kernel, whose result for a token is the same in all."""
    return NativeLoraPlan(cpu.plan_lora(slots, num_slots).runs, cpu.LoraRuns(()))


def make_lora(a: Tensor, b: Tensor, out_features: Sequence[int]) -> Lora:
    """`y` may also be float32."""
    if not can_run(b, out_features):
        by_torch = cpu.make_lora(a, b, out_features)
        return lambda x, y, plan: by_torch(x, y, _all_runs(plan))
    return _Native(a, b, out_features)


def can_run(b: Tensor, out_features: Sequence[int]) -> bool:
    """Whether the compiled kernel takes these tables."""
    return b.dtype is torch.bfloat16 and b.shape[2] % 2 == 0 and len(out_features) <= _MAX_MODULES


class _Native:
    """Owns the record of pointers into the tables; the C++ receives its address."""

    def __init__(self, a: Tensor, b: Tensor, out_features: Sequence[int]) -> None:
        self._long = cpu.make_lora(a, b, out_features)
        ends = (ctypes.c_int64 * _MAX_MODULES)(*accumulate(out_features))
        self._record = _LoraTables(
            a.data_ptr(), b.data_ptr(), a.shape[2], b.shape[2], len(out_features), ends
        )
        self._address = ctypes.addressof(self._record)
        self._tables = (a, b)
        self._run = kernel("stemma_lora")

    def __call__(self, x: Tensor, y: Tensor, plan: object) -> None:
        assert isinstance(plan, NativeLoraPlan), "a plan of this backend"
        assert x.is_contiguous() and y.is_contiguous()
        if len(plan.short):
            is_float = y.dtype is torch.float32
            self._run(plan.address, self._address, x.data_ptr(), y.data_ptr(), is_float)
        if plan.long.runs:
            self._long(x, y, plan.long)


def _all_runs(plan: object) -> cpu.LoraRuns:
    assert isinstance(plan, NativeLoraPlan), "a plan of this backend"
    short = tuple((slot, first, end) for slot, first, end in plan.short.tolist())
    return cpu.LoraRuns((*short, *plan.long.runs))
