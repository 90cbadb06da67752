"""The benchmark of compiled kernels, tiny: every kernel has its rows, beside torch's calls."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from stemma.bench.device import kernels
from stemma.bench.harness import limits
from stemma.cli.parser import run_command
from stemma.kernels.native.bindings import why_not_native

missing = why_not_native(torch.bfloat16)


pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))


def test_what_is_compared_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "COLD_BYTES", 1)
    args = argparse.Namespace(
        size=(64, 96), rows=[3], batches=[2], contexts=[8], heads=(6, 2, 32), page_size=4
    )
    contests = [*kernels._linears(args), *kernels._attention(args)]
    assert len(contests) == 2
    for contest in contests:
        expected = contest.torch_calls[kernels.FLOAT32]()
        for each in contest.kernels:
            found = each.call().view_as(expected).float()
            error = (found - expected).norm() / expected.norm()
            assert error < (0.1 if each.format == "int4" else 0.02), (each.op, each.format)


def test_every_kernel_is_measured_beside_torchs_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(limits, "measure", lambda *_: limits.Limits(10.0, 100.0))
    monkeypatch.setattr(kernels, "configure_threads", lambda *_: None)  # torch is imported
    monkeypatch.setattr(kernels, "COLD_BYTES", 1)
    monkeypatch.setattr(kernels, "TURN_S", 0.0)
    arguments = ["--size", "64", "96", "--rows", "1", "9", "--batches", "2", "--contexts", "7"]
    command = ["bench", "kernels", *arguments, "--rounds", "1", "--num-threads", "1"]
    assert run_command([*command, "--json", "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert Counter((row["op"], row["format"]) for row in rows) == {
        **{("linear", name): 2 for name in ("bf16", "int8", "int4")},
        **{("decode attention", name): 1 for name in ("bf16", "int8", "int4")},
        ("add, RMS norm", "bf16"): 1,
        ("rotate and store", "bf16"): 1,
    }
    for row in rows:
        for name in ("bf16", "float32"):
            ratio = row[f"torch {name}, us"] / row["compiled, us"]
            assert row[f"torch {name} / it"] == pytest.approx(ratio)  # of one round
    linear = rows[0]
    assert linear["limit, us"] == pytest.approx(64 * 96 * 2 / 10e3)  # read from memory
    report = json.loads((tmp_path / "kernels.json").read_text())
    assert report["rows"] == rows and report["limits"]["read_gb_s"] == 10.0
