"""KV that leaves ranks which have some heads each: blocks of a store are of all heads, whoever has
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
from ranks import ThreadCommunicator, on_ranks
from waiting import PATIENCE_S

from stemma.errors import InvalidRequest
from stemma.runtime.config import EngineConfig
from stemma.runtime.memory.ranked_transfer import JoinedHeads
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
}


def job(seed: int) -> Job:
    rng = random.Random(seed)
    return Job(tuple(rng.randrange(256) for _ in range(NUM_STORED + 40)), SAMPLING)


@pytest.mark.parametrize("name", MODELS)
def test_what_ranks_have_stored_one_process_reads_and_the_other_way_round(
    name: str, tmp_path: Path
) -> None:
    make, options = MODELS[name]
    make(tmp_path / "model", **ROOM)
    jobs = [job(0), job(1)]
    for load in loading(tmp_path / "model"):
        alone = said_alone(partial(load, **options), jobs)
        num_read = []
        for turn, size in enumerate((2, 1, 2)):
            folder = {"kv_store": tmp_path / "store", "pin_share": 0.1 * turn}
            loaded = load(tp_size=size, **folder, **options)
            requests = serve(loaded, jobs[: 1 + turn])
            assert outputs_of(requests) == alone[: len(requests)]
            num_read.append([request.num_disk_tokens for request in requests])
            assert loaded.engine.kv_store is not None and loaded.engine.kv_store.flush(PATIENCE_S)
            loaded.engine.kv_store.close()
        assert num_read == [[0], [NUM_STORED, 0], [NUM_STORED] * 2]


@pytest.mark.parametrize(
    "kv_heads", [[(0, 2), (2, 4)], [(0, 1), (0, 1)], [(0, 3), (2, 3)]], ids=str
)
def test_what_is_split_is_joined_again(kv_heads: list[tuple[int, int]]) -> None:
    """Two pieces, of vectors that differ in length."""
    count, row_bytes = max(end for _, end in kv_heads), (6, 10)
    whole = np.arange(2 * count * sum(row_bytes), dtype=np.uint8)

    def run(communicator: ThreadCommunicator) -> tuple[int, np.ndarray[Any, Any]]:
        heads = JoinedHeads(communicator, kv_heads, count)
        own = heads.split(whole if communicator.rank == 0 else whole[:0], row_bytes)
        return own.size, heads.join(own, row_bytes)

    (num_own, joined), (num_others, _) = on_ranks(2, run)
    assert np.array_equal(joined, whole)
    sizes = [2 * (end - first) * sum(row_bytes) for first, end in kv_heads]
    assert [num_own, num_others] == sizes


@pytest.mark.parametrize("sizes", [{"pp_size": 2}, {"tp_size": 2, "cp_size": 2}], ids=str)
@pytest.mark.parametrize("options", [{"kv_store": "kv"}, {"prefill_engines": ("ipc://kv",)}])
def test_kv_of_divided_layers_or_tokens_does_not_leave(
    options: dict[str, Any], sizes: dict[str, int], checkpoint: Path
) -> None:
    with pytest.raises(InvalidRequest, match=r"none with .*: tp_size alone divides it"):
        EngineConfig(model=checkpoint, **sizes, **options)
