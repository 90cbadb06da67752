"""What a sequence's state takes, how far apart copies of it are kept, and copies between slots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kv_blocks import sequence
from mixtures import make_mixture

from stemma.errors import InvalidRequest
from stemma.runtime.memory.copies import StateRestore, StateSave
from stemma.runtime.memory.kv_layout import KVLayout
from stemma.runtime.memory.sizing import (
    num_host_state_slots,
    num_pages_for,
    num_state_slots,
    step_bytes,
)
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_saved_state_comes_back_bit_for_bit_and_in_order(folder: Path, dtype: str) -> None:
    layout = StateLayout.of(read_model_config(folder), dtype)
    assert layout is not None
    pool = StatePool(layout, 2, num_host_slots=2)
    generator = torch.Generator().manual_seed(1)
    tensors = [t for layer in pool.layers for t in (layer.tails, layer.matrices) if t is not None]
    bits = [tensor.view(torch.uint8) for tensor in tensors]
    for tensor in bits:  # any bits: NaNs, too
        tensor.random_(0, 256, generator=generator)
    before = [tensor.clone() for tensor in bits]
    block = sequence(1)[0]
    (payload,) = pool.copy([(1, 4), StateSave(block, 4), (2, 4)])
    assert payload.nbytes == layout.num_bytes
    payload.flags.writeable = False  # as from a server
    assert pool.copy([StateRestore(payload, 2), (2, 3)]) == ()
    for tensor, was in zip(bits, before):
        for slot, source in enumerate((0, 1, 1, 1, 2)):
            assert torch.equal(tensor[slot], was[source])


def test_the_host_has_states_as_large_as_its_kv(folder: Path) -> None:
    state = StateLayout.of(read_model_config(folder), "float32")
    assert state is not None
    size = state.num_bytes
    found = [num_host_state_slots(state, kv_bytes) for kv_bytes in (0, 1, 7 * size, 10**9 * size)]
    assert found == [0, 1, 7, 4096]


def test_states_are_kept_as_far_apart_as_their_size_asks(folder: Path) -> None:
    config = read_model_config(folder)
    state, kv = StateLayout.of(config, "float32"), KVLayout.of(config, "float32")
    assert state is not None
    assert state.num_bytes // kv.bytes_per_token < 256 == checkpoint_interval(state, kv)
    heavy = StateLayout(1000, state.tail, state.matrix)
    interval = checkpoint_interval(heavy, kv)
    assert 256 < interval <= 4096 and interval & (interval - 1) == 0


def test_a_steps_memory_counts_recurrent_layers(folder: Path) -> None:
    config = read_model_config(folder)
    size = {"dtype_bytes": 2, "num_rows": 1}
    alone = replace(config, recurrent=None)
    extra = [
        step_bytes(config, num_tokens=n, **size) - step_bytes(alone, num_tokens=n, **size)
        for n in (1, 100)
    ]
    channels, values = 2 * 2 * 12 + 6 * 20, 6 * 20
    assert extra[0] > 2 * (channels + values) and extra[1] == 100 * extra[0]


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
