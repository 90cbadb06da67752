"""Identifies a model's weights without reading all of them. Torch-free.

KV is only valid for the weights that computed it, over restarts and on other machines. Checkpoints
of one shape differ in the contents of their tensors, of each of which the first, the middle and the
last page are read (of files whose tensors' places are not known: pages spread over the file):
training changes nearly all numbers of the tensors that it changes. Copies have the same revision.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

from ..config.encoder_config import EncoderConfig
from ..config.model_config import ModelConfig
from .safetensors_header import open_header

_SAMPLES = 1024  # of a file whose tensors' places are not known
_SAMPLE_BYTES = 4096
_TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "chat_template.json", "additional_chat_templates/*.jinja", "generation_config.json",
)  # fmt: skip
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")


def model_revision(
    folder: Path,
    config: ModelConfig | EncoderConfig,
    max_model_len: int,
    quantization: str = "none",
    load_format: str = "auto",
) -> str:
    """32 hexadecimal digits. `max_model_len` counts if the rotary frequencies depend on it;
    `quantization` is applied to the weights at load, `load_format` says which of a folder's files
    they are read from.

    Raises OSError or ModelLoadError for files that cannot be read.
    """
    state = blake2b(digest_size=16)
    state.update(repr(config).encode())
    scaling = config.rope_scaling if isinstance(config, ModelConfig) else None
    if scaling is not None and scaling.kind.is_chosen_by_length:
        state.update(f"max_model_len={max_model_len}".encode())
    if quantization != "none":
        state.update(f"quantization={quantization}".encode())
    if load_format != "auto":
        state.update(f"load_format={load_format}".encode())
    for file in sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        state.update(f"{file.name} {file.stat().st_size}".encode())
        for sample in _samples(file):
            state.update(sample)
    return state.hexdigest()


def text_revision(folder: Path) -> str:
    """32 hexadecimal digits, of what makes tokens of texts and messages, and of what calls leave
    open. Raises OSError for files that cannot be read."""
    state = blake2b(digest_size=16)
    for file in (file for name in _TEXT_FILES for file in sorted(folder.glob(name))):
        state.update(f"{file.name} {file.stat().st_size}".encode())
        state.update(file.read_bytes())
    return state.hexdigest()


def _samples(file: Path) -> Iterator[bytes]:
    """What a file's tensors are called and where they lie, as far as that is known, and pieces."""
    if file.suffix == ".safetensors":
        descriptor, places = open_header(file)
        yield repr(sorted(places.items())).encode()
        starts = _starts_in((place.start, place.num_bytes) for place in places.values())
    else:
        descriptor = os.open(file, os.O_RDONLY)
        last = max(0, os.fstat(descriptor).st_size - _SAMPLE_BYTES)
        starts = {last * index // (_SAMPLES - 1) for index in range(_SAMPLES)}
    try:
        for start in sorted(starts):
            yield os.pread(descriptor, _SAMPLE_BYTES, start)
    finally:
        os.close(descriptor)


def _starts_in(parts: Iterable[tuple[int, int]]) -> set[int]:
    """Where to read of each part: at its beginning, in its middle, at its end."""
    starts: set[int] = set()
    for start, num_bytes in parts:
        last = start + max(0, num_bytes - _SAMPLE_BYTES)
        starts |= {start, (start + last) // 2, last}
    return starts
