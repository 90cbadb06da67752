"""Launches that compile and do not run: makes the code for a GPU on a machine without one.

Inside `offline()` a launch compiles its kernel for a GPU (Hopper's sm_90) and returns; tensors are
on the CPU and are neither read nor written, so that big ones cost no memory (`torch.empty`).
Compilation uses the launching function's own block sizes, warps and stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..language import triton
from ..multiprocessors import HOPPER

INTERPRETED = "TRITON_INTERPRET is set: kernels of this process are interpreted, not compiled"

_DEVICE = -1  # no device has this index: code compiled for a real one is not affected


class _OfflineDriver:
    """The parts of a driver that compilation needs."""

    def __init__(self, capability: int) -> None:
        self._target = triton.backends.compiler.GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return _DEVICE

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def why_not_compiled() -> str | None:
    """Why nothing can be compiled here, or None."""
    if triton.knobs.runtime.interpret:
        return INTERPRETED
    try:
        triton.knobs.nvidia.ptxas.path, triton.knobs.nvidia.cuobjdump.path  # noqa: B018
    except RuntimeError as error:
        return f"triton {triton.__version__} has no assembler for this platform: {error}"
    return None


@contextmanager
def offline(capability: int = HOPPER) -> Iterator[list[Any]]:
    """The list receives triton's CompiledKernel of each launch, in order. capability: 10 * major +
    minor of the GPU.

    Without the sources' lines, which change no instruction and take a seventh of the time. Not for
    use beside launches of other threads. Raises RuntimeError if kernels are interpreted.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError(INTERPRETED)
    compiled: list[Any] = []
    run = triton.runtime.jit.JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.append(run(kernel, *args, grid=grid, warmup=True, **options))
        return compiled[-1]

    active, has_no_lines = triton.runtime.driver._active, triton.knobs.compilation.disable_line_info
    triton.runtime.driver.set_active(_OfflineDriver(capability))
    triton.runtime.jit.JITFunction.run = compile_only
    triton.knobs.compilation.disable_line_info = True
    try:
        yield compiled
    finally:
        triton.knobs.compilation.disable_line_info = has_no_lines
        triton.runtime.jit.JITFunction.run = run
        triton.runtime.driver._active = active
