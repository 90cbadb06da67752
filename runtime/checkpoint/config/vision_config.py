"""The shape of a vision tower: an image as patches, through blocks, to features that take the places
of tokens in a decoder. Torch-free."""

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
