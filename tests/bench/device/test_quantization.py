"""The benchmark of quantized weights, tiny: every table has its rows, and accuracy is plausible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stemma.bench.device import quantization
from stemma.bench.harness.model import Shape
from stemma.cli.parser import run_command

TINY = Shape(64, 1, 2, 1, 32, 96)


def test_every_format_is_measured_in_every_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quantization, "SHAPES", {"tiny": TINY})
    monkeypatch.setattr(quantization, "COLD_BYTES", 1)
    monkeypatch.setattr(quantization, "_READ_BYTES", 64 << 20)
    arguments = ["bench", "quantization", "--rows", "1", "65", "--repeats", "1", "--vocab", "300"]
    lengths = ["--prompt-tokens", "9", "--context-tokens", "4"]
    assert run_command([*arguments, *lengths, "--json", "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    of = {
        name: [r for r in rows if r["table"] == name] for name in ("linears", "steps", "accuracy")
    }
    assert [(r["linear"], r["rows"]) for r in of["linears"]] == [
        (name, count) for name in ("qkv", "o", "gate, up", "down", "lm_head") for count in (1, 65)
    ]
    assert [r["format"] for r in of["steps"]] == ["bf16", "int8", "w8a8", "int4"]
    sizes = [r["weights, MB"] for r in of["steps"]]
    assert sizes[0] > sizes[1] == sizes[2] > sizes[3]
    errors = [r["logit error, to float32"] for r in of["accuracy"]]
    assert 0 < errors[0] < errors[1] < errors[2] < errors[3] < 0.5
    report = json.loads((tmp_path / "quantization.json").read_text())
    assert report["read_gb_s"] > 0 and report["rows"] == rows
