"""The formats in which weights are stored and served, and the room that adapters take.
Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..runtime.checkpoint.gguf.convert import weights_files
from ..runtime.checkpoint.quantized.quantization_config import packed_config
from .model_shape import ModelShape
from .product import Product

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_INT4_GROUP = 128
_SCALE_BYTES = 4
_MXFP4_GROUP, _MXFP4_SCALE_BYTES = 32, 4


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The format of linear layers; the embedding and all other weights keep the dtype."""

    name: str  # as `--quantization` has it, or "mxfp4": experts alone, in 4 bits by 32
    dtype: str

    def product_bytes(self, product: Product) -> float:
        """Bytes of one weight of the product."""
        count = product.in_features * product.out_features
        if self.name == "mxfp4" and product.num_experts > 1:
            return count / 2 + count / _MXFP4_GROUP * _MXFP4_SCALE_BYTES
        if self.name in ("none", "mxfp4"):
            return count * DTYPE_BYTES[self.dtype]
        if product.is_sampled_only:  # the output projection: 8 bits in all formats
            return count + product.out_features * _SCALE_BYTES
        if not product.is_quantized:
            return count * DTYPE_BYTES[self.dtype]
        if self.name == "int4":
            groups = product.out_features * -(-product.in_features // _INT4_GROUP)
            return count / 2 + groups * 2 * _SCALE_BYTES
        return count + product.out_features * _SCALE_BYTES

    def model_bytes(self, shape: ModelShape) -> int:
        """Bytes of all weights. A tied head has its own packed copy, see layers/embedding.py."""
        products = sum(self.product_bytes(p) * p.count * p.num_experts for p in shape.products)
        rest = shape.embedding_parameters + shape.other_parameters + shape.vision_parameters
        return int(products) + rest * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """The tables for adapters of all linear layers that take them, as `layers/adapter_tables.py`
    allocates them."""

    num_slots: int  # as `--max-loras-per-batch`
    rank: int  # as `--max-lora-rank`; tables and products are no smaller for smaller adapters

    def num_numbers(self, product: Product) -> int:
        """Numbers of one adapter at one of the product's places: A of each module, and B."""
        if not product.num_modules:
            return 0
        return self.rank * (product.num_modules * product.in_features + product.out_features)

    def num_total(self, shape: ModelShape) -> int:
        """Numbers of all slots and places."""
        return self.num_slots * sum(p.count * self.num_numbers(p) for p in shape.products)


# Bits a parameter of a GGUF file, whose tensors may have several formats: 4-bit files have 4.5 to
# 6, 8-bit ones 6.5 to 9, floating ones 16 or more.
_MOST_BITS_OF_INT4 = 6.3
_MOST_BITS_OF_INT8 = 12.0


def stored_quantization(
    folder: Path, shape: ModelShape
) -> Literal["none", "int8", "w8a8", "int4", "mxfp4"]:
    """The value of `--quantization` nearest to its weights, or "mxfp4"; "none" for floating ones,
    8-bit floats too.

    Raises ModelLoadError for a quantization that is not supported.
    """
    ggufs = weights_files(folder)
    if ggufs:
        bits = 8 * sum(file.stat().st_size for file in ggufs) / shape.num_parameters
        if bits <= _MOST_BITS_OF_INT4:
            return "int4"
        return "int8" if bits <= _MOST_BITS_OF_INT8 else "none"
    packed = packed_config(folder)
    if packed is None or packed.is_floating:
        return "none"
    if packed.method == "mxfp4":
        return "mxfp4"
    if packed.bits == 4:
        return "int4"
    return "w8a8" if packed.activations == "int8" else "int8"
