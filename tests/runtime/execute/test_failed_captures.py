"""What a GPU's accelerator does where a step cannot be recorded, with torch's calls replaced: one
invalidated capture leaves torch's allocator within the graph's pool."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from stemma.runtime.execute.accelerator import MAX_FAILED_CAPTURES, CudaAccelerator


class FakeCuda:
    """Records as torch does, and counts; a run within a capture raises what `error` is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: str | None = None
        self.ends_fail = False
        self.sync_error: str | None = None
        self.recorded_in: list[int] = []  # pools
        self.within: int | None = None  # the pool that the allocator is in
        self._num_pools = 0
        stream = SimpleNamespace(synchronize=self._synchronize)
        fakes = {
            "Stream": lambda device: stream,
            "device": lambda device: nullcontext(),
            "graph_pool_handle": self._new_pool,
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "graph": self._graph,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self._leave, raising=False)

    def _new_pool(self) -> int:
        self._num_pools += 1
        return self._num_pools

    def _synchronize(self) -> None:
        if self.sync_error is not None:
            raise RuntimeError(self.sync_error)

    def _leave(self, device: int, pool: int) -> None:
        if self.within != pool:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.within = None

    def _graph(self, graph: object, *, pool: int, **_: object) -> _Capture:
        self.recorded_in.append(pool)
        return _Capture(self, pool)

    @property
    def is_capturing(self) -> bool:
        return self.within is not None


class _Capture:
    def __init__(self, cuda: FakeCuda, pool: int) -> None:
        self._cuda, self._pool = cuda, pool

    def __enter__(self) -> None:
        assert self._cuda.within is None, "the allocator is still in another pool"
        self._cuda.within = self._pool

    def __exit__(self, *error: object) -> None:
        if self._cuda.ends_fail:
            raise RuntimeError("operation failed due to a previous error during capture")
        self._cuda.within = None


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def step_of(cuda: FakeCuda) -> tuple[Callable[[], None], list[bool]]:
    """A step, and of each time that it ran whether it was recorded."""
    ran: list[bool] = []

    def run() -> None:
        ran.append(cuda.is_capturing)
        if cuda.is_capturing and cuda.error is not None:
            raise RuntimeError(cuda.error)

    return run, ran


@pytest.mark.parametrize("ends_fail", [True, False])
def test_a_capture_that_fails_leaves_the_pool_and_the_next_one_has_its_own(
    cuda: FakeCuda, ends_fail: bool
) -> None:
    accelerator = CudaAccelerator(torch.device("cuda:0"))
    run, ran = step_of(cuda)
    cuda.error, cuda.ends_fail = "out of memory", ends_fail
    assert accelerator.capture(run) is run
    assert ran == [False, True]
    assert not cuda.is_capturing, "later allocations come from outside the graph's pool"
    cuda.error, cuda.ends_fail = None, False
    assert accelerator.capture(run) is not run
    assert len(set(cuda.recorded_in)) == 2


def test_behind_two_failures_nothing_is_recorded_and_steps_still_run(cuda: FakeCuda) -> None:
    accelerator = CudaAccelerator(torch.device("cuda:0"))
    run, ran = step_of(cuda)
    cuda.error = "a call that waits"
    for _ in range(MAX_FAILED_CAPTURES):
        assert accelerator.capture(run) is run
    cuda.error = None
    assert accelerator.capture(run) is run
    assert len(cuda.recorded_in) == MAX_FAILED_CAPTURES
    assert ran == [False, True] * MAX_FAILED_CAPTURES + [False]


def test_an_error_of_the_device_is_not_taken_for_one_of_recording(cuda: FakeCuda) -> None:
    accelerator = CudaAccelerator(torch.device("cuda:0"))
    run, _ = step_of(cuda)
    cuda.error = cuda.sync_error = "an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        accelerator.capture(run)
