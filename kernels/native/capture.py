"""A forward pass of kernel calls, recorded once and then run in one call.

What a CUDA graph is on a GPU: the same kernels at the same addresses. Only the attention plan is
another in each replay. It saves the time between the kernels: at batch 1 the interpreter's code and
data have been pushed out of the caches by the weights whenever it gets its turn again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .bindings import library
from .calls import Call, recorded
from .paged_attention import NativeAttentionPlan

_NUM_ARGS = 10  # src/capture.cpp
# What torch may do during a recording: allocate and look at memory in another shape. A result that
# torch computes would be missing from the replay.
_ALLOWED = frozenset(
    f"aten::{name}"
    for name in (
        "alias", "as_strided", "detach", "empty", "empty_like", "expand", "permute", "reshape",
        "select", "slice", "squeeze", "transpose", "unbind", "unsqueeze", "_unsafe_view", "view",
    )
)  # fmt: skip


def capture(run: Callable[[], Tensor]) -> tuple[Tensor, Recording | None]:
    watch = _Watch()
    with recorded() as calls, watch:
        result = run()
    return result, None if watch.has_computed else Recording(result, calls, watch.results)


class Recording:
    """The calls that a function made. Owns the memory that was allocated for them."""

    def __init__(self, result: Tensor, calls: list[Call], kept: list[Any]) -> None:
        self.result = result
        self._kept = kept
        self._calls = np.zeros((len(calls), 1 + _NUM_ARGS), dtype=np.int64)
        for index, call in enumerate(calls):
            self._calls[index, : len(call)] = call

    def replay(self, plan: object) -> None:
        """See `ops.Captured`."""
        assert isinstance(plan, NativeAttentionPlan), "recorded with a plan of this backend"
        library().stemma_replay(self._calls.ctypes.data, len(self._calls), plan.address)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what torch allocates and notes what it computes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: list[Any] = []
        self.has_computed = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name not in _ALLOWED:
            self.has_computed = True
        self.results.append(result)
        return result
