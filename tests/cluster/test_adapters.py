"""Adapters that were loaded while replicas run are on those that come later, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from adapters import make_adapter
from cluster_programs import GEN
from cluster_threads import Cluster, clustered

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
