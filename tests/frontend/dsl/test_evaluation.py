"""Scores of programs on cases, their intervals, and examples chosen by them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from engine_thread import Backend, engine_in_thread
from hypothesis import given
from hypothesis import strategies as some

import stemma as st
from stemma.frontend.dsl.evaluation import interval_of


@pytest.fixture(scope="module")
def engine() -> Iterator[Backend]:
    with engine_in_thread(num_threads=1, max_total_tokens=4096) as engine:
        yield engine


@st.function
def repeat(s: st.ProgramState, word: str, examples: Any = ()) -> str:
    for example in examples:
        s += st.user(example)
    s += st.user(word) + st.assistant(st.gen("said", max_tokens=2, temperature=0))
    if word == "broken":
        raise LookupError("no such word")
    return word + "!" * len(examples)


CASES = [{"word": w, "expected": w} for w in ("one", "two", "broken", "three")]


def test_a_program_is_scored_case_by_case(engine: Backend) -> None:
    def metric(result: st.Result, case: Any) -> dict[str, float]:
        return {"same": result.ret_value == case["expected"], "long": len(case["word"]) > 3}

    found = st.evaluate(repeat, CASES, metric, backend=engine)
    assert {n: s.mean for n, s in found.scores.items()} == {"same": 0.75, "long": 0.25}
    assert found.score == 0.75 and found.summary.num_failed == 1
    assert [each.case["word"] for each in found.failures] == ["broken", "one", "two"]
    text = str(found)
    assert "same" in text and "0.750" in text and "LookupError: no such word" in text
    assert "…" not in text.split("failed")[0], "the table is whole"
    data = found.to_json()
    assert data["scores"]["same"]["num_cases"] == 4 and data["cases"][2]["error"]
    assert "no such word" in found._repr_html_()


@pytest.mark.parametrize(
    ("cases", "metric", "problem"),
    [
        ([], lambda r, c: True, "cases"),
        ([{"text": "a"}], lambda r, c: True, "word='missing'"),
        (["one"], lambda r, c: True, "case='one'"),
        ([{"word": "one"}], lambda r, c: "good", "metric: score='good'"),
        ([{"word": "one"}], lambda r, c: math.nan, "metric"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    engine: Backend, cases: Any, metric: Any, problem: str
) -> None:
    with pytest.raises(st.InvalidProgram, match=problem):
        st.evaluate(repeat, cases, metric, backend=engine)


def test_what_a_metric_raises_is_raised(engine: Backend) -> None:
    with pytest.raises(ZeroDivisionError):
        st.evaluate(repeat, CASES[:1], lambda r, c: 1 / 0, backend=engine)


def test_intervals_are_wilsons_for_proportions_and_normal_for_others() -> None:
    found = interval_of([1.0] * 8 + [0.0] * 2)
    assert (round(found.low, 4), round(found.high, 4)) == (0.4902, 0.9433)  # Wilson, 8 of 10
    assert interval_of([1.0] * 10).low == pytest.approx(0.7225, abs=1e-4)
    found = interval_of([0.2, 0.4, 0.6])
    assert found.mean == pytest.approx(0.4)
    assert found.high - found.mean == pytest.approx(1.959964 * 0.2 / math.sqrt(3))


@given(some.lists(some.sampled_from([0.0, 1.0]), min_size=1, max_size=50))
def test_a_proportions_interval_has_its_mean_and_stays_within_bounds(values: list[float]) -> None:
    found = interval_of(values)
    assert -1e-9 <= found.low <= found.mean + 1e-9 and found.mean - 1e-9 <= found.high <= 1 + 1e-9


def test_examples_are_chosen_by_how_well_the_program_does_with_them(engine: Backend) -> None:
    pool = ["good", "bad", "worse", "evil"]

    def metric(result: st.Result, case: Any) -> float:
        return float("good" in result.text())

    chosen = st.choose_examples(
        repeat, pool, CASES[:2], metric, num_examples=1, num_candidates=12, backend=engine
    )
    assert list(chosen.examples) == ["good"]
    assert (chosen.evaluation.score, chosen.without.score) == (1.0, 0.0)
    none = st.choose_examples(
        repeat, pool, CASES[:2], lambda r, c: r.ret_value == c["expected"], num_examples=2,
        num_candidates=2, backend=engine,
    )  # fmt: skip
    assert none.examples == () and none.evaluation.score == 1.0
    for wrong in ({"num_examples": 5}, {"num_examples": 0}, {"parameter": "shots"}):
        with pytest.raises(st.InvalidProgram):
            st.choose_examples(repeat, pool, CASES, metric, backend=engine, **wrong)


def test_scores_of_numpy_and_cases_that_are_no_json_are_taken(engine: Backend) -> None:
    case = {"word": "one", "table": {(1, 2): 3}}
    scores = {"is": np.bool_(True), "much": np.float32(0.5)}
    found = st.evaluate(repeat, [case], lambda result, case: scores, backend=engine)
    assert {name: each.mean for name, each in found.scores.items()} == {"is": 1.0, "much": 0.5}
    assert json.loads(json.dumps(found.to_json()))["cases"][0]["case"]["table"] == "{(1, 2): 3}"


def test_examples_are_chosen_of_any_iterable(engine: Backend) -> None:
    pool, cases = (word for word in "abcd"), (each for each in CASES[:2])
    metric = lambda result, case: result.ret_value.endswith("!")  # noqa: E731
    chosen = st.choose_examples(repeat, pool, cases, metric, num_examples=2, backend=engine)
    assert len(chosen.examples) == 2 and chosen.evaluation.scores["score"].num_cases == 2
