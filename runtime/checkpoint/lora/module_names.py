"""What an adapter calls the modules of a model: as transformers did where it was trained.

That is not always what the checkpoint calls them (`safetensors/stored_names.py`); older adapters
have the checkpoint's names."""

from __future__ import annotations

from collections.abc import Iterable

from ..safetensors.stored_names import MOVED_DECODER, PART_DECODER


def names_in_adapter(tensors: Iterable[str], modules: Iterable[str]) -> dict[str, str]:
    """By an adapter's names, in their order, the model's names of its modules. `tensors`: names of
    the adapter's, behind what PEFT puts before all of them."""
    if not any(tensor.startswith(MOVED_DECODER) for tensor in tensors):
        return {module: module for module in modules}
    return {_moved(module): module for module in modules}


def _moved(module: str) -> str:
    if not module.startswith(PART_DECODER):
        return module
    return f"{MOVED_DECODER}{module.removeprefix(PART_DECODER)}"
