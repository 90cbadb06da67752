"""Measured steps correct predicted ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stemma.errors import InvalidRequest
from stemma.planning.calibration import NO_CALIBRATION, Calibration
from stemma.planning.devices import GPUS
from stemma.planning.roofline import CostModel
from stemma.planning.roofline_device import RooflineDevice
from stemma.planning.served_model import ServedModel
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.runtime.models.model_config import read_model_config

COSTS = CostModel(ServedModel.of(read_model_config(EMBEDDED_MODEL), "bfloat16"), GPUS["l4"])
SHAPES = {(8, 1, 288): 2.0, (64, 1, 288): 1.5, (1, 256, 0): 0.5, (64, 256, 0): 0.8}


def report(path: Path, times: dict[tuple[int, int, int], float]) -> Path:
    """As `stemma bench step` writes it, of steps so many times as long as predicted."""
    rows = []
    for (num_rows, tokens, before), factor in times.items():
        ms = 1e3 * factor * COSTS.step_time([(tokens, before)] * num_rows, num_rows).total_s
        row = {"rows": num_rows, "tokens a row": tokens, "tokens before": before, "step, ms": ms}
        rows.append(row)
    path.write_text(json.dumps({"rows": rows}))
    return path


def test_a_step_takes_as_long_as_it_was_measured(tmp_path: Path) -> None:
    calibration = Calibration.read(report(tmp_path / "step.json", SHAPES), COSTS)
    device = RooflineDevice(COSTS, 1000, 8, calibration)
    for (num_rows, tokens, before), factor in SHAPES.items():
        rows = [(tokens, before)] * num_rows
        predicted_s = COSTS.step_time(rows, num_rows).total_s
        assert device.rows_s(rows, num_rows) == pytest.approx(factor * predicted_s)
    assert calibration.ratio(128) == pytest.approx(1.0), "between 64 and 256, by the logarithm"
    assert (calibration.ratio(1), calibration.ratio(10**6)) == pytest.approx((2.0, 0.8))
    assert NO_CALIBRATION.ratio(100) == 1.0


@pytest.mark.parametrize("text", ["", "{}", '{"rows": []}', '{"rows": [{"rows": 1}]}'])
def test_a_file_that_is_no_such_report_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "step.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=r"stemma bench step|took time"):
        Calibration.read(path, COSTS)
