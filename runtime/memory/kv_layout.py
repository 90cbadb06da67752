"""What a token's KV consists of: the one definition for pools, tiers, files and memory estimates.

    plain         kv      2 * num_kv_heads vectors of head_dim      keys, then values
    8 bits        values  2 * num_kv_heads vectors of head_dim      one byte a number
                  scales  2 * num_kv_heads vectors of one float32   see kernels/quantized_tensors.py
    4 bits        values  2 * num_kv_heads vectors of head_dim / 2  two numbers a byte
                  scales  2 * num_kv_heads vectors of 4 bytes       of each half a scale and a zero
    latent        latent  one vector of latent_dim + rope_dim       multi-head latent attention
                  index   one vector of the indexer's head_dim      where it selects keys

Layers whose heads differ from others' have parts of their own, and so have those of a draft model,
which come behind the model's. Code that moves KV sees only parts: vectors of a number of bytes.
Torch-free.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import pairwise, starmap

from ...errors import InvalidRequest
from ...kernels.kv_cache_dtype import INT4_STEP, KVCacheDtype
from ..checkpoint.config.model_config import ModelConfig

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "float8_e4m3fn": 1,
    "uint8": 1,
}
_QUANTIZED = {"int8": "int8", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True, slots=True)
class KVPart:
    """What layers of one shape store of a token in a tensor each: vectors of one width."""

    name: str
    num_vectors: int
    width: int  # elements of a vector
    dtype: str  # as torch names it
    layers: tuple[int, ...] | None = None  # of those that keep KV; None: all

    @property
    def vector_bytes(self) -> int:
        return self.width * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """In one layer."""
        return self.num_vectors * self.vector_bytes


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV of a token, in the layers that keep any."""

    num_layers: int
    parts: tuple[KVPart, ...]

    @property
    def bytes_per_token(self) -> int:
        """Over all layers."""
        return sum(len(self.layers_of(part)) * part.bytes_per_token for part in self.parts)

    def layers_of(self, part: KVPart) -> tuple[int, ...]:
        """The layers that have the part, ascending."""
        return tuple(range(self.num_layers)) if part.layers is None else part.layers

    def runs(self, most: int) -> tuple[range, ...]:
        """All layers in order, in `most` runs of like length, or one each if they are fewer."""
        count = min(most, self.num_layers)
        ends = [self.num_layers * number // count for number in range(count + 1)]
        return tuple(starmap(range, pairwise(ends)))

    def within(self, part: KVPart, run: range) -> slice:
        """Of `layers_of` a part, those of a run of layers."""
        layers = self.layers_of(part)
        return slice(bisect_left(layers, run.start), bisect_left(layers, run.stop))

    @classmethod
    def of(cls, config: ModelConfig, dtype: str, kv_cache_dtype: KVCacheDtype = "auto") -> KVLayout:
        """For a model computed in `dtype` ("bfloat16"), whose KV has this dtype ("auto"), 8 or 4
        bits.

        Raises InvalidRequest for latents in fewer bits, as they are small already, and for heads
        that 4 bits are not for.
        """
        return cls(len(config.attention_layers), _parts(config, dtype, kv_cache_dtype))

    def with_draft(self, draft: KVLayout) -> KVLayout:
        """A token's KV in these layers and, behind them, in those of a draft model."""
        own = tuple(replace(part, layers=self.layers_of(part)) for part in self.parts)
        behind = tuple(
            replace(part, layers=tuple(self.num_layers + i for i in draft.layers_of(part)))
            for part in draft.parts
        )
        return KVLayout(self.num_layers + draft.num_layers, own + behind)


def _parts(config: ModelConfig, dtype: str, kv_cache_dtype: KVCacheDtype) -> tuple[KVPart, ...]:
    latent = config.latent
    if latent is not None:
        if kv_cache_dtype != "auto":
            allowed = "auto: this model keeps one small latent a token (latent attention)"
            raise InvalidRequest.of("kv_cache_dtype", kv_cache_dtype, allowed)
        row = KVPart("latent", 1, latent.latent_dim + latent.rope_dim, dtype)
        if latent.indexer is None:
            return (row,)
        selecting = latent.indexer.layers
        own = tuple(i for i, layer in enumerate(config.attention_layers) if layer in selecting)
        layers = None if len(own) == len(config.attention_layers) else own
        return (row, KVPart("index", 1, latent.indexer.head_dim, dtype, layers))
    shapes = config.kv_shapes
    distinct = dict.fromkeys(shapes)
    parts: list[KVPart] = []
    for shape in distinct:
        layers = tuple(index for index, each in enumerate(shapes) if each == shape)
        parts += _heads(*shape, dtype, kv_cache_dtype, None if len(distinct) == 1 else layers)
    return tuple(parts)


def _heads(
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    kv_cache_dtype: KVCacheDtype,
    layers: tuple[int, ...] | None,
) -> list[KVPart]:
    """Of layers with these keys and values."""
    num_vectors = 2 * num_kv_heads
    if kv_cache_dtype == "auto":
        return [KVPart("kv", num_vectors, head_dim, dtype, layers)]
    if kv_cache_dtype == "int4":
        if head_dim % INT4_STEP:
            allowed = f"auto, int8 or fp8: heads of {head_dim} are no multiple of {INT4_STEP}"
            raise InvalidRequest.of("kv_cache_dtype", kv_cache_dtype, allowed)
        return [
            KVPart("values", num_vectors, head_dim // 2, "uint8", layers),
            KVPart("scales", num_vectors, 4, "uint8", layers),
        ]
    return [
        KVPart("values", num_vectors, head_dim, _QUANTIZED[kv_cache_dtype], layers),
        KVPart("scales", num_vectors, 1, "float32", layers),
    ]
