"""Maps the tensor names that models request to a checkpoint's. Torch-free.

Checkpoints of a decoder within a larger model keep the names that they were first stored with,
while transformers has since moved its modules (4.52); some checkpoints, and all adapters trained
now, have the new names.
"""

from __future__ import annotations

from collections.abc import Collection

OUTPUT = "lm_head."
PART = "language_model."
PART_DECODER, MOVED_DECODER = f"{PART}model.", f"model.{PART}"
_DECODER = "model."
_EMBEDDING = "embed_tokens.weight"


def names_asked_for(stored: Collection[str]) -> dict[str, str]:
    """The stored names of all tensors, by the names that models request."""
    if f"{MOVED_DECODER}{_EMBEDDING}" in stored:
        return {_name_of_part(name): name for name in stored}
    if _EMBEDDING not in stored:
        return {name: name for name in stored}
    return {name if name.startswith(OUTPUT) else f"{_DECODER}{name}": name for name in stored}


def _name_of_part(name: str) -> str:
    if name.startswith(MOVED_DECODER):
        return f"{PART_DECODER}{name.removeprefix(MOVED_DECODER)}"
    return f"{PART}{name}" if name.startswith(OUTPUT) else name.removeprefix(_DECODER)
