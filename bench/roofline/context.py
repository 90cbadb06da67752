"""What every section of a GPU run is given: the device, the kernels, the sizes, the ceilings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from ...kernels.registry import Kernels, select_kernels
from ...kernels.triton.availability import is_interpreted
from .ceilings import Ceilings
from .rows import Row
from .sizes import Sizes
from .timing import Timer


@dataclass(frozen=True)
class Context:
    """`device` selects the kernels and places the engine's tensors; without a GPU the interpreter's
    tensors are on the CPU (`tensors`)."""

    device: str  # "cuda" or "cpu"
    sizes: Sizes
    ceilings: Ceilings
    peer_python: str | None = None  # of the peer's environment; None: no peer
    shard: tuple[int, int] = (0, 1)  # index and number of processes sharing the section

    @property
    def has_gpu(self) -> bool:
        """Whether times are a device's."""
        return self.tensors.type == "cuda"

    @cached_property
    def tensors(self) -> torch.device:
        """The device of the tensors."""
        is_gpu = self.device == "cuda" and torch.cuda.is_available() and not is_interpreted()
        return torch.device("cuda" if is_gpu else "cpu")

    @cached_property
    def dtype(self) -> torch.dtype:
        """bfloat16; float32 without a GPU: the interpreter computes bfloat16 wrongly."""
        return torch.bfloat16 if self.has_gpu else torch.float32

    @cached_property
    def kernels(self) -> Kernels:
        """The kernels for `dtype`."""
        return self.kernels_of(self.dtype)

    def kernels_of(self, dtype: torch.dtype) -> Kernels:
        """The kernels that the engine uses on this device."""
        return select_kernels(dtype, self.device)

    @cached_property
    def timer(self) -> Timer:
        """A timer for `tensors`."""
        return Timer(self.tensors, self.sizes.repeats)

    def random(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> torch.Tensor:
        """Normally distributed numbers."""
        generator = torch.Generator(self.tensors).manual_seed(seed)
        dtype = dtype or self.dtype
        return torch.randn(shape, dtype=dtype, device=self.tensors, generator=generator)


Section = Callable[[Context], Iterator[Row]]
