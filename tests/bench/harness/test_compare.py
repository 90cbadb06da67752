"""Two runs beside each other: which rows belong together, and what is more than noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stemma.bench.harness.compare import changes
from stemma.bench.harness.stored_reports import Report, read_reports
from stemma.cli.parser import run_command
from stemma.errors import InvalidRequest

MACHINE = {"cpu": "a", "cores": 2, "commit": "1234"}
OLD = {"work": "fan", "clients": 8, "wall_s": 10.0, "wall_min_s": 9.0, "wall_max_s": 12.0}
NEW = {"work": "fan", "clients": 8, "wall_s": 8.0, "wall_min_s": 7.0, "wall_max_s": 8.5}


def compared(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    runs = ({"load": Report(MACHINE, rows)} for rows in (old, new))
    return [
        (change.row, change.figure, change.ratio, change.is_outside_noise)
        for change in changes(*runs, threshold=0.1)
    ]


def test_a_figure_has_changed_when_the_ranges_of_its_repeats_do_not_meet() -> None:
    near = {**NEW, "wall_max_s": 9.0}
    assert compared([OLD], [NEW]) == [("fan", "clients", 1.0, False), ("fan", "wall_s", 0.8, True)]
    assert compared([OLD], [near])[1] == ("fan", "wall_s", 0.8, False)


def test_a_median_has_the_range_of_the_columns_min_and_max() -> None:
    old = {"what": "start", "median": 3.0, "min": 2.0, "max": 4.0}
    assert compared([old], [{**old, "median": 1.5, "max": 1.9, "min": 1.0}]) == [
        ("start", "median", 0.5, True)
    ]


def test_without_ranges_the_threshold_decides() -> None:
    old, near, far = ({"work": "fan", "us": value} for value in (100.0, 109.0, 111.0))
    assert [compared([old], [new])[0][3] for new in (near, far)] == [False, True]


def test_rows_of_equal_texts_are_told_apart_by_whole_numbers() -> None:
    old = [{"work": "fan", "clients": n, "us": float(n)} for n in (1, 8)]
    new = [{"work": "fan", "clients": n, "us": 2.0 * n} for n in (8, 1)]
    assert compared(old, new) == [("fan, 1", "us", 2.0, True), ("fan, 8", "us", 2.0, True)]


def test_a_row_of_one_run_alone_is_a_change() -> None:
    lone = {"work": "chat", "us": 1.0}
    assert compared([], [lone]) == [("chat", "us", None, True)]


def test_what_is_collected_compares_as_its_folder_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, row, cores in (("old", OLD, 2), ("new", NEW, 4)):
        (tmp_path / name).mkdir()
        report = {"machine": {**MACHINE, "cores": cores}, "rows": [row]}
        (tmp_path / name / "load.json").write_text(json.dumps(report))
    old, new = tmp_path / "old", tmp_path / "new"
    flags = ["--reports", str(old), "--out", str(tmp_path)]
    assert run_command(["bench", "collect", "1.0", *flags]) == 0
    assert read_reports(tmp_path / "1.0.json") == read_reports(old)
    capsys.readouterr()
    assert run_command(["bench", "compare", str(tmp_path / "1.0.json"), str(new)]) == 0
    written = capsys.readouterr()
    assert "wall_s" in written.out and "clients" not in written.out
    assert "1 of 2 figures are outside the noise" in written.out
    assert "the machines differ" in written.err


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("[1]")
    for path in (tmp_path, tmp_path / "notes.json", tmp_path / "none", tmp_path / "a.json"):
        with pytest.raises(InvalidRequest, match="stemma bench NAME"):
            read_reports(path)
