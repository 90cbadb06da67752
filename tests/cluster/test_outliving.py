"""Programs outlive the router that they run through: their clients open them again on the next."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster_programs import said_by, story
from cluster_threads import Cluster, clustered
from engine_thread import serving
from waiting import PATIENCE_S, wait_until

from stemma.frontend.client.backend import Backend
from stemma.frontend.protocol.program_log import MAX_LOST


@contextmanager
def outliving(
    checkpoint: Path, folder: Path, num_replicas: int = 2
) -> Iterator[tuple[Cluster, Backend]]:
    endpoint = f"ipc://{folder}/cluster"
    with clustered(checkpoint, num_replicas, endpoint=endpoint) as (cluster, other):
        other.shutdown()
        backend = cluster.connect(outlives_runtime=True, timeout_s=PATIENCE_S)
        try:
            yield cluster, backend
        finally:
            backend.shutdown()


@pytest.mark.parametrize("seed", [0, pytest.param(range(1, 40), marks=pytest.mark.slow)])
def test_programs_say_the_same_when_the_router_is_replaced_at_random(
    checkpoint: Path, tmp_path: Path, seed: int | range
) -> None:
    with serving(checkpoint, max_total_tokens=8192) as alone:
        truth = said_by(alone)
    for number in [seed] if isinstance(seed, int) else seed:
        with outliving(checkpoint, tmp_path) as (cluster, backend):
            said: list[str] = []
            author = threading.Thread(target=lambda: said.extend(said_by(backend)))  # noqa: B023
            author.start()
            replace_at_random(cluster, author, random.Random(number))
            author.join(PATIENCE_S)
            assert said == truth, number


def replace_at_random(cluster: Cluster, author: threading.Thread, rng: random.Random) -> None:
    """One router after the other, fewer than a program may lose, while the author waits."""
    for _ in range(MAX_LOST - 1):
        wait_until(lambda: not author.is_alive() or any(r.programs for r in cluster.replicas))
        author.join(rng.uniform(0.0, 0.3))
        if author.is_alive():
            cluster.replace_router()


def test_a_stream_goes_on_behind_what_was_seen(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, max_total_tokens=8192) as alone:
        whole = str(story.run(seed=1, backend=alone)["a"])
    with outliving(checkpoint, tmp_path, 1) as (cluster, backend):
        state = story.run(seed=1, backend=backend, stream=True)
        pieces: list[str] = []
        for piece in state.text_iter("a"):
            pieces.append(piece)
            if len(pieces) == 3:
                cluster.replace_router()
        assert "".join(pieces) == state["a"] == whole
