"""KV that leaves processes which have a part of it each: blocks of a store are of all, whoever has
written them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from exactness_jobs import Job, loading, outputs_of, said_alone, serve
from mixtures import make_mixture
from ranks import ThreadCommunicator, on_grid
from waiting import PATIENCE_S

from stemma.errors import InvalidRequest
from stemma.kernels.context_share import PageShare
from stemma.runtime.config import EngineConfig
from stemma.runtime.memory.block_copy import slots_of
from stemma.runtime.memory.disk.block_key import BLOCK_TOKENS
from stemma.runtime.memory.kv_layout import KVLayout, KVPart
from stemma.runtime.memory.whole_kv import HeadPlaces, StagePieces, WholeKV
from stemma.runtime.schedule.sampling_params import SamplingParams

NUM_STORED = 512  # two blocks
SAMPLING = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
ROOM = {"max_position_embeddings": 1024, "has_tokenizer": True}
MODELS: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "two KV heads": (make_checkpoint, {}),
    "8 bits": (make_checkpoint, {"kv_cache_dtype": "int8"}),
    "4 bits": (partial(make_checkpoint, head_dim=32), {"kv_cache_dtype": "int4"}),
    "one KV head for both ranks": (partial(make_checkpoint, num_kv_heads=1), {}),
    "latents": (partial(make_mixture, family="DeepseekV3"), {}),
    "layers of two shapes": (partial(make_mixture, family="DeepseekV32"), {}),
    "recurrent layers": (partial(make_mixture, family="Qwen3Next"), {}),
}
PAGE_SIZE = 4


def job(seed: int) -> Job:
    rng = random.Random(seed)
    return Job(tuple(rng.randrange(256) for _ in range(NUM_STORED + 40)), SAMPLING)


DIVISIONS: dict[str, dict[str, int]] = {
    "ranks": {"tp_size": 2},
    "stages": {"pp_size": 2},
    "tokens": {"cp_size": 2, "page_size": 16},
    "ranks that divide tokens": {"tp_size": 2, "cp_size": 2},
    "ranks of stages": {"tp_size": 2, "pp_size": 2},
    "stages that divide tokens": {"pp_size": 3, "cp_size": 2},
}


@pytest.mark.parametrize(
    ("name", "division"),
    [
        *((name, "ranks") for name in ("4 bits", "one KV head for both ranks", "recurrent layers")),
        ("layers of two shapes", "stages"),
        *((name, "tokens") for name in ("latents", "recurrent layers")),
        ("two KV heads", "ranks that divide tokens"),
        ("8 bits", "ranks of stages"),
        ("two KV heads", "stages that divide tokens"),
    ],
)
def test_what_processes_have_stored_one_reads_and_the_other_way_round(
    name: str, division: str, tmp_path: Path
) -> None:
    make, options = MODELS[name]
    sizes = DIVISIONS[division]
    make(tmp_path / "model", **ROOM | ({"num_layers": 3} if sizes.get("pp_size") == 3 else {}))
    jobs = [job(0), job(1)]
    for load in loading(tmp_path / "model"):
        alone = said_alone(partial(load, **options), jobs)
        num_read = []
        for turn, divided in enumerate((sizes, {}, sizes)):
            folder = {"kv_store": tmp_path / "store", "pin_share": 0.1 * turn}
            loaded = load(**divided, **folder, **options)
            requests = serve(loaded, jobs[: 1 + turn])
            assert outputs_of(requests) == alone[: len(requests)]
            num_read.append([request.num_disk_tokens for request in requests])
            for store in (loaded.engine.kv_store, loaded.engine.state_store):
                if store is not None:
                    assert store.flush(PATIENCE_S)
                    store.close()
        assert num_read == [[0], [NUM_STORED, 0], [NUM_STORED] * 2]


@pytest.mark.parametrize(
    "kv_heads", [[(0, 2), (2, 4)], [(0, 1), (0, 1)], [(0, 3), (2, 3)]], ids=str
)
def test_what_is_split_is_joined_again(kv_heads: list[tuple[int, int]]) -> None:
    """Between three ranks below each of two, which have some pages each; a block's end alone is
    split. Two pieces, of vectors that differ in length."""
    num_heads, widths = max(end for _, end in kv_heads), (6, 10)
    rng = np.random.default_rng(1)
    whole = rng.integers(0, 256, 2 * num_heads * BLOCK_TOKENS * sum(widths), dtype=np.uint8)
    pages = rng.permutation(BLOCK_TOKENS // PAGE_SIZE).tolist()

    def run(row: ThreadCommunicator, column: ThreadCommunicator) -> np.ndarray[Any, Any]:
        heads = HeadPlaces.of(row, kv_heads, num_heads)
        tokens = column, PageShare(column.rank, column.num_ranks)
        kv = WholeKV(PAGE_SIZE, heads, tokens)
        first, end = kv_heads[row.rank]
        num_slots = PAGE_SIZE * tokens[1].num_own(len(pages))
        memory = [np.zeros((2 * (end - first), num_slots, size), np.uint8) for size in widths]
        given = whole if row.rank == column.rank == 0 else whole[:0]
        for first_token in (0, 100):
            slots = slots_of(pages, PAGE_SIZE)[first_token:]
            kv.restore(memory, slots, given, first_token)
        return kv.save(memory, slots_of(pages, PAGE_SIZE))

    assert np.array_equal(on_grid(2, 3, run)[0], whole)


def test_what_stages_have_is_cut_and_joined_in_the_order_of_the_whole() -> None:
    """Layers of two shapes, whose parts begin with another one in the second stage."""
    wide, narrow = (partial(KVPart, name, width=1, dtype="int8") for name in ("wide", "narrow"))
    whole = KVLayout(5, (wide(num_vectors=3, layers=(0, 3)), narrow(1, layers=(1, 2, 4))))
    stages = [
        KVLayout(2, (wide(num_vectors=3, layers=(0,)), narrow(1, layers=(1,)))),
        KVLayout(3, (narrow(1, layers=(0, 2)), wide(num_vectors=3, layers=(1,)))),
    ]
    pieces = StagePieces.of(whole, stages)
    assert pieces.numbers == [[0, 2], [3, 4, 1]]
    payload = np.repeat(np.arange(5, dtype=np.uint8), [3 * 256, 3 * 256, 256, 256, 256])
    first, second = pieces.cut(payload)
    assert first.tolist() == [0] * 3 * 256 + [2] * 256
    assert second.tolist() == [3] * 256 + [4] * 256 + [1] * 3 * 256
    assert np.array_equal(pieces.joined([first, second]), payload)


@pytest.mark.parametrize("sizes", [{"pp_size": 2}, {"tp_size": 2, "cp_size": 1}], ids=str)
@pytest.mark.parametrize("options", [{"kv_store": "kv"}, {"prefill_engines": ("ipc://kv",)}])
def test_kv_of_several_gpus_does_not_leave(
    options: dict[str, Any], sizes: dict[str, int], checkpoint: Path
) -> None:
    with pytest.raises(InvalidRequest, match=r"none (with .* )?but with device=cpu"):
        EngineConfig(model=checkpoint, device="cuda", **sizes, **options)
