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
    """`device` is where kernels are chosen for and tensors of the engine lie; without a GPU the
    interpreter's tensors lie on the CPU (`tensors`)."""

    device: str  # "cuda" or "cpu"
    sizes: Sizes
    ceilings: Ceilings
    peer_python: str | None = None  # of the peer's environment; None: no peer
    shard: tuple[int, int] = (0, 1)  # which of how many processes that share the section

    @property
    def has_gpu(self) -> bool:
        """Whether times are a device's."""
        return self.tensors.type == "cuda"

    @cached_property
    def tensors(self) -> torch.device:
        """Where tensors lie."""
        is_gpu = self.device == "cuda" and torch.cuda.is_available() and not is_interpreted()
        return torch.device("cuda" if is_gpu else "cpu")

    @cached_property
    def dtype(self) -> torch.dtype:
        """bfloat16; float32 where there is no GPU: the interpreter computes bfloat16 wrongly."""
        return torch.bfloat16 if self.has_gpu else torch.float32

    @cached_property
    def kernels(self) -> Kernels:
        """Of `dtype`."""
        return self.kernels_of(self.dtype)

    def kernels_of(self, dtype: torch.dtype) -> Kernels:
        """The kernels that the engine takes on this device."""
        return select_kernels(dtype, self.device)

    @cached_property
    def timer(self) -> Timer:
        """Of `tensors`."""
        return Timer(self.tensors, self.sizes.repeats)

    def random(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> torch.Tensor:
        """Normal numbers."""
        generator = torch.Generator(self.tensors).manual_seed(seed)
        dtype = dtype or self.dtype
        return torch.randn(shape, dtype=dtype, device=self.tensors, generator=generator)


Section = Callable[[Context], Iterator[Row]]
