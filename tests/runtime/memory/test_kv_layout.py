"""What a token's KV is made of, and what the pool makes of it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from process_memory import rss_mb

from stemma.errors import InvalidRequest
from stemma.kernels.quantized_tensors import QuantizedKV
from stemma.runtime.checkpoint.config.model_config import IndexerConfig, LatentConfig, ModelConfig
from stemma.runtime.memory.device_pool import DeviceKVPool
from stemma.runtime.memory.kv_layout import KVLayout
from stemma.runtime.models.model_config import read_model_config


@pytest.fixture(scope="module")
def config(checkpoint: Path) -> ModelConfig:
    """3 layers, 2 KV heads of 16."""
    return replace(read_model_config(checkpoint), num_layers=3)


def pool_of(layout: KVLayout) -> DeviceKVPool:
    return DeviceKVPool(layout, num_pages=5, page_size=4, num_spare_pages=1)


def test_plain_kv_is_keys_and_values_of_every_head(config: ModelConfig) -> None:
    layout = KVLayout.of(config, "bfloat16")
    assert layout.bytes_per_token == 3 * 2 * 2 * 16 * 2
    layers = pool_of(layout).layers
    assert len(layers) == 3
    for layer in layers:
        assert isinstance(layer, torch.Tensor) and layer.dtype is torch.bfloat16
        assert layer.shape == (2, 2, 24, 16) and layer.is_contiguous() and not layer.any()


@pytest.mark.parametrize(
    ("name", "dtype"), [("int8", torch.int8), ("fp8", torch.float8_e4m3fn)], ids=str
)
def test_quantized_kv_has_a_byte_a_number_and_a_scale_a_vector(
    config: ModelConfig, name: str, dtype: torch.dtype
) -> None:
    layout = KVLayout.of(config, "bfloat16", name)  # type: ignore[arg-type]
    assert layout.bytes_per_token == 3 * 2 * 2 * (16 + 4)
    pool = pool_of(layout)
    assert pool.num_bytes == 24 * layout.bytes_per_token
    for layer in pool.layers:
        assert isinstance(layer, QuantizedKV) and layer.values.dtype is dtype
        assert layer.values.shape == (2, 2, 24, 16) and layer.values.is_contiguous()
        assert layer.scales.shape == (2, 2, 24) and layer.scales.is_contiguous()
        assert layer.scales.dtype is torch.float32


def test_4_bits_are_two_numbers_a_byte_and_two_bytes_a_half(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelConfig, "kv_shapes", ((2, 32),) * 3)
    layout = KVLayout.of(config, "float32", "int4")
    assert layout.bytes_per_token == 3 * 2 * 2 * (32 // 2 + 4)
    pool = pool_of(layout)
    assert pool.num_bytes == 24 * layout.bytes_per_token
    for layer in pool.layers:
        assert isinstance(layer, QuantizedKV) and layer.values.dtype is torch.uint8
        assert layer.values.shape == (2, 2, 24, 16) and layer.values.is_contiguous()
        assert layer.scales.shape == (2, 2, 24, 4) and layer.scales.is_contiguous()
        assert layer.scales.dtype is torch.uint8 and layer.head_dim == 32


def test_4_bits_refuse_heads_that_they_are_not_for(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelConfig, "kv_shapes", ((2, 32), (1, 48)))
    with pytest.raises(InvalidRequest, match=r"int4.*auto, int8 or fp8: heads of 48"):
        KVLayout.of(config, "bfloat16", "int4")


def test_layers_and_their_parts_are_one_memory(config: ModelConfig) -> None:
    pool = pool_of(KVLayout.of(config, "bfloat16", "int8"))
    layer = pool.layers[1]
    assert isinstance(layer, QuantizedKV)
    layer.values[1, 0, 7] = -3
    layer.scales[1, 0, 7] = 2.5
    values, scales = (part[1] for part in pool.parts)
    assert values[2, 7].tolist() == [253] * 16
    assert scales[2, 7].view(torch.float32).tolist() == [2.5]


@pytest.mark.parametrize("name", ["auto", "int8"])
def test_layers_of_unlike_heads_keep_no_more_than_they_have(
    config: ModelConfig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = ((2, 16), (1, 24), (2, 16))
    monkeypatch.setattr(ModelConfig, "kv_shapes", shapes)
    layout = KVLayout.of(config, "bfloat16", name)  # type: ignore[arg-type]
    a_head = {"auto": lambda size: 2 * size, "int8": lambda size: size + 4}[name]
    assert layout.bytes_per_token == sum(2 * heads * a_head(size) for heads, size in shapes)
    pool = pool_of(layout)
    assert pool.num_bytes == 24 * layout.bytes_per_token
    values = [layer.values if isinstance(layer, QuantizedKV) else layer for layer in pool.layers]
    assert [tuple(each.shape) for each in values] == [(2, n, 24, size) for n, size in shapes]


@pytest.mark.parametrize("layers", [(0, 1, 2), (0, 2)], ids=str)
def test_an_indexer_has_a_key_beside_the_latent(
    config: ModelConfig, layers: tuple[int, ...]
) -> None:
    latent = LatentConfig(32, 8, 16, 16, 24, indexer=IndexerConfig(4, 12, layers))
    layout = KVLayout.of(replace(config, latent=latent), "float32")
    assert layout.bytes_per_token == (3 * (32 + 8) + len(layers) * 12) * 4
    pool = pool_of(layout)
    assert [tuple(layer.shape) for layer in pool.layers] == [(24, 40)] * 3
    assert [tuple(keys.shape) for keys in pool.index_keys] == [(24, 12)] * len(layers)
    pool.index_keys[1][7] = 2.5
    assert pool.parts[1][1][0, 7].view(torch.float32).tolist() == [2.5] * 12


def test_a_pool_takes_memory_where_tokens_are_and_nowhere_else(config: ModelConfig) -> None:
    """A token's KV lies in 12 places, 4 MB apart: pages of 2 MB would be 24 MB."""
    layout = KVLayout.of(config, "bfloat16")
    before = rss_mb(os.getpid())
    pool = DeviceKVPool(layout, num_pages=2**17, page_size=1)
    for layer in pool.layers:
        assert isinstance(layer, torch.Tensor)
        layer[:, :, 0] = 1
    assert pool.num_bytes == 48 * 2**20 and rss_mb(os.getpid()) - before < 4


def test_a_latent_is_one_vector_a_token_and_is_not_quantized(config: ModelConfig) -> None:
    latent = replace(config, latent=LatentConfig(32, 8, 16, 16, None))
    layout = KVLayout.of(latent, "float32")
    assert layout.bytes_per_token == 3 * (32 + 8) * 4
    assert [tuple(layer.shape) for layer in pool_of(layout).layers] == [(24, 40)] * 3
    for name in ("int8", "int4"):
        with pytest.raises(InvalidRequest, match=rf"kv_cache_dtype='{name}'.*latent"):
            KVLayout.of(latent, "float32", name)  # type: ignore[arg-type]
