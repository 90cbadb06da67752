"""What checkpoints call the tensors of a decoder, by the names that models ask for. Torch-free.

A decoder that is a part of more keeps the names that it was first stored with, while transformers
has moved its modules since (4.52); some checkpoints, and all adapters that are trained now, have
the names of those.
"""

from __future__ import annotations

from collections.abc import Collection

OUTPUT = "lm_head."
PART = "language_model."
PART_DECODER, MOVED_DECODER = f"{PART}model.", f"model.{PART}"
_DECODER = "model."
_EMBEDDING = "embed_tokens.weight"


def names_asked_for(stored: Collection[str]) -> dict[str, str]:
    """Of all tensors the stored names, by those that models ask for."""
    if f"{MOVED_DECODER}{_EMBEDDING}" in stored:
        return {_name_of_part(name): name for name in stored}
    if _EMBEDDING not in stored:
        return {name: name for name in stored}
    return {name if name.startswith(OUTPUT) else f"{_DECODER}{name}": name for name in stored}


def _name_of_part(name: str) -> str:
    if name.startswith(MOVED_DECODER):
        return f"{PART_DECODER}{name.removeprefix(MOVED_DECODER)}"
    return f"{PART}{name}" if name.startswith(OUTPUT) else name.removeprefix(_DECODER)
