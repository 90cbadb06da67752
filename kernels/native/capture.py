"""A forward pass of kernel calls, recorded once and then run in one call.

The CPU's counterpart of a CUDA graph: the same kernels at the same addresses. Only the plans of
attention and adapters differ in each replay. It saves the time between the kernels: at batch 1 the
weights have evicted the interpreter's code and data from the caches whenever it runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..ops import Captured
from .bindings import library
from .calls import ATTENTION, LORA, Call, recorded
from .lora import NativeLoraPlan
from .paged_attention import NativeAttentionPlan

_NUM_ARGS = 13  # src/capture.cpp
_ALIGNMENT = 64  # a cache line, and a register
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
    run: Callable[[], Tensor],
    plans: Sequence[object],
    lora_plan: object | None = None,
    *,
    outputs: Callable[[], Sequence[Tensor]] = tuple,
    beside: Captured | None = None,
) -> tuple[Tensor, Recording | None]:
    watch = _Watch()
    with recorded() as calls, watch:
        result = run()
    if watch.has_computed or not all(isinstance(plan, NativeAttentionPlan) for plan in plans):
        return result, None
    assert beside is None or isinstance(beside, Recording), "a recording of this backend"
    return result, Recording(result, calls, watch.allocated, plans, outputs(), beside)


class Recording:
    """The calls that a function made. What it allocated and nobody reads afterwards shares memory,
    with itself and with the recording beside it."""

    def __init__(
        self,
        result: Tensor,
        calls: list[Call],
        allocated: Sequence[Tensor],
        plans: Sequence[object],
        outputs: Sequence[Tensor],
        beside: Recording | None,
    ) -> None:
        self.result = result
        self._calls = np.zeros((len(calls), 1 + _NUM_ARGS), dtype=np.int64)
        for index, call in enumerate(calls):
            self._calls[index, : len(call)] = call
        self._attentions = np.flatnonzero(self._calls[:, 0] == ATTENTION)
        plan_of = {address: index for index, address in enumerate(_addresses(plans))}
        used = self._calls[self._attentions, _PLAN].tolist()
        self._plan_of_attention = np.array([plan_of[address] for address in used], dtype=np.int64)
        self._loras = np.flatnonzero(self._calls[:, 0] == LORA)
        self.scratch: Tensor | None = None if beside is None else beside.scratch
        self._kept = self._share_memory(allocated, (result, *outputs))

    def _share_memory(self, allocated: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
        """Give what is needed from one call to another a place in the scratch. -> what stays."""
        ends = {_start(each) for each in outputs}
        blocks = sorted((each for each in allocated if each.nbytes), key=_start)
        starts = np.array([_start(each) for each in blocks], dtype=np.int64)
        sizes = np.array([each.untyped_storage().nbytes() for each in blocks], dtype=np.int64)
        if not len(blocks):
            return []
        addresses = self._calls[:, 1:]
        block_of = np.searchsorted(starts, addresses, side="right") - 1
        is_inside = (block_of >= 0) & (addresses < (starts + sizes)[block_of])
        uses: dict[int, list[int]] = {}
        for call, argument in np.argwhere(is_inside).tolist():
            uses.setdefault(int(block_of[call, argument]), []).append(call)
        for block in [each for each in uses if int(starts[each]) in ends]:
            del uses[block]
        places, size = _places({each: (calls[0], calls[-1]) for each, calls in uses.items()}, sizes)
        if self.scratch is None or len(self.scratch) < size:
            self.scratch = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8)
        shift = np.zeros(len(blocks), dtype=np.int64)
        for block, place in places.items():
            shift[block] = self.scratch.data_ptr() + place - starts[block]
        addresses[is_inside] += shift[block_of[is_inside]]
        return [each for index, each in enumerate(blocks) if index not in places]

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


def _start(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _places(
    lives: Mapping[int, tuple[int, int]], sizes: npt.NDArray[np.int64]
) -> tuple[dict[int, int], int]:
    """lives: by block, the first and the last call that takes it; sizes: of all blocks, in bytes.
    -> by block, a place that no other has at the same time, and how many bytes all take."""
    places: dict[int, int] = {}
    for block, (first, last) in sorted(lives.items(), key=lambda item: item[1]):
        taken = sorted(
            (places[each], places[each] + int(sizes[each]))
            for each in places
            if lives[each][1] >= first and lives[each][0] <= last
        )
        place = 0
        for start, end in taken:
            if start - place >= sizes[block]:
                break
            place = max(place, -(-end // _ALIGNMENT) * _ALIGNMENT)
        places[block] = place
    return places, max((place + int(sizes[each]) for each, place in places.items()), default=1)


class _Watch(TorchFunctionMode):
    """Keeps torch's allocations alive and notes whether it computes.

    (A TorchDispatchMode would see more, but imports sympy when first used: 1.2 s of every start.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []
        self.has_computed = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _ALLOCATING:
            self.allocated.append(result)
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
