"""The number formats of GGUF tensors: the supported ones and their block sizes. Torch-free.

Sizes: ggml's `ggml_type` and block structures (ggml.h, ggml-common.h).
"""

from __future__ import annotations

from dataclasses import dataclass

from ....errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`block_bytes` hold `block_values` consecutive values of a row."""

    name: str
    block_values: int
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        return self.block_values > 1

    def bytes_of(self, num_values: int) -> int:
        """Of so many values, a multiple of a block's."""
        return num_values // self.block_values * self.block_bytes


FORMATS = {
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2),
    2: BlockFormat("Q4_0", 32, 18),
    3: BlockFormat("Q4_1", 32, 20),
    6: BlockFormat("Q5_0", 32, 22),
    7: BlockFormat("Q5_1", 32, 24),
    8: BlockFormat("Q8_0", 32, 34),
    12: BlockFormat("Q4_K", 256, 144),
    13: BlockFormat("Q5_K", 256, 176),
    14: BlockFormat("Q6_K", 256, 210),
    30: BlockFormat("BF16", 1, 2),
    39: BlockFormat("MXFP4", 32, 17),
}
"""By the number in the file."""

# Other formats of ggml, for the error message.
_OTHER_NAMES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip


def format_of(number: int, where: str) -> BlockFormat:
    """Raises ModelLoadError, beginning with `where`, for an unsupported format."""
    if number in FORMATS:
        return FORMATS[number]
    name = _OTHER_NAMES.get(number, f"number {number}")
    supported = ", ".join(known.name for known in FORMATS.values())
    raise ModelLoadError(f"{where}: format {name} is not supported; supported are: {supported}")
