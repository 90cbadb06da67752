"""What a sequence's state takes, how far apart copies of it are kept, and copies between slots."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mixtures import make_mixture

from stemma.errors import InvalidRequest
from stemma.runtime.memory.kv_layout import KVLayout
from stemma.runtime.memory.sizing import num_pages_for, num_state_slots
from stemma.runtime.memory.state_layout import StateLayout, checkpoint_interval
from stemma.runtime.memory.state_pool import StatePool
from stemma.runtime.models.model_config import read_model_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_mixture(folder, "Qwen3_5")  # 4 layers, the last with attention
    return folder


@pytest.mark.parametrize(
    ("dtype", "tail", "matrix"), [("bfloat16", 2, 4), ("float32", 4, 4), ("float64", 8, 8)]
)
def test_a_state_is_a_tail_and_a_wide_matrix_a_layer(
    folder: Path, dtype: str, tail: int, matrix: int
) -> None:
    layout = StateLayout.of(read_model_config(folder), dtype)
    assert layout is not None
    channels = 2 * 2 * 12 + 6 * 20
    assert layout.num_bytes == 3 * (3 * channels * tail + 6 * 12 * 20 * matrix)
    pool = StatePool(layout, 5)
    assert pool.num_bytes == 6 * layout.num_bytes
    assert [layer.tails.shape for layer in pool.layers] == [(6, 3, channels)] * 3


def test_only_layers_with_attention_keep_kv(folder: Path) -> None:
    assert KVLayout.of(read_model_config(folder), "float32").num_layers == 1


def test_copies_are_made_in_order(folder: Path) -> None:
    layout = StateLayout.of(read_model_config(folder), "float32")
    assert layout is not None
    pool = StatePool(layout, 4)
    for layer in pool.layers:
        assert layer.matrices is not None
        for slot in range(5):
            layer.tails[slot], layer.matrices[slot] = slot, 10 * slot
    pool.copy([(1, 2), (2, 3), (4, 1)])
    for layer in pool.layers:
        assert layer.matrices is not None
        assert layer.tails[:, 0, 0].tolist() == [0, 4, 1, 1, 4]
        assert layer.matrices[:, 0, 0, 0].tolist() == [0, 40, 10, 10, 40]
    assert all(torch.equal(a.tails, b.tails) for a, b in zip(pool.layers, pool.layers[1:]))


def test_states_are_kept_as_far_apart_as_their_size_asks(folder: Path) -> None:
    config = read_model_config(folder)
    state, kv = StateLayout.of(config, "float32"), KVLayout.of(config, "float32")
    assert state is not None
    assert state.num_bytes // kv.bytes_per_token < 256 == checkpoint_interval(state, kv)
    heavy = StateLayout(1000, state.tail, state.matrix)
    interval = checkpoint_interval(heavy, kv)
    assert 256 < interval <= 4096 and interval & (interval - 1) == 0


def test_memory_is_shared_between_kv_and_states(folder: Path) -> None:
    config = read_model_config(folder)
    state, kv = StateLayout.of(config, "float32"), KVLayout.of(config, "float32")
    assert state is not None
    size = {"page_size": 1, "max_running_requests": 4, "max_model_len": 100, "mem_fraction": 1.0}
    left = 200 * kv.bytes_per_token
    room = 4 * state.num_bytes + 2 * left
    assert num_pages_for(kv, available_bytes=room, states=state, **size) == 200  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="recurrent states of max_running_requests=4 take"):
        num_pages_for(kv, available_bytes=room // 3, states=state, **size)  # type: ignore[arg-type]
    slots = {"max_running_requests": 4, "kv_bytes": 100 * state.num_bytes}
    assert num_state_slots(state, num_checkpoints=None, **slots) == 104
    assert num_state_slots(state, num_checkpoints=7, **slots) == 11
