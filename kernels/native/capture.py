"""A forward pass of kernel calls, recorded once and then run in one call.

The CPU's counterpart of a CUDA graph: the same kernels at the same addresses. Only the plans of
attention and adapters differ in each replay. It saves the time between the kernels: at batch 1 the
weights have evicted the interpreter's code and data from the caches whenever it runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .bindings import library
from .calls import ATTENTION, LORA, Call, recorded
from .lora import NativeLoraPlan
from .paged_attention import NativeAttentionPlan

_NUM_ARGS = 13  # src/capture.cpp
_PLAN = 1  # the column of a plan, its call's first argument
# What torch may do during a recording: allocate, view memory in another shape, and return values. A
# result that torch computes would be missing from the replay.
_ALLOCATING = frozenset({"empty", "empty_like"})
_VIEWING = frozenset(
    {"__getitem__", "contiguous", "expand", "permute", "reshape", "squeeze", "transpose", "unbind",
     "unsqueeze", "view"}
)  # fmt: skip
_ANSWERING = frozenset(
    {"__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "numel", "size",
     "stride"}
)  # fmt: skip


def capture(
    run: Callable[[], Tensor], plans: Sequence[object], lora_plan: object | None = None
) -> tuple[Tensor, Recording | None]:
    watch = _Watch()
    with recorded() as calls, watch:
        result = run()
    if watch.has_computed or not all(isinstance(plan, NativeAttentionPlan) for plan in plans):
        return result, None
    return result, Recording(result, calls, watch.results, plans)


class Recording:
    """The calls that a function made. Owns the memory that was allocated for them."""

    def __init__(
        self, result: Tensor, calls: list[Call], kept: list[Any], plans: Sequence[object]
    ) -> None:
        self.result = result
        self._kept = kept
        self._calls = np.zeros((len(calls), 1 + _NUM_ARGS), dtype=np.int64)
        for index, call in enumerate(calls):
            self._calls[index, : len(call)] = call
        self._attentions = np.flatnonzero(self._calls[:, 0] == ATTENTION)
        plan_of = {address: index for index, address in enumerate(_addresses(plans))}
        used = self._calls[self._attentions, _PLAN].tolist()
        self._plan_of_attention = np.array([plan_of[address] for address in used], dtype=np.int64)
        self._loras = np.flatnonzero(self._calls[:, 0] == LORA)

    def replay(self, plans: Sequence[object], lora_plan: object | None = None) -> None:
        """See `ops.Captured`."""
        addresses = np.array(_addresses(plans), dtype=np.int64)
        self._calls[self._attentions, _PLAN] = addresses[self._plan_of_attention]
        if len(self._loras):
            assert isinstance(lora_plan, NativeLoraPlan), "a plan of this backend"
            assert not lora_plan.long.runs, "torch's products are not recorded"
            self._calls[self._loras, _PLAN] = lora_plan.address
        library().stemma_replay(self._calls.ctypes.data, len(self._calls))


def _addresses(plans: Sequence[object]) -> list[int]:
    assert all(isinstance(plan, NativeAttentionPlan) for plan in plans), "plans of this backend"
    return [plan.address for plan in plans if isinstance(plan, NativeAttentionPlan)]


class _Watch(TorchFunctionMode):
    """Keeps torch's allocations alive and notes whether it computes.

    (A TorchDispatchMode would see more, but imports sympy when first used: 1.2 s of every start.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []
        self.has_computed = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _ALLOCATING:
            self.results.append(result)
        elif name in _VIEWING:
            self.has_computed |= not _is_view(result, args[0])
        elif name not in _ANSWERING:
            self.has_computed = True
        return result


def _is_view(result: Tensor | tuple[Tensor, ...], of: Tensor) -> bool:
    """Whether it uses only memory of `of`."""
    storage = of.untyped_storage().data_ptr()
    results = result if isinstance(result, tuple) else (result,)
    return all(each.untyped_storage().data_ptr() == storage for each in results)
