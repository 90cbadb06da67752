"""`stemma schema check` and `stemma schema bundle`, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stemma.cli.parser import run_command
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL


def written(path: Path, schema: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(schema))
    return str(path)


def test_a_schema_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "a.json", {"type": "array", "items": {"type": "integer"}})
    assert run_command(["schema", "check", file, "--strict"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "path      fsm",
        "states    ",
        "example   (valid by jsonschema)",
        "time      compile",
    ):
        assert part in shown


def test_a_refused_schema_ends_with_1_and_remedies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "a.json", {"items": {"multipleOf": 12345}})
    assert run_command(["schema", "check", file]) == 1
    shown = capsys.readouterr().out
    assert "/items multipleOf: multiples of 12345" in shown and "remedy: a `minimum`" in shown
    assert run_command(["schema", "check", file, "--lenient"]) == 0
    assert "warning   /items: multipleOf is not enforced" in capsys.readouterr().out


def test_the_report_is_printed_as_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "a.json", {"const": {"a": 1}})
    for flags in (["--model", str(EMBEDDED_MODEL)],
                  ["--vocabulary", str(EMBEDDED_MODEL / "tokenizer.json")]):  # fmt: skip
        assert run_command(["schema", "check", file, "--json", *flags]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["path"] == "fsm" and report["example"] == '{"a":1}'
        assert "first mask" in report["seconds"]


def test_schemas_of_several_files_are_bundled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the name of the file, and by the identifier that it declares."""
    item = {"type": "string", "maxLength": 3}
    named = written(tmp_path / "parts" / "item.json", item)
    written(tmp_path / "parts" / "other.json", {"$id": "http://x.test/other", "type": "null"})
    for reference in ("parts/item.json", "http://x.test/other"):
        file = written(tmp_path / "a.json", {"items": {"$ref": reference}, "type": "array"})
        assert run_command(["schema", "check", file]) == 1
        assert "stemma schema bundle" in capsys.readouterr().out
        assert run_command(["schema", "check", file, "--with", str(tmp_path / "parts")]) == 0
        capsys.readouterr()
    file = written(tmp_path / "a.json", {"items": {"$ref": "parts/item.json"}})
    assert run_command(["schema", "bundle", file, "--with", named]) == 0
    bundle = json.loads(capsys.readouterr().out)
    assert bundle["$defs"]["parts/item.json"] == {**item, "$id": "parts/item.json"}


def test_a_file_that_is_no_json_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text("{")
    assert run_command(["schema", "check", str(tmp_path / "a.json")]) == 1
    assert "a file of JSON is expected" in capsys.readouterr().err
