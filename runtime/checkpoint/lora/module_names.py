"""An adapter's module names: those of transformers where it was trained.

They may differ from the checkpoint's (`safetensors/stored_names.py`); older adapters have the
checkpoint's names."""

from __future__ import annotations

from collections.abc import Iterable

from ..safetensors.checkpoint_files import BACKBONE, DECODER, MOVED_DECODER, PART_DECODER


def names_in_adapter(tensors: Iterable[str], modules: Iterable[str]) -> dict[str, str]:
    """The model's module names by the adapter's, in the order of `modules`. `tensors`: the
    adapter's tensor names, without PEFT's common prefix."""
    tensors = list(tensors)
    if any(tensor.startswith(BACKBONE) for tensor in tensors):
        return {f"{BACKBONE}{module.removeprefix(DECODER)}": module for module in modules}
    if not any(tensor.startswith(MOVED_DECODER) for tensor in tensors):
        return {module: module for module in modules}
    return {_moved(module): module for module in modules}


def _moved(module: str) -> str:
    if not module.startswith(PART_DECODER):
        return module
    return f"{MOVED_DECODER}{module.removeprefix(PART_DECODER)}"
