"""The names of a GGUF model's files, of which there may be several: NAME-00002-of-00003.gguf.

As llama.cpp cuts (`llama_split_path`). Torch-free.
"""

from __future__ import annotations

import re

_SUFFIX = ".gguf"
_SHARD = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def shard_name(name: str, number: int, count: int) -> str:
    """Of the part `number`, from 1 on, of `count`."""
    return f"{name}-{number:05}-of-{count:05}{_SUFFIX}"


def shard_names(file_name: str) -> list[str]:
    """All files of the model that has a file of this name, in order; a name without a number stands
    for itself."""
    match = _SHARD.fullmatch(file_name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [file_name]
    count = int(match["count"])
    return [shard_name(match["name"], number, count) for number in range(1, count + 1)]


def model_stem(file_name: str) -> str:
    """What the model is called, without the number of a part."""
    match = _SHARD.fullmatch(file_name)
    return file_name.removesuffix(_SUFFIX) if match is None else match["name"]
