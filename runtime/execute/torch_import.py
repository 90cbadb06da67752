"""Imports torch without half of it: what an engine does not need is loaded when it is asked for.

An engine computes; it neither trains nor traces. Three things of `import torch` wait or fall away:

- `_LATER`: packages that torch itself does not need yet. Whoever reads an attribute loads them.
- `_SHAPES`, and with it `torch._decomp` and `torch._refs`: the shapes that some thousand operators
  give, in Python, for `torch.compile`, fake tensors and tensors of the device "meta". Torch expects
  it to be there without asking, so the first of the tracers has it loaded.
- `inspect.getmodule`: torch asks where two of its lines are, and `inspect` resolves the paths of
  all modules, only to read the lines through one of them. Its reading of `_LATER` would load them.

Most of what is left is `libtorch_cpu.so`: `preload_torch` has the linker relocate it meanwhile.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader, find_spec
from pathlib import Path
from threading import Thread
from types import ModuleType

_LATER = (
    "torch.distributions", "torch.export", "torch.masked", "torch.nn.intrinsic", "torch.nn.qat",
    "torch.profiler", "torch.quantization", "torch.utils.data",
)  # fmt: skip
_SHAPES = "torch._meta_registrations"
_TRACERS = ("torch._dynamo", "torch._decomp", "torch._prims", "torch._refs", "torch._inductor")


def preload_torch() -> None:
    """Begin to load torch's library in another thread; this one imports what needs no torch.

    NOTE: a call of the linker that goes through ctypes releases the interpreter's lock, which
    `import torch` holds for as long as it links. Where it fails, `import torch` says why.
    """
    spec = find_spec("torch")
    for place in (spec and spec.submodule_search_locations) or ():
        path = os.fsencode(Path(place, "lib", "libtorch_cpu.so"))
        Thread(target=ctypes.CDLL(None).dlopen, args=(path, os.RTLD_NOW), daemon=True).start()


def import_torch() -> None:
    """Import it; no effect where it has been imported."""
    if "torch" in sys.modules:
        return
    later, getmodule = _Later(), inspect.getmodule
    sys.meta_path.insert(0, later)
    sys.modules[_SHAPES] = ModuleType(_SHAPES)
    inspect.getmodule = lambda *_: None
    try:
        import_module("torch")
    finally:
        inspect.getmodule = getmodule
        del sys.modules[_SHAPES]
        sys.meta_path.remove(later)
    sys.meta_path.insert(0, _ShapesBeforeTracers())


class _Later(MetaPathFinder):
    """Finds the modules of `_LATER`, which are then loaded by the first access of an attribute."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in _LATER else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


class _ShapesBeforeTracers(MetaPathFinder):
    """Finds no module; the first of the tracers that is looked for has the shapes imported first,
    as `import torch` would have."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname in _TRACERS:
            sys.meta_path.remove(self)
            import_module(_SHAPES)
