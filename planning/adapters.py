"""The memory for serving LoRA adapters, before any is loaded. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from .model_shape import ModelShape, Product


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
