"""A device that works beside the host: work is queued on it, and the host goes on.

Two kinds. `CudaAccelerator` is a GPU: everything is queued on one stream of its own, so work runs
in the order in which it was queued, and one step's tensors may be reused by the next. In
`InterpretedAccelerator` (Triton's interpreter, on a machine without a GPU) tensors lie on the CPU
and everything is done when the call returns. The rest of the device half does not know which it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from ...errors import InvalidRequest
from ...kernels.triton.availability import is_interpreted, why_no_cuda
from ..memory.sizing import available_memory_bytes

log = logging.getLogger(__name__)


class Event(Protocol):
    """A moment in the order of the queued work."""

    def wait(self) -> None:
        """Block the host until all work that was queued before it is done."""

    def seconds_since(self, earlier: Event) -> float:
        """Between two moments that have both passed."""


class Accelerator(Protocol):
    """What the device half needs of a device. One thread at a time."""

    device: torch.device  # where its tensors lie

    @property
    def is_interpreted(self) -> bool:
        """Whether kernels run in Triton's interpreter."""

    def queue(self) -> AbstractContextManager[None]:
        """Within it, torch and the kernels queue their work on this accelerator's stream."""

    def pinned(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 of host memory that copies run from and to beside the host."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between pinned memory and the device, of one dtype and shape."""

    def event(self) -> Event:
        """The moment after all that was queued so far."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Do `run` once, and record it: what is returned queues the same work again, over the same
        tensors, in one launch (or, where it cannot be recorded, in as many as `run` does). All
        tensors that `run` makes stay within it."""

    def available_bytes(self) -> int:
        """Memory that may still be taken on the device."""


def accelerator_for(device: str) -> Accelerator:
    """Of "cuda" or "cuda:N".

    Raises InvalidRequest where there is no such device.
    """
    if is_interpreted():
        return InterpretedAccelerator()
    missing = why_no_cuda()
    if missing is not None:
        raise InvalidRequest.of(
            "device", device, f"cpu; {missing} (TRITON_INTERPRET=1 runs its kernels on a CPU)"
        )
    num_devices, wanted = torch.cuda.device_count(), torch.device(device)
    if wanted.index is not None and wanted.index >= num_devices:
        raise InvalidRequest.of("device", device, f"cuda:0 to cuda:{num_devices - 1}, or cpu")
    return CudaAccelerator(wanted)


class CudaAccelerator:
    """A GPU, through one stream and one pool of memory for all its graphs.

    NOTE: graphs share their memory, so what a graph leaves must be used before the next is run.
    """

    is_interpreted = False

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", device.index or 0)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device):
            self._graph_memory = torch.cuda.graph_pool_handle()

    @contextmanager
    def queue(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def event(self) -> CudaEvent:
        return CudaEvent(self._stream)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        # The first run compiles kernels and makes cuBLAS's workspaces, which a capture may not; its
        # results are the step's.
        run()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile (copies between tiers).
        record = torch.cuda.graph(
            graph, pool=self._graph_memory, stream=self._stream, capture_error_mode="thread_local"
        )
        try:
            with record:
                run()
        except RuntimeError as error:  # no memory left for it, or a call that waits
            log.warning("a step cannot be recorded, its launches are made one by one: %s", error)
            return run
        return graph.replay

    def available_bytes(self) -> int:
        self._stream.synchronize()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        return free


class CudaEvent:
    """A moment on a stream, recorded when made."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        # Asked first: a wait is then always a wait, also to who counts them in a profile.
        if not self._event.query():  # type: ignore[no-untyped-call]
            self._event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent)
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1000


class InterpretedAccelerator:
    """The CPU, where Triton's interpreter runs the kernels: nothing is ever pending."""

    is_interpreted = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    @contextmanager
    def queue(self) -> Iterator[None]:
        yield

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
    """The moment at which it was made."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def wait(self) -> None:
        """It has passed."""

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, PassedEvent)
        return self._at_s - earlier._at_s
