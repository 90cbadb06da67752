"""`stemma bench masks`: its set of grammars, and what is counted along an instance."""

from __future__ import annotations

import re
from collections import Counter

import jsonschema
import pytest
from scripted_grammars import ScriptedEngine

from stemma.bench.constrained.grammars import FLAT, GrammarCase, grammar_cases
from stemma.bench.constrained.masks import Found, _row, percentile
from stemma.bench.constrained.matchers.judge import Verdict, accepts
from stemma.bench.constrained.matchers.measure import Figures, measure
from stemma.bench.constrained.matchers.protocol import GrammarRequest
from stemma.bench.constrained.matchers.stemma_engine import StemmaEngine
from stemma.bench.constrained.matchers.tokenizer_file import TokenizerFile
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL


@pytest.fixture(scope="module")
def file() -> TokenizerFile:
    return TokenizerFile(EMBEDDED_MODEL / "tokenizer.json")


def test_every_instance_of_the_set_is_in_its_language() -> None:
    cases = grammar_cases()
    assert len(cases) == len({case.name for case in cases}) >= 60
    for case in cases:
        assert case.instances
        if case.regex is not None:
            assert all(re.fullmatch(case.regex, text) for text in case.texts), case.name
            continue
        default = jsonschema.Draft202012Validator
        kind = jsonschema.validators.validator_for(case.schema, default=default)
        kind.check_schema(case.schema)
        validator = kind(case.schema, format_checker=kind.FORMAT_CHECKER)
        for instance in case.instances:
            validator.validate(instance)


def test_every_grammar_of_the_set_takes_its_instances(file: TokenizerFile) -> None:
    engine = StemmaEngine(file)
    for case in grammar_cases():
        grammar = engine.compile(case.request)
        for instance, text in zip(case.instances, case.texts, strict=True):
            verdict = Verdict(None)
            assert accepts(grammar.start(), file.encode(text), verdict), (case.name, instance)
            assert verdict.num_disagreements == 0, case.name


def test_flat_objects_have_required_scalars_only() -> None:
    flat = [case.schema for case in grammar_cases() if case.group == FLAT]
    assert len(flat) >= 10
    for schema in flat:
        assert schema["required"] == list(schema["properties"])
        assert not Counter({"array", "object"}) & Counter(
            str(one.get("type")) for one in schema["properties"].values()
        )


def measured(file: TokenizerFile, texts: list[str]) -> Figures:
    quoted = ",".join(f'"{text}"' for text in texts)
    request = GrammarRequest("json_schema", f'{{"accepts":[{quoted}]}}')
    return measure(ScriptedEngine(file), file, request, [*texts, "not in it"])


def test_an_instance_that_is_refused_is_not_accepted_and_not_timed(file: TokenizerFile) -> None:
    figures = measured(file, ["one two", "one three"])
    assert (figures.num_instances, figures.num_accepted, figures.path) == (3, 2, "fsm")
    assert len(figures.warm_us) == len(figures.consume_us) == len(figures.forced_us)
    assert len(figures.cold_us) < len(figures.warm_us), "only the first visit of a state is cold"


def test_forced_tokens_are_counted_with_those_that_split_the_text_otherwise(
    file: TokenizerFile,
) -> None:
    alone = measured(file, ["one two"])
    assert alone.num_forced == alone.num_tokens == len(file.encode("one two"))
    assert alone.num_non_canonical == 0
    split = measured(file, ["internal", "internation"])  # what both share ends within a token
    assert 0 < split.num_non_canonical <= split.num_forced < split.num_tokens


def test_a_row_has_medians_over_rounds_and_percentiles_over_places() -> None:
    case = GrammarCase("a", FLAT, ("x", "y"), regex=".")
    rounds = [
        Figures("fsm", ms, [ms, 9.0], [1.0], [1.0], [1.0], 2, 2, 10, 4, 1) for ms in (3.0, 1.0, 2.0)
    ]
    row = _row(32, "e", "all", [Found(case, rounds), Found(case, [], ["timeout"])])
    assert (row["grammars"], row["compiled"], row["instances"], row["accepted"]) == (2, 1, 2, 2)
    assert row["compile_p50_ms"] == 2.0 and row["cold_p99_us"] == 9.0
    assert row["flat_skipped_pct"] == 40.0 and row["non_canonical"] == 1


def test_a_percentile_is_a_value_that_was_found() -> None:
    assert percentile([], 50) is None
    assert percentile(list(range(100, 0, -1)), 99) == 100
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
