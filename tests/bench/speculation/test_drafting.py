"""The replay of recorded calls: what it counts as a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stemma.__main__ import main as run_command

# Of the conversations those that generate: classification selects.
SKILLS = {"extract", "react", "chat", "extract_many", "copy"}


def replayed(folder: Path, calls: list[dict[str, object]]) -> dict[str, dict[str, float]]:
    """Rows by name."""
    path = folder / "calls.jsonl"
    path.write_text("\n".join(map(json.dumps, calls)))
    assert run_command(["bench", "drafting", "--calls", str(path), "--out", str(folder)]) == 0
    return {
        row["drafts"]: row for row in json.loads((folder / "drafting.json").read_text())["rows"]
    }


def test_a_call_that_repeats_another_takes_fewer_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call: dict[str, object] = {"op": "op", "prompt": [1, 2], "output": [*range(10, 19)]}
    rows = replayed(tmp_path, [{**call, "program": 0}, {**call, "program": 1}])
    assert rows["off"]["tokens_a_step"] == rows["own text"]["tokens_a_step"] == 1
    assert rows["and op"]["tokens_a_step"] == pytest.approx(18 / (9 + 1))


def test_forced_tokens_cost_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = replayed(
        tmp_path,
        [{"program": 0, "op": "", "prompt": [1], "output": [2, 3, 4, 5], "forced": [1, 0, 1, 1]}],
    )
    assert rows["off"]["tokens_a_step"] == 4


def test_calls_are_recorded_on_the_embedded_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["bench", "drafting", "--conversations", "1", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "drafting.json").read_text())
    assert {row["skill"] for row in report["by_skill"]} == SKILLS
    off = {row["skill"]: row["off"] for row in report["by_skill"]}
    assert off["chat"] == 1 < off["extract"], "the grammar forces tokens"


CALL = {"program": 0, "op": "", "prompt": [1], "output": [2]}


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        (None, "No such file"),
        ([], "there is no output"),
        ([CALL, {**CALL, "colour": "red"}], "colour"),
        ([{**CALL, "forced": [1, 1]}], "call 0: 1 tokens, 2 forced"),
        ([{**CALL, "after": [1]}, CALL], "call 0 is after others"),
        ([{**CALL, "program": 1}, {**CALL, "after": [0]}], "call 1 is after others"),
    ],
)
def test_a_file_that_cannot_be_replayed_is_refused_with_the_reason(
    calls: list[dict[str, object]] | None,
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "calls.jsonl"
    if calls is not None:
        path.write_text("\n".join(map(json.dumps, calls)))
    assert run_command(["bench", "drafting", "--calls", str(path), "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("stemma bench: calls=") and reason in said
