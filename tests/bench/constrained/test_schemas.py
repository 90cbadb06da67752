"""`stemma bench schemas`: what it generates from a seed, and what it counts."""

from __future__ import annotations

import json

import jsonschema
import pytest

from stemma.bench.constrained.matchers.follow import Following, follow
from stemma.bench.constrained.matchers.protocol import GrammarRequest
from stemma.bench.constrained.matchers.stemma_engine import StemmaEngine
from stemma.bench.constrained.matchers.tokenizer_file import TokenizerFile
from stemma.bench.constrained.schema_instances import instances
from stemma.bench.constrained.schema_shapes import FAMILIES, generated_schema
from stemma.bench.constrained.schema_words import FORMATS, KEY_PATTERNS, PATTERNS
from stemma.bench.constrained.schemas import Found, _row, _with_ratios, generated_cases
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL


@pytest.fixture(scope="module")
def file() -> TokenizerFile:
    return TokenizerFile(EMBEDDED_MODEL / "tokenizer.json")


def test_a_seed_gives_the_same_cases_and_another_one_others() -> None:
    cases = generated_cases(60, 3)
    assert cases == generated_cases(60, 3)
    assert not {case.schema for case in cases} & {case.schema for case in generated_cases(60, 4)}
    assert {case.family for case in cases} == set(FAMILIES) and len(cases) >= 55
    assert sum(share for _, share in FAMILIES.values()) == 100


@pytest.mark.parametrize("family", FAMILIES)
def test_instances_are_what_they_are_said_to_be(family: str) -> None:
    schema = generated_schema(family, 1)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    valid, invalid = instances(schema, 1, 3)
    assert valid and invalid
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    assert all(map(validator.is_valid, valid)) and not any(map(validator.is_valid, invalid))


def test_examples_of_patterns_and_formats_match() -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for table in (PATTERNS, KEY_PATTERNS):
        for pattern, texts in table.items():
            for text in texts:
                jsonschema.validate(text, {"pattern": pattern})
    for name, texts in FORMATS.items():
        assert all(checker.conforms(text, name) for text in texts)


def test_schemas_of_every_family_are_followed_rightly(file: TokenizerFile) -> None:
    engine = StemmaEngine(file)
    for case in generated_cases(30, 5):
        request = GrammarRequest("json_schema", case.schema)
        following = follow(engine, file, request, case.valid, case.invalid)
        assert Found(case, following).is_right, case.name
        assert following.first_mask_ms > 0 and following.mask_us


def test_a_refused_spelling_is_no_refused_instance_and_is_not_timed(file: TokenizerFile) -> None:
    schema = {"properties": {"b": {}, "a": {}}, "required": ["a", "b"], "type": "object"}
    request = GrammarRequest("json_schema", json.dumps(schema))
    orders = ['{"a":1,"b":2}', '{"b":2,"a":1}']
    found = follow(StemmaEngine(file), file, request, [orders, orders[:1]], [['{"b":1}'], orders])
    assert found.accepted == [True, False] and found.over_generated == [False, True]
    assert len(found.mask_us) == len(file.encode(orders[1]))


def test_a_row_counts_schemas_that_are_right_and_its_ratios_are_to_the_base() -> None:
    case = generated_cases(60, 0)[0]
    right = Following("lazy", 2.0, [1.0, 3.0], [True] * len(case.valid), [False])
    wrong = Following("lazy", 4.0, [5.0], [True, False], [True])
    row = _row(32, "e", "all", [Found(case, right), Found(case, wrong), Found(case, None, "died")])
    assert (row["schemas"], row["compiled"], row["right"], row["over_generated"]) == (3, 2, 1, 1)
    assert (row["first_mask_max_ms"], row["mask_p50_us"]) == (4.0, 3.0)
    base = _row(32, "b", "all", [Found(case, Following("", 2.0, [1.5], [True], []))])
    assert _with_ratios(row, base)["first_mask_p50_ratio"] == 2.0
    assert _with_ratios(row, base)["mask_p50_ratio"] == 2.0
    assert _with_ratios(row, None)["mask_p50_ratio"] is None
