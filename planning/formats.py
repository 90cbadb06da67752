"""The size of a weight or KV number in each format for serving a model. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from .model_shape import ModelShape, Product

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_INT4_GROUP = 128
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The format of linear layers; the embedding and all other weights keep the dtype."""

    name: str  # as `--quantization` has it
    dtype: str

    def product_bytes(self, product: Product) -> float:
        """Bytes of one weight of the product."""
        count = product.in_features * product.out_features
        if self.name == "none":
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
        rest = shape.embedding_parameters + shape.other_parameters
        return int(products) + rest * DTYPE_BYTES[self.dtype]
