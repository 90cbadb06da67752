"""`stemma bench serving` as a user runs it, and the runners' answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from engine_thread import engine_in_thread

from stemma.bench.harness.workloads import WorkItem, Workload
from stemma.bench.serving.runners.stemma_offline import run_workload

KEYS = {
    "work", "engine", "wall_s", "wall_min_s", "wall_max_s", "cpu_s", "tok_s", "output_tokens",
    "ratio", "ratio_min", "ratio_max", "cpu_ratio", "target", "share", "floor_s", "floor_ratio",
    "quiet", "others_cores",
    "equal_outputs", "peak_rss_mb", "documents", "valid_documents", "s_per_valid",
    "cpu_s_per_valid", "mean_tokens", "mean_canonical_tokens",
}  # fmt: skip


def serving(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stemma", "bench", "serving", "--out", str(folder), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_serving_reports_rows_limits_and_engines_without_any_peer(tmp_path: Path) -> None:
    flags = ("--work", "chat,D1,json", "--scale", "0.13", "--repeats", "1", "--http", "--json")
    done = serving(tmp_path, *flags, "--kv-tokens", "4096")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["work"], row["engine"]) for row in rows] == [
        ("W2", "stemma"), ("W2", "stemma-http"), ("D1", "stemma"), ("D1", "stemma-http"),
        ("W5", "stemma"), ("W5", "stemma-http"),
    ]  # fmt: skip
    for row in rows:
        assert set(row) == KEYS and row["wall_min_s"] <= row["wall_s"] <= row["wall_max_s"]
        assert row["equal_outputs"] == 1, "both ways are the same engine"
    for row in rows[:4]:
        assert row["output_tokens"] == {"W2": 6 * 32, "D1": 128}[row["work"]]
        assert row["documents"] is None
    for row in rows[4:]:
        assert (row["documents"], row["valid_documents"]) == (4, 4) and row["s_per_valid"] > 0
        assert row["output_tokens"] < 4 * 128, "end-of-sequence is honoured"
    for row in rows[::2]:
        assert row["floor_s"] > 0.0, row["work"]  # by limits of another moment: no bound of a run
    assert rows[1]["floor_s"] is None, "steps are logged where the engine is driven"
    assert rows[0]["ratio"] is None and rows[1]["ratio"] > 0 and rows[2]["share"] > 0
    report = json.loads((tmp_path / "serving.json").read_text())
    assert {"cpu", "cores", "commit", "torch"} <= set(report["machine"])
    assert report["limits"]["read_gb_s"] > 0 and report["limits"]["matmul_gflop_s"] > 0
    assert [engine["mode"] for engine in report["engines"]] == ["offline", "http"]
    assert len(report["repeats"]) == 3 * 2


def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    done = serving(tmp_path, "--work", "D1", "--repeats", "1", "--peer", f"vllm={sys.executable}")
    assert done.returncode == 1
    assert "vllm has ended" in done.stderr and "No module named 'vllm'" in done.stderr


def test_branches_of_a_tree_go_on_from_their_parents_output(checkpoint: Path) -> None:
    """Each request of a tree gives what its whole prompt gives by itself."""
    items = (
        WorkItem(0, (256, 65, 66, 67), 5),
        WorkItem(1, (70,), 4, 0, 1),
        WorkItem(2, (71, 72), 4, 0, 1),
        WorkItem(3, (73,), 3, 2, 2),
    )
    with engine_in_thread(checkpoint, dtype="float32", max_total_tokens=4096) as engine:
        book = run_workload(Workload("tree", "", 260, True, None, items), engine)
        for item in items:
            alone = WorkItem(9, tuple(book.prompts[item.id]), item.max_tokens)
            again = run_workload(Workload("one", "", 260, True, None, (alone,)), engine)
            assert again.outputs[9] == book.outputs[item.id], item
            assert len(book.outputs[item.id]) == item.max_tokens
