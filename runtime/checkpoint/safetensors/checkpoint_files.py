"""Which files of a folder are its checkpoint: one, or those named by an index. Torch-free.

The single file takes precedence over an index, as in transformers: the index may be left from
shards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from ....errors import ModelLoadError

SINGLE_FILE = "model.safetensors"
MEDUSA_FILE = "medusa_lm_head.safetensors"  # Medusa's heads alone
INDEX_FILE = "model.safetensors.index.json"


def checkpoint_files(folder: Path) -> list[Path]:
    """In order of their names; none if there is neither an index nor the single file.

    Raises ModelLoadError for an index that is broken, or names a file that is not there.
    """
    single = single_file(folder)
    if single is not None:
        return [single]
    weight_map = read_index(folder) or {}
    return [folder / name for name in sorted(set(weight_map.values()))]


def single_file(folder: Path) -> Path | None:
    """The file with all tensors, if there is one."""
    files = (folder / name for name in (SINGLE_FILE, MEDUSA_FILE))
    return next((file for file in files if file.exists()), None)


def read_index(folder: Path) -> Mapping[str, str] | None:
    """The file name of each tensor; None: the folder has no index. Raises ModelLoadError."""
    index = folder / INDEX_FILE
    if not index.exists():
        return None
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelLoadError(f"{index} is not a valid index: {error!r}") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index}: field 'weight_map': expected a non-empty object")
    files = {tensor: str(file) for tensor, file in weight_map.items()}
    for file in set(files.values()):
        if Path(file).name != file:
            raise ModelLoadError(f"{index}: {file!r} is not a plain file name")
        if not (folder / file).exists():
            raise ModelLoadError(f"{folder / file} is missing, but {index.name} names it")
    return files


OUTPUT = "lm_head."
PART = "language_model."
TOWER = "visual."  # of Qwen2.5-VL's first files, whose decoder is no part
PART_DECODER, MOVED_DECODER = f"{PART}model.", f"model.{PART}"
DECODER = "model."
_EMBEDDING = "embed_tokens.weight"
BACKBONE = "backbone."  # Nemotron-H's decoder
# As transformers writes Kimi Linear's dense layers; published ones have "mlp".
_DENSE_BLOCK = re.compile(r"\.block_sparse_moe\.((gate|up|down)_proj\.)")
_BACKBONE_EMBEDDING = f"{BACKBONE}embeddings.weight"


def names_asked_for(stored: Collection[str]) -> dict[str, str]:
    """The stored names of all tensors, by the names that models request."""
    if f"{MOVED_DECODER}{_EMBEDDING}" in stored:
        return {_name_of_part(name): name for name in stored}
    if f"{DECODER}{_EMBEDDING}" in stored and any(name.startswith(TOWER) for name in stored):
        return {_name_beside_tower(name): name for name in stored}
    if _BACKBONE_EMBEDDING in stored:
        return {_name_in_model(name): name for name in stored}
    if _EMBEDDING not in stored:
        return {_DENSE_BLOCK.sub(r".mlp.\1", name): name for name in stored}
    return {name if name.startswith(OUTPUT) else f"{DECODER}{name}": name for name in stored}


def _name_in_model(name: str) -> str:
    if name == _BACKBONE_EMBEDDING:
        return f"{DECODER}{_EMBEDDING}"
    return f"{DECODER}{name.removeprefix(BACKBONE)}" if name.startswith(BACKBONE) else name


def _name_of_part(name: str) -> str:
    if name.startswith(MOVED_DECODER):
        return f"{PART_DECODER}{name.removeprefix(MOVED_DECODER)}"
    return f"{PART}{name}" if name.startswith(OUTPUT) else name.removeprefix(DECODER)


def _name_beside_tower(name: str) -> str:
    return f"{PART}{name}" if name.startswith((DECODER, OUTPUT)) else name
