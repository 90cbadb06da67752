"""The official JSON-Schema-Test-Suite, where it is: STEMMA_SCHEMA_SUITE is one draft's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from canonical_json import canonical_text, key_order
from grammar_oracle import grammar_matches

from stemma.constrained.schema.schema_grammar import schema_grammar
from stemma.errors import InvalidGrammar

SUITE = os.environ.get("STEMMA_SCHEMA_SUITE")
MIN_RIGHT = 0.85


def groups() -> Iterator[Any]:
    for path in sorted(Path(SUITE or "").glob("*.json")):
        yield from json.loads(path.read_text("utf-8"))


@pytest.mark.skipif(SUITE is None, reason="STEMMA_SCHEMA_SUITE names no folder")
def test_no_invalid_instance_of_the_suite_is_accepted() -> None:
    assert SUITE is not None
    dialect = Path(SUITE).name.removeprefix("draft")
    dialect = f"draft{dialect}" if len(dialect) == 1 else dialect
    num_groups = num_right = num_valid = num_accepted = 0
    for group in groups():
        num_groups += 1
        try:
            grammar = schema_grammar(group["schema"], dialect=dialect).grammar
        except InvalidGrammar:
            continue
        order = key_order(group["schema"])
        found = [
            (test["valid"], grammar_matches(grammar, canonical_text(test["data"], order)))
            for test in group["tests"]
        ]
        assert (False, True) not in found, group["description"]
        num_right += all(is_valid == is_accepted for is_valid, is_accepted in found)
        num_valid += sum(is_valid for is_valid, _ in found)
        num_accepted += sum(is_valid and is_accepted for is_valid, is_accepted in found)
    assert num_right >= MIN_RIGHT * num_groups, f"{num_right} of {num_groups}"
    assert num_accepted >= 0.995 * num_valid, f"{num_accepted} of {num_valid}"
