"""Programmatic dependent launch: a kernel is set up on the device while the one before it ends.

A launch that is dependent begins once every program of the kernel before it has let it, or has
ended; what that kernel wrote is to be seen behind a wait alone. One rule makes this right:

    `await_inputs` is the first thing that such a kernel does, in every program: it neither reads
    nor writes memory before.

So a kernel is done only when the one before it is, and whatever waits for the last of a chain, as
a launch that is not dependent does, waits for all. A kernel lets the next one begin right behind
its own wait: all its programs are on the device by then, so none of the next takes a place from
them, and no more than one kernel is ahead.

Compute capability 9.0 and above have it (PTX ISA, "griddepcontrol"). Off by default: what it saves,
and that graphs record it as launched, is to be measured (docs/how-it-works/gpu-execution.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from .device_multiprocessor import multiprocessor_of
from .language import tl, triton
from .multiprocessors import HOPPER

_IS_ON = ContextVar("dependent launches", default=False)


@contextmanager
def dependent_launches() -> Iterator[None]:
    """Within it, launches of this thread are dependent where the device has it, and so are those of
    graphs that are recorded within it."""
    token = _IS_ON.set(True)
    try:
        yield
    finally:
        _IS_ON.reset(token)


def launch_options(device: torch.device) -> dict[str, bool]:
    """What a kernel with `await_inputs` is launched with beside its own arguments."""
    if not _IS_ON.get() or triton.knobs.runtime.interpret:
        return {"IS_DEPENDENT": False}
    if multiprocessor_of(device).capability < HOPPER:
        return {"IS_DEPENDENT": False}
    return {"IS_DEPENDENT": True, "launch_pdl": True}


@triton.jit
def await_inputs(IS_DEPENDENT: tl.constexpr):
    """First of all in a kernel: wait for the one before it, then let the next one begin."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
