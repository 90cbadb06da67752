"""`stemma bench grammar-cost`: its schemas, and a small run of the real engine."""

from __future__ import annotations

import argparse
import itertools
import json

import pytest

from stemma.bench.constrained import grammar_cost
from stemma.constrained.compiler import compile_grammar
from stemma.constrained.spec import GrammarSpec


def test_no_schema_comes_twice() -> None:
    some = [json.dumps(one) for one in itertools.islice(grammar_cost.fresh_schemas(), 60)]
    assert len(set(some)) == len(some)


def test_documents_of_the_batch_outlast_its_steps() -> None:
    spec = GrammarSpec("json_schema", json.dumps(grammar_cost._endless_records()))
    grammar = compile_grammar(spec)
    assert grammar.path != "pushdown", "steps are to be measured without another process"


def test_all_rows_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    grammar_cost.add_flags(parser)
    small = ["--batch=2", "--steps=6", "--prompts=4", "--neighbours=1", "--repeats=1"]
    rows: list[dict[str, object]] = []
    monkeypatch.setattr(grammar_cost, "configure_threads", lambda *_: None)  # torch is there
    monkeypatch.setattr(grammar_cost, "write_report", lambda name, found, args: rows.extend(found))
    assert grammar_cost.run(parser.parse_args(small)) == 0
    assert [str(row["measured"]).split(",")[0] for row in rows] == [
        "CPU of a step of 2 rows", "CPU of a step of 2 rows", "first token",
        "p99 between tokens of 1 neighbours",
    ]  # fmt: skip
    assert all(row["with, ms"] > 0 and row["without, ms"] > 0 for row in rows)  # type: ignore[operator]
