"""Identifies a model's weights without reading all of them. Torch-free.

KV stored over a restart is only valid for the weights that computed it. Two checkpoints of one
shape differ in their files' sizes, times or contents; of the contents a few hundred samples are
read. A copy of a folder with new times counts as another model: its KV is computed once more, which
is safe.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from ..config.model_config import ModelConfig

_SAMPLES = 64  # a file
_SAMPLE_BYTES = 4096
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")


def model_revision(
    folder: Path,
    config: ModelConfig,
    max_model_len: int,
    quantization: str = "none",
    load_format: str = "auto",
) -> str:
    """32 hexadecimal digits. `max_model_len` counts if the rotary frequencies depend on it;
    `quantization` is applied to the weights at load, `load_format` says which of a folder's files
    they are read from.

    Raises OSError for files that cannot be read.
    """
    state = blake2b(digest_size=16)
    state.update((folder / "config.json").read_bytes())
    if config.rope_scaling is not None and config.rope_scaling.kind.is_chosen_by_length:
        state.update(f"max_model_len={max_model_len}".encode())
    if quantization != "none":
        state.update(f"quantization={quantization}".encode())
    if load_format != "auto":
        state.update(f"load_format={load_format}".encode())
    for file in sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        about = file.stat()
        state.update(f"{file.name} {about.st_size} {about.st_mtime_ns}".encode())
        for sample in _samples(file, about.st_size):
            state.update(sample)
    return state.hexdigest()


def _samples(file: Path, size: int) -> list[bytes]:
    """Pieces spread over a file, including its first and last bytes."""
    last = max(0, size - _SAMPLE_BYTES)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        starts = sorted({last * index // (_SAMPLES - 1) for index in range(_SAMPLES)})
        return [os.pread(descriptor, _SAMPLE_BYTES, start) for start in starts]
    finally:
        os.close(descriptor)
