"""The multiprocessor of a tensor's device."""

from __future__ import annotations

from functools import lru_cache

import torch

from .language import triton
from .multiprocessors import HOPPER, MULTIPROCESSORS, Multiprocessor, of_capability


def multiprocessor_of(device: torch.device) -> Multiprocessor:
    """Where kernels are compiled for another GPU, that one's; Hopper's where they are
    interpreted."""
    if device.type == "cuda":
        return _of_gpu(device)
    if triton.knobs.runtime.interpret:
        return MULTIPROCESSORS[HOPPER]
    return of_capability(int(triton.runtime.driver.active.get_current_target().arch))


@lru_cache
def _of_gpu(device: torch.device) -> Multiprocessor:
    major, minor = torch.cuda.get_device_capability(device)
    return of_capability(10 * major + minor)
