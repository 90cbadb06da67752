"""A device that works asynchronously: the host queues work on it and goes on.

Two kinds. `CudaAccelerator` is a GPU: steps are queued on one stream of its own, so work runs in
the order in which it was queued, and the next step may reuse one step's tensors; copies between
tiers have a second stream, beside the steps. In `InterpretedAccelerator` (Triton's interpreter, on
a machine without a GPU) tensors are on the CPU and everything is done when the call returns. The
rest of the device half does not know which it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

import torch
from torch import Tensor

from ...errors import InvalidRequest
from ...kernels.triton.availability import is_interpreted, why_no_cuda
from ..memory.asynchronous_transfer import Moment
from ..memory.sizing import available_memory_bytes

log = logging.getLogger(__name__)

MAX_FAILED_CAPTURES = 2  # behind which nothing is recorded any more


class Event(Protocol):
    """A point in the order of the queued work."""

    def wait(self) -> None:
        """Block the host until all work queued before is done."""

    def seconds_since(self, earlier: Event) -> float:
        """Seconds between two events that have both passed."""


class Accelerator(Protocol):
    """What the device half needs of a device. Used by one thread at a time."""

    device: torch.device  # of its tensors

    @property
    def is_interpreted(self) -> bool:
        """Whether kernels run in Triton's interpreter."""

    def queue(self) -> AbstractContextManager[None]:
        """Within it, torch and the kernels queue their work on this accelerator's stream."""

    def copying(self) -> AbstractContextManager[None]:
        """Within it, and within `queue`, work is queued in an order of its own, beside the rest."""

    def hold_for(self, event: Moment) -> None:
        """What is queued from now on is done after what was queued before the event."""

    def pinned(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 of host memory that asynchronous copies can use."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between pinned memory and the device, of one dtype and shape."""

    def event(self) -> Event:
        """The point after all work queued so far, in the order in which work is being queued."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run `run` once and record it. The result queues the same work again, over the same
        tensors, in one launch (or, where it cannot be recorded, in as many as `run` makes). All
        tensors that `run` creates stay within it."""

    def available_bytes(self) -> int:
        """Memory that may still be allocated on the device."""


def accelerator_for(device: str) -> Accelerator:
    """The accelerator named "cuda" or "cuda:N".

    Raises InvalidRequest where there is no such device.
    """
    require_devices(device)
    return InterpretedAccelerator() if is_interpreted() else CudaAccelerator(torch.device(device))


def require_devices(device: str, count: int = 1) -> None:
    """Raises InvalidRequest unless there are so many accelerators from this one on."""
    if is_interpreted():
        return
    missing = why_no_cuda()
    if missing is not None:
        allowed = f"cpu; {missing} (TRITON_INTERPRET=1 runs its kernels on a CPU)"
        raise InvalidRequest.of("device", device, allowed)
    last = torch.cuda.device_count() - count
    if last < 0:
        allowed = f"cpu: {count} processes need a GPU each, and there are {last + count}"
        raise InvalidRequest.of("device", device, allowed)
    if (torch.device(device).index or 0) > last:
        raise InvalidRequest.of("device", device, f"cuda:0 to cuda:{last}, or cpu")


class CudaAccelerator:
    """A GPU, with a stream for steps, one for copies, and one memory pool for all its graphs.

    NOTE: graphs share their memory, so a graph's results must be used before the next one runs.
    """

    is_interpreted = False

    def __init__(self, device: torch.device) -> None:
        self._num_failed_captures = 0
        self.device = torch.device("cuda", device.index or 0)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device):
            self._graph_memory = torch.cuda.graph_pool_handle()

    @contextmanager
    def queue(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        with torch.cuda.stream(self._copies):
            yield

    def hold_for(self, event: Moment) -> None:
        assert isinstance(event, CudaEvent)
        event.hold(torch.cuda.current_stream(self.device))

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def event(self) -> CudaEvent:
        return CudaEvent(torch.cuda.current_stream(self.device))

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        # The first run compiles kernels and creates cuBLAS's workspaces, which a capture may not;
        # it produces the step's results.
        run()
        if self._num_failed_captures >= MAX_FAILED_CAPTURES:
            return run
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile (copies between tiers).
        record = torch.cuda.graph(
            graph, pool=self._graph_memory, stream=self._stream, capture_error_mode="thread_local"
        )
        try:
            with record:
                run()
        except RuntimeError as error:  # out of memory, or a call that waits
            log.warning("a step cannot be recorded, its launches are made one by one: %s", error)
            self._recover()
            return run
        return graph.replay

    def _recover(self) -> None:
        """Go on behind a capture that has failed. Raises RuntimeError where the device has."""
        self._num_failed_captures += 1
        # Ending an invalidated capture fails before the allocator leaves the graph's pool, and all
        # that is allocated later would come from there. One that ended is left already.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device.index, self._graph_memory)
        with torch.cuda.device(self.device):
            self._graph_memory = torch.cuda.graph_pool_handle()
        self._stream.synchronize()
        if self._num_failed_captures == MAX_FAILED_CAPTURES:
            log.warning("no more steps are recorded: %d could not be", MAX_FAILED_CAPTURES)

    def available_bytes(self) -> int:
        self._stream.synchronize()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        return free


class CudaEvent:
    """A point on a stream, recorded at construction."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let the stream's later work wait for it, on the device."""
        stream.wait_event(self._event)

    def wait(self) -> None:
        # Queried first, so that a profile counts a wait only where the host really waits.
        if not self._event.query():  # type: ignore[no-untyped-call]
            self._event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent)
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1000


class InterpretedAccelerator:
    """The CPU, on which Triton's interpreter runs the kernels: nothing is ever pending."""

    is_interpreted = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    @contextmanager
    def queue(self) -> Iterator[None]:
        yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        yield

    def hold_for(self, event: Moment) -> None:
        """Nothing to wait for: it has passed."""

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def event(self) -> PassedEvent:
        return PassedEvent()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    def available_bytes(self) -> int:
        return available_memory_bytes()


class PassedEvent:
    """The time of its construction."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def wait(self) -> None:
        """Returns at once: it has passed."""

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, PassedEvent)
        return self._at_s - earlier._at_s
