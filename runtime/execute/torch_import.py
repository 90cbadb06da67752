"""Imports torch without a third of it: what only tracing reads is loaded when something traces.

`import torch` ends with `torch._meta_registrations`, and with it `torch._decomp` and `torch._refs`:
the shapes that some thousand operators give, in Python, for `torch.compile`, fake tensors and
tensors of the device "meta". An engine computes and traces nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import ModuleType

_SHAPES = "torch._meta_registrations"
_TRACERS = ("torch._dynamo", "torch._decomp", "torch._prims", "torch._refs", "torch._inductor")


def import_torch() -> None:
    """Import it; no effect where it has been imported."""
    if "torch" in sys.modules:
        return
    sys.modules[_SHAPES] = ModuleType(_SHAPES)
    try:
        import_module("torch")
    finally:
        del sys.modules[_SHAPES]
    sys.meta_path.insert(0, _ShapesBeforeTracers())


class _ShapesBeforeTracers(MetaPathFinder):
    """Finds no module; the first of the tracers that is looked for has the shapes imported first,
    as `import torch` would have."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname in _TRACERS:
            sys.meta_path.remove(self)
            import_module(_SHAPES)
