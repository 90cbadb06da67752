"""`stemma bench conformance`: what it counts, on suites with known answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stemma as st
from stemma.bench.constrained.conformance import (
    Outcome,
    commonest_reasons,
    judge,
    normalised,
    summary,
)
from stemma.bench.constrained.grammar_workers import GrammarWorker, WorkerSpec
from stemma.bench.constrained.schema_suites import SchemaCase, read_cases, read_suite
from stemma.cli.parser import run_command
from stemma.constrained.schema.schema_grammar import schema_grammar
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL

TESTS = Path(st.__file__).parent / "tests" / "support"
KEYS = {
    "compiled_pct", "valid_accepted_pct", "invalid_rejected_pct", "right_pct", "over_generated",
    "fsm_pct", "pushdown_pct",
}  # fmt: skip


@pytest.fixture(scope="module")
def worker() -> Iterator[GrammarWorker]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS))
        spec = WorkerSpec("scripted", "scripted_grammars:ScriptedEngine")
        with GrammarWorker(spec, EMBEDDED_MODEL / "tokenizer.json") as worker:
            yield worker


def outcome_of(worker: GrammarWorker, schema: Any, valid: list[Any], invalid: list[Any]) -> Outcome:
    case = SchemaCase("file: group", schema, tuple(valid), tuple(invalid))
    timeout_s = 1.0 if "hangs" in schema else 120.0
    return judge(worker, case, is_lenient=False, timeout_s=timeout_s)


def test_a_schema_is_right_when_every_instance_is_told_right(worker: GrammarWorker) -> None:
    schema = {"accepts": ['{"b":1,"a":"ü"}', "[1,2]"], "properties": {"b": {}, "a": {}}}
    right = outcome_of(worker, schema, [{"a": "ü", "b": 1.0}, [1, 2]], [[1], "\ud800", {}])
    assert right.is_right and right.path == "fsm"
    assert (right.num_accepted, right.num_over_generated, right.num_disagreements) == (2, 0, 0)


def test_an_accepted_invalid_instance_is_counted_under_any_spelling(worker: GrammarWorker) -> None:
    outcome = outcome_of(
        worker, {"accepts": ['{"x":1,"y":2,"z":3}']}, [], [{"z": 3, "x": 1, "y": 2}]
    )
    assert not outcome.is_right and outcome.num_over_generated == 1
    assert outcome.failures == [("invalid instance accepted (file)", '{"z": 3, "x": 1, "y": 2}')]


def test_an_instance_accepted_in_another_order_of_keys_is_counted_apart(
    worker: GrammarWorker,
) -> None:
    schema = {"accepts": ['{"b":1,"a":2}', '{"c":1,"d":2}']}
    outcome = outcome_of(worker, schema, [{"a": 2, "b": 1}, {"c": 1, "d": 2}], [{"e": 1}])
    assert outcome.is_right
    assert (outcome.num_accepted, outcome.num_in_other_order) == (2, 1)


def test_the_remotes_of_a_suite_are_bundled_with_what_refers_to_them(suite: Path) -> None:
    (suite / "remotes").mkdir()
    (suite / "remotes" / "number.json").write_text('{"type": "number"}')
    write(
        suite / "tests" / "draft7" / "ref.json",
        group("remote", {"$ref": "http://localhost:1234/number.json"}, valid=[1], invalid=["a"]),
    )
    case = read_suite(suite, "draft7", has_optional=False)[0]
    assert list(case.schema["definitions"]) == ["http://localhost:1234/number.json"]
    assert schema_grammar(case.schema).grammar.rules


def test_a_schema_that_raises_hangs_or_dies_is_a_failure_of_its_own(worker: GrammarWorker) -> None:
    outcomes = [
        outcome_of(worker, schema, [1], [2])
        for schema in (
            {"raises": "no 'x' here"},
            {"hangs": True},
            {"dies": True},
            {"accepts": []},
            {"accepts": ["1"]},
        )
    ]
    assert [one.path for one in outcomes] == [None, None, None, "fsm", "fsm"]
    assert [one.is_right for one in outcomes] == [False, False, False, False, True]
    assert summary(outcomes) == {
        "compiled_pct": 40.0, "valid_accepted_pct": 20.0, "invalid_rejected_pct": 100.0,
        "right_pct": 20.0, "over_generated": 0, "fsm_pct": 100.0, "pushdown_pct": 0.0,
        "num_schemas": 5, "num_compiled": 2, "num_right": 1, "num_valid": 5,
        "num_valid_accepted": 1, "num_valid_of_compiled": 2, "num_in_other_order": 0,
        "num_invalid": 2, "num_disagreements": 0,
    }  # fmt: skip
    assert [one["reason"] for one in commonest_reasons(outcomes)] == [
        "not compiled: ValueError: no '...' here",
        "not compiled: timeout",
        "not compiled: died",
        "valid instance refused (file)",
    ]


def test_messages_are_normalised_across_schemas() -> None:
    one = normalised("UnsupportedSchema: /properties/a: not cannot be enforced: 'a' has 17 parts")
    two = normalised(
        "UnsupportedSchema: /$defs/x~1/y: not cannot be enforced: 'long b' has 2 parts"
    )
    assert one == two == "UnsupportedSchema: /...: not cannot be enforced: '...' has N parts"


def write(path: Path, *groups: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(groups)))


def group(name: str, schema: Any, **tests: list[Any]) -> dict[str, Any]:
    entries = [
        {"description": "", "data": data, "valid": kind == "valid"}
        for kind, found in tests.items()
        for data in found
    ]
    return {"description": name, "schema": schema, "tests": entries}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    root = tmp_path / "suite"
    number = group("number", {"type": "integer"}, valid=[1, 2.0], invalid=["1", 1.5])
    own = group("own", {"$schema": "http://json-schema.org/draft-04/schema#"}, valid=[1])
    write(root / "tests" / "draft7" / "type.json", number, own, group("any", True, valid=[1]))
    date = group("date", {"format": "date"}, valid=["2026-01-02"], invalid=["2026-1-2"])
    write(root / "tests" / "draft7" / "optional" / "format" / "date.json", date)
    write(root / "tests" / "draft2020-12" / "a.json", group("x", {"type": "null"}, valid=[None]))
    return root


def test_a_suite_is_read_by_root_or_by_draft(suite: Path) -> None:
    by_root = read_suite(suite, "draft7", has_optional=False)
    assert by_root == read_suite(suite / "tests" / "draft7", None, has_optional=False)
    assert [case.id for case in by_root] == ["type: number", "type: own", "type: any"]
    draft7, draft4 = (f"http://json-schema.org/draft-0{n}/schema#" for n in (7, 4))
    assert by_root[0].schema == {"$schema": draft7, "type": "integer"}
    assert by_root[0].valid == (1, 2.0) and by_root[0].invalid == ("1", 1.5)
    assert by_root[1].schema == {"$schema": draft4} and by_root[2].schema is True
    everything = read_suite(suite, "draft7", has_optional=True)
    assert [case.id for case in everything][3:] == ["optional/format/date: date"]


def test_a_folder_that_names_no_draft_needs_one(suite: Path, tmp_path: Path) -> None:
    with pytest.raises(st.InvalidRequest, match="draft7, draft2020-12"):
        read_suite(suite, None, has_optional=False)
    write(tmp_path / "plain" / "a.json", group("x", {}, valid=[1]))
    assert len(read_suite(tmp_path / "plain", "draft7", has_optional=False)) == 1
    (tmp_path / "draft6").mkdir()
    with pytest.raises(st.InvalidRequest, match="--suite"):
        read_suite(tmp_path / "draft6", None, has_optional=False)


def test_cases_are_read_from_lines(tmp_path: Path) -> None:
    line = {
        "id": 3,
        "schema": {},
        "tests": [{"data": 1, "valid": True}, {"data": 2, "valid": False}],
    }
    (tmp_path / "cases.jsonl").write_text(f"{json.dumps(line)}\n\n")
    assert read_cases(tmp_path / "cases.jsonl", None) == [SchemaCase("3", {}, (1,), (2,))]


def test_the_command_prints_one_object_with_the_documented_keys(
    suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "conformance", "--suite", str(suite / "tests" / "draft7"), "--json"]
    assert run_command([*command, "--out", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) >= KEYS and printed["num_schemas"] == 3
    expected = {"compiled_pct": 100, "right_pct": 100, "over_generated": 0, "fsm_pct": 100}
    assert {key: printed[key] for key in expected} == pytest.approx(expected)
    report = json.loads((tmp_path / "conformance.json").read_text())
    assert {key: printed[key] for key in KEYS} == {key: report["rows"][0][key] for key in KEYS}
    assert len(report["outcomes"]["stemma"]) == 3
