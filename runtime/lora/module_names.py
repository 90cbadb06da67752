"""What an adapter calls the modules of a model: as transformers did where it was trained.

A checkpoint whose decoder is a part of more keeps the names that it was first stored with, while
transformers has moved the modules since (4.52) and PEFT names those. Older adapters have the
checkpoint's names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

# Beginnings of names, in checkpoints and in transformers.
_MOVED = (("language_model.model.", "model.language_model."),)


def names_in_adapter(tensors: Iterable[str], modules: Iterable[str]) -> dict[str, str]:
    """By an adapter's names, in their order, the model's names of its modules. `tensors`: names of
    the adapter's, behind what PEFT puts before all of them."""
    moved = _moved(tuple(tensors))
    return {_named(module, moved): module for module in modules}


def _moved(tensors: Collection[str]) -> tuple[str, str] | None:
    for stored, trained in _MOVED:
        if any(tensor.startswith(trained) for tensor in tensors):
            return stored, trained
    return None


def _named(module: str, moved: tuple[str, str] | None) -> str:
    if moved is None or not module.startswith(moved[0]):
        return module
    return moved[1] + module.removeprefix(moved[0])
