"""An adapter in a folder, as Hugging Face PEFT saves it: read once, checked against a model.

    adapter_config.json          see `adapter_config`
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight  [rank, in_features]
                                 base_model.model.<module>.lora_B.weight  [out_features, rank]

The contents as read are served: later changes of files have no effect until the adapter is loaded
again. Reading and hashing take time, so a thread beside the engine's loop does it. Torch-free: the
device half converts the tensors.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ....errors import ModelLoadError
from ..safetensors.safetensors_header import Place, open_header
from .adapter_config import CONFIG_FILE, AdapterConfig, Strength, read_config
from .module_names import names_in_adapter

WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLED_FILE = "adapter_model.bin"
# Some files include the adapter's name at training.
_PREFIX = "base_model.model."
_TENSOR_NAME = re.compile(
    rf"{re.escape(_PREFIX)}(?P<module>.+)\.lora_(?P<kind>[AB])(\.\w+)?\.weight"
)
# What PEFT writes of embeddings and of their copies, beside or in place of A and B.
_OTHER_TENSOR_NAME = re.compile(
    rf"{re.escape(_PREFIX)}(?P<module>.+?)"
    r"\.(base_layer|lora_(embedding_)?(?P<kind>[AB])|modules_to_save)(\.\w+){0,2}"
)
_DTYPES = ("BF16", "F16", "F32", "F64")
_CHUNK_BYTES = 1 << 20


class ModuleShape(NamedTuple):
    """The shape of a linear layer of the base model."""

    in_features: int
    out_features: int


class StoredTensor(NamedTuple):
    """A tensor as in the file."""

    dtype: str  # one of _DTYPES
    shape: tuple[int, ...]
    data: memoryview  # of bytes, at any alignment


class AdapterModule(NamedTuple):
    """An adapter's contribution to one linear layer: scale * B A x."""

    name: str
    a: StoredTensor  # [rank, in_features]
    b: StoredTensor  # [out_features, rank]
    scale: float


PrepareWeights = Callable[[Sequence[AdapterModule]], object]
"""Converts an adapter's tensors for the device half, in host memory, so that filling a slot is
fast. May be called by any thread; keeps no view of their data."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One adapter of one model, with its tensors."""

    name: str
    folder: Path
    revision: str  # 32 hexadecimal digits, of its contents, whatever its name
    rank: int  # the largest of its modules
    weights: object  # the result of `PrepareWeights`
    num_bytes: int = 0  # of its tensors in the file
    loaded_s: int = field(default_factory=lambda: int(time.time()))
    load_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # unique to this load

    def describe(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "name": self.name,
            "path": str(self.folder.resolve()),
            "rank": self.rank,
            "revision": self.revision,
            "num_bytes": self.num_bytes,
            "loaded_s": self.loaded_s,
            "load_id": self.load_id,
        }

    def namespace(self, own: str) -> str:
        """The namespace, within `own`, of the KV that this adapter computes."""
        return f"{own}#lora:{self.revision}"


def read_adapter(
    name: str,
    folder: Path,
    modules: Mapping[str, ModuleShape],
    max_rank: int,
    prepare: PrepareWeights,
) -> Adapter:
    """Read the adapter in `folder` and check it against a model's linear layers.

    Raises ModelLoadError naming the file, the field or tensor, what was expected and found.
    """
    text = read_config(folder)
    config = AdapterConfig.parse(folder / CONFIG_FILE, text)
    if config.max_rank > max_rank:
        raise ModelLoadError(
            f"{folder / CONFIG_FILE}: rank {config.max_rank}; this engine has room for ranks up to "
            f"{max_rank}; start it with max_lora_rank={config.max_rank}"
        )
    file = folder / WEIGHTS_FILE
    _require_safetensors(file)
    descriptor, places = open_header(file)
    try:
        names = names_in_adapter((name.removeprefix(_PREFIX) for name in places), modules)
        named = {name: modules[module] for name, module in names.items()}
        pairs = _checked_pairs(file, places, config.strengths(list(named)), named)
        first, num_bytes = _extent(file, descriptor, places)
        state = blake2b(text, digest_size=16)
        state.update(repr(sorted(places.items())).encode())
        data = _read(file, descriptor, first, num_bytes, state.update)
    finally:
        os.close(descriptor)

    def tensor(name: str) -> StoredTensor:
        start = places[name].start - first
        end = start + places[name].num_bytes
        return StoredTensor(places[name].dtype, places[name].shape, data[start:end])

    weights = prepare(
        [
            AdapterModule(names[name], tensor(pair["A"]), tensor(pair["B"]), strength.scale)
            for name, (pair, strength) in pairs.items()
        ]
    )
    return Adapter(name, folder, state.hexdigest(), config.max_rank, weights, num_bytes)


def _checked_pairs(
    file: Path,
    places: Mapping[str, Place],
    strengths: Mapping[str, Strength],
    modules: Mapping[str, ModuleShape],
) -> dict[str, tuple[dict[str, str], Strength]]:
    """For each module, under the adapter's name for it, the names of its tensors by "A" and "B"."""
    pairs: dict[str, dict[str, str]] = {}
    for tensor, place in places.items():
        if place.dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise ModelLoadError(
                f"{file}: tensor {tensor!r}: expected {known}, found {place.dtype}"
            )
        module, kind = _place_of(tensor, file, modules)
        if kind in pairs.setdefault(module, {}):
            raise ModelLoadError(f"{file}: {tensor!r}: {module} has two of lora_{kind}")
        pairs[module][kind] = tensor
    for module in sorted(pairs.keys() & strengths.keys()):
        names = pairs[module]
        rank, shape = strengths[module].rank, modules[module]
        for kind, expected in (("A", (rank, shape[0])), ("B", (shape[1], rank))):
            if kind not in names:
                raise ModelLoadError(f"{file}: lora_{kind} of {module} is missing")
            if places[names[kind]].shape != expected:
                raise ModelLoadError(
                    f"{file}: tensor {names[kind]!r}: expected shape {[*expected]}, "
                    f"found {[*places[names[kind]].shape]}"
                )
    for module in modules:
        if (module in pairs) != (module in strengths):
            found = "has tensors" if module in pairs else "has no tensors"
            raise ModelLoadError(
                f"{file}: {module} {found}, but target_modules of {CONFIG_FILE} says otherwise; "
                "was it made for another model?"
            )
    return {module: (names, strengths[module]) for module, names in pairs.items()}


def _place_of(tensor: str, file: Path, modules: Mapping[str, ModuleShape]) -> tuple[str, str]:
    """A tensor's module, and "A" or "B"."""
    found = _TENSOR_NAME.fullmatch(tensor) or _OTHER_TENSOR_NAME.fullmatch(tensor)
    if found is None or (found.re is _OTHER_TENSOR_NAME and found["module"] in modules):
        expected = "base_model.model.<module>.lora_A.weight or .lora_B.weight"
        raise ModelLoadError(f"{file}: tensor {tensor!r}: expected {expected}")
    module = found["module"]
    if module not in modules:
        ends = sorted({name.rpartition(".")[2] for name in modules})
        raise ModelLoadError(
            f"{file}: tensor {tensor!r}: the model takes no adapter at {module}; it does at "
            f"{', '.join(ends)} of its layers"
        )
    return module, found["kind"]


def _require_safetensors(file: Path) -> None:
    if file.is_file():
        return
    pickled = file.with_name(_PICKLED_FILE)
    if pickled.exists():
        raise ModelLoadError(
            f"{pickled} is a pickle, which can run any code when it is read: convert it to "
            f"{WEIGHTS_FILE}"
        )
    raise ModelLoadError(f"{file} is missing: not a PEFT adapter")


def _extent(file: Path, descriptor: int, places: Mapping[str, Place]) -> tuple[int, int]:
    """Where the tensors begin, and their total bytes; nothing is between or after them."""
    first = min((place.start for place in places.values()), default=0)
    num_bytes = sum(place.num_bytes for place in places.values())
    found = os.fstat(descriptor).st_size - first
    if places and found != num_bytes:
        raise ModelLoadError(
            f"{file} is not a readable safetensors file: its tensors have {num_bytes} bytes, and "
            f"it has {found} for them"
        )
    return first, num_bytes


def _read(
    file: Path, descriptor: int, first: int, num_bytes: int, note: Callable[[memoryview], None]
) -> memoryview:
    """The bytes from `first` on, each passed to `note` once. Read, not mapped: truncating the file
    meanwhile is an error here, but would kill the process with a mapping."""
    data = np.empty(num_bytes, dtype=np.uint8).data  # a bytearray would be zeroed, under the GIL
    room, start = data, first
    while room:
        try:
            count = os.preadv(descriptor, [room[:_CHUNK_BYTES]], start)
        except OSError as error:
            raise ModelLoadError(f"{file} cannot be read: {error}") from None
        if count == 0:
            raise ModelLoadError(f"{file} has become shorter while it was read")
        note(room[:count])
        room, start = room[count:], start + count
    return data
