"""What each of several models takes of a memory that they share."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from stemma.planning.model_share import (
    LEAST_SEQUENCES,
    Lengths,
    SharedMemory,
    share_of,
    share_with,
)
from stemma.planning.resident_memory import PROCESS_BYTES
from stemma.planning.served_model import ServedModel
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.runtime.memory.sizing import num_state_slots
from stemma.runtime.memory.state_layout import StateLayout
from stemma.runtime.models.model_config import read_model_config

MODEL = ServedModel.of(read_model_config(EMBEDDED_MODEL), "float32")
FIXED = PROCESS_BYTES + MODEL.weight_bytes + MODEL.rotary_bytes
SEQUENCE = 2048 * MODEL.kv_bytes_per_token
MANY = Lengths(2048, max_running_requests=1 << 16, page_size=1)


def memory(num_bytes: int, num_models: int, kv_fraction: float | None = 1.0) -> SharedMemory:
    return SharedMemory(num_bytes, num_models, is_gpu=False, kv_fraction=kv_fraction)


@pytest.mark.parametrize("num_models", [1, 2, 3, 7])
def test_models_that_have_room_in_their_shares_fit_together(num_models: int) -> None:
    num_bytes = num_models * (FIXED + 40 * SEQUENCE) + 1
    share = share_of(MODEL, memory(num_bytes, num_models), MANY)
    assert num_models * share.num_bytes <= num_bytes
    assert share.kv_tokens == pytest.approx(40 * 2048, abs=num_models)


def test_a_share_of_the_kv_is_left_free_by_default() -> None:
    num_bytes = 2 * (FIXED + 100 * SEQUENCE)
    share = share_of(MODEL, memory(num_bytes, 2, None), MANY)
    assert share.kv_tokens == pytest.approx(30 * 2048, abs=1), "of a CPU"


def test_a_model_too_large_for_its_share_takes_what_a_few_sequences_need() -> None:
    num_bytes = 3 * FIXED
    share = share_of(MODEL, memory(num_bytes, 10), MANY)
    assert share.kv_tokens == LEAST_SEQUENCES * 2048
    assert share.num_bytes == FIXED + LEAST_SEQUENCES * SEQUENCE > num_bytes // 10


def test_a_model_too_large_for_all_memory_says_so() -> None:
    share = share_of(MODEL, memory(FIXED // 2, 1), MANY)
    assert share.num_bytes == FIXED + SEQUENCE > FIXED // 2


def test_a_pool_holds_no_more_than_all_requests_could_use() -> None:
    lengths = Lengths(100, max_running_requests=3, page_size=16)
    share = share_of(MODEL, memory(1 << 40, 2), lengths)
    assert share.kv_tokens == 3 * 112, "whole pages"


def test_a_pool_of_a_given_size_counts_as_it_is() -> None:
    share = share_with(MODEL, 1000, MANY, step_bytes=5)
    assert share.num_bytes == FIXED + 5 + 1000 * MODEL.kv_bytes_per_token


def test_recurrent_states_are_within_a_share_as_an_engine_allots_them(tmp_path: Path) -> None:
    types = ["conv", "full_attention", "conv", "conv"]
    folder = make_checkpoint(tmp_path, "lfm2", num_layers=4, layer_types=types)
    model = ServedModel.of(read_model_config(folder), "float32")
    states = StateLayout.of(model.config, "float32")
    assert states is not None
    fixed = PROCESS_BYTES + model.weight_bytes + model.rotary_bytes
    lengths = Lengths(512, max_running_requests=8, page_size=1)
    own = (8 + 4000) * states.num_bytes
    share = share_of(model, memory(2 * (fixed + own), 2), lengths)
    kv_bytes = share.kv_tokens * model.kv_bytes_per_token
    slots = num_state_slots(states, max_running_requests=8, num_checkpoints=None, kv_bytes=kv_bytes)
    assert share.num_bytes == fixed + kv_bytes + slots * states.num_bytes <= fixed + own
    given = share_with(model, 64, Lengths(512, 8, 1, num_checkpoints=5))
    assert given.num_bytes == fixed + 64 * model.kv_bytes_per_token + 13 * states.num_bytes
