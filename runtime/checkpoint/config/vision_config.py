"""The shape of a vision tower: an image as patches, through blocks, to features in the places of a
decoder's tokens. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """`merge_size`**2 patches become one token; `head_dim` is a multiple of 4."""

    kind: Literal["qwen2_5_vl", "qwen3_vl"]  # which norms, blocks and names it has
    num_blocks: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_size: int  # of features: the decoder's hidden size
    patch_size: int  # pixels, as high as wide
    temporal_patch_size: int  # frames; an image is repeated
    merge_size: int
    rope_theta: float
    window_size: int | None  # pixels; None: all blocks attend to the whole image
    full_attention_blocks: tuple[int, ...]  # that have no window
    positions_per_side: int | None  # of a learned grid; None: it has none
    deepstack_blocks: tuple[int, ...]  # whose outputs are added behind the decoder's first layers
    image_token_id: int  # the template's stand-in for an image
    video_token_id: int
    weight_prefix: str = "visual."

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Numbers of a patch: channels, frames, rows, columns."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def num_feature_layers(self) -> int:
        """Features of a token: its embedding, and one for each of `deepstack_blocks`."""
        return 1 + len(self.deepstack_blocks)

    @property
    def num_parameters(self) -> int:
        """Of the whole tower."""
        size, inner, merged = self.hidden_size, self.intermediate_size, self.merged_size
        attention = 4 * size * size + 4 * size
        if self.kind == "qwen3_vl":
            blocks = attention + 2 * size * inner + inner + size + 4 * size
            grid = (self.positions_per_side or 0) ** 2 * size
            merger = merged * merged + merged + merged * self.out_size + self.out_size
            merges = (1 + len(self.deepstack_blocks)) * merger
            norms = 2 * size + len(self.deepstack_blocks) * 2 * merged
            patches = size * self.patch_dim + size
            return patches + grid + self.num_blocks * blocks + merges + norms
        blocks = attention + 3 * size * inner + 2 * inner + size + 2 * size
        merger = size + merged * merged + merged + merged * self.out_size + self.out_size
        return size * self.patch_dim + self.num_blocks * blocks + merger

    @property
    def merged_size(self) -> int:
        """Of a token's patches together."""
        return self.hidden_size * self.merge_size**2
