"""`stemma bench radix`: what it prints, and that its workload is the one it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stemma.bench.cache.radix import StemmaTree, drive, sequences
from stemma.cli.parser import run_command
from stemma.radix.check import check

TINY = ["--sequences", "40", "--pool-tokens", "16384", "--repeats", "1"]


def bench(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> list[dict[str, float]]:
    assert run_command(["bench", "radix", "--json", "--out", str(folder), *flags]) == 0
    rows: list[dict[str, float]] = json.loads(capsys.readouterr().out)
    return rows


def test_bench_radix_prints_a_run_a_page_size_and_chunk(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = bench(capsys, tmp_path, *TINY)
    settings = [(row["page_size"], row["evict_chunk"]) for row in rows]
    assert settings == [(1, 16_384), (16, 16_384), (1, 512), (16, 512)]
    for row in rows:
        for key in ("tokens_per_s", "match_us", "insert_us", "evict_us"):
            assert row[key] > 0, key
    assert json.loads((tmp_path / "radix.json").read_text())["rows"] == rows


def test_bench_radix_growth_prints_a_row_a_tree(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = bench(capsys, tmp_path, "--growth", "2", "3", "--repeats", "1")
    spares = 1_000
    assert [row["num_nodes"] - spares for row in rows] == [2 + 4 + 8 + 16, 3 + 9 + 27 + 81]
    assert all(rows[0][key] == 1 for key in rows[0] if key.endswith("_growth"))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("evict_chunk", [512, 4_096])
def test_a_run_keeps_its_pool_full_and_leaks_nothing(page_size: int, evict_chunk: int) -> None:
    workload = sequences(60, "i")
    subject = StemmaTree(page_size, 16_384)
    run = drive(subject, workload, evict_chunk)
    check(subject.tree, subject.allocator, locks=[])
    assert subject.tree.match_length("", workload[-1]) == len(workload[-1]) == 1_024
    assert subject.num_free() < evict_chunk
    assert 128 / 1_024 * 59 / 60 <= run.hit_rate < 0.5


def test_the_peers_get_the_same_sequences_in_64_bits() -> None:
    assert [list(ids) for ids in sequences(3, "i")] == [list(ids) for ids in sequences(3, "q")]


def test_a_folder_without_sglang_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_command(["bench", "radix", "--peer", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert "--peer" in capsys.readouterr().err
