"""Adapters that were loaded while replicas run are on those that come later, too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from adapters import make_adapter
from cluster_programs import GEN
from cluster_threads import Cluster, clustered
from waiting import wait_until

import stemma as st
from stemma.frontend.client.backend import Backend


@st.function
def story(s: st.ProgramState) -> None:
    s += "Once " + st.gen("a", max_tokens=12, lora_path="sql", **GEN)


@contextmanager
def adapted(checkpoint: Path, root: Path, **options: Any) -> Iterator[tuple[Cluster, Backend]]:
    lora: dict[str, Any] = {"enable_lora": True, "lora_root": root, "max_lora_rank": 8}
    with clustered(checkpoint, 2, **lora, **options) as (cluster, backend):
        yield cluster, backend


def test_a_replica_that_is_started_anew_has_them(checkpoint: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path / "sql", checkpoint)
    with adapted(checkpoint, tmp_path) as (cluster, backend):
        backend.load_lora_adapter("sql", tmp_path / "sql")
        wanted = story.run(seed=1, backend=backend)["a"]
        for number in (0, 1):
            cluster.kill(number)
            cluster.wait_lost(number)
            cluster.wait_ready()
        for engine in cluster.engines.values():
            assert [a["name"] for a in engine.gateway._control._lora_adapters()] == ["sql"]
        assert story.run(seed=1, backend=backend)["a"] == wanted


def test_one_that_was_unloaded_or_is_gone_keeps_no_replica_from_being_ready(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_adapter(tmp_path / "sql", checkpoint)
    gone = make_adapter(tmp_path / "gone", checkpoint, seed=1)
    with adapted(checkpoint, tmp_path) as (cluster, backend):
        backend.load_lora_adapter("sql", tmp_path / "sql")
        backend.load_lora_adapter("gone", gone)
        backend.unload_lora_adapter("sql")
        for path in gone.iterdir():
            path.unlink()
        cluster.kill(0)
        cluster.wait_lost(0)
        cluster.wait_ready()
        assert "replica 0 is without adapter gone" in caplog.text
        assert cluster.engines[0].gateway._control._lora_adapters() == []
        with pytest.raises(st.ProgramError, match="sql"):
            story.run(seed=1, backend=backend)


def test_one_of_those_that_engines_start_with_stays_unloaded(
    checkpoint: Path, tmp_path: Path
) -> None:
    old = make_adapter(tmp_path / "old", checkpoint)
    with adapted(checkpoint, tmp_path, lora_paths=(("old", old),)) as (cluster, backend):
        backend.unload_lora_adapter("old")
        cluster.kill(0)
        cluster.wait_lost(0)
        cluster.wait_ready()
        assert names(cluster, 0) == names(cluster, 1) == []
        backend.load_lora_adapter("old", old)
        cluster.kill(1)
        cluster.wait_lost(1)
        cluster.wait_ready()
        assert names(cluster, 0) == names(cluster, 1) == ["old"]


def names(cluster: Cluster, number: int) -> list[str]:
    return [a["name"] for a in cluster.engines[number].gateway._control._lora_adapters()]


@contextmanager
def stopped(cluster: Cluster, number: int) -> Iterator[None]:
    """As the router sees it."""
    engine: Any = cluster.engines[number]
    engine.is_stopped = lambda: True
    wait_until(lambda: cluster.replicas[number].is_paused)
    yield
    engine.is_stopped = lambda: False
    wait_until(lambda: not cluster.replicas[number].is_paused)


def test_one_that_was_stopped_meanwhile_has_them_too(checkpoint: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path / "sql", checkpoint)
    make_adapter(tmp_path / "old", checkpoint, seed=1)
    with adapted(checkpoint, tmp_path, placement="round_robin") as (cluster, backend):
        backend.load_lora_adapter("old", tmp_path / "old")
        with stopped(cluster, 1):
            backend.unload_lora_adapter("old")
            backend.load_lora_adapter("sql", tmp_path / "sql")
        wait_until(lambda: names(cluster, 0) == names(cluster, 1) == ["sql"])
        said = {story.run(seed=1, backend=backend)["a"] for _ in range(4)}
        assert len(said) == 1 and min(cluster.router.num_placed.values()) > 1


def test_one_that_not_all_can_have_nobody_has(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_adapter(tmp_path / "sql", checkpoint)
    with adapted(checkpoint, tmp_path) as (cluster, backend):
        loader: Any = cluster.engines[1].gateway._control.adapter_loader
        with monkeypatch.context() as broken:
            broken.setattr(loader, "_read", lambda job: _fail(loader, job))
            with pytest.raises(st.EngineError, match="its disk is gone"):
                backend.load_lora_adapter("sql", tmp_path / "sql")
        wait_until(lambda: not names(cluster, 0) and not cluster.replicas[0].is_behind)
        assert not names(cluster, 1)
        backend.load_lora_adapter("sql", tmp_path / "sql")
        wait_until(lambda: names(cluster, 0) == names(cluster, 1) == ["sql"])


def _fail(loader: Any, job: Any) -> None:
    job.outcome = OSError("its disk is gone")
    loader._done.append(job)
    os.write(loader._wake_w, b"\0")
