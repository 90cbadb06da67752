"""`gen(beam=k)` on a real engine: values, meta information, streams, errors."""

from __future__ import annotations

from typing import Any

import pytest

import stemma as st
from stemma.errors import StemmaError

pytestmark = pytest.mark.usefixtures("default_engine", "no_test_hangs")


@st.function
def _program(s: st.ProgramState, options: dict[str, Any]) -> None:
    s += "The weather " + st.gen("x", max_tokens=12, **options)
    s += " and " + st.gen("y", max_tokens=4, temperature=0)


def continued(**options: Any) -> st.ProgramState:
    return _program.run(options)


def test_the_value_is_the_best_of_the_outputs_and_the_program_goes_on_with_it() -> None:
    best = continued(beam=4)
    several = continued(beam=4, n=3)
    assert [best["x"]] == several["x"][:1] and len(several["x"]) == 3
    assert best["y"] == several["y"]
    assert best.text() == "The weather " + best["x"] + " and " + best["y"]
    metas = several.get_meta_info("x")
    scores = [meta["score"] for meta in metas]
    assert scores == sorted(scores, reverse=True) and len(set(several["x"])) == 3
    for meta in metas:
        num_tokens = meta["completion_tokens"] + (meta["finish_reason"] == "stop")
        assert meta["score"] == pytest.approx(meta["cumulative_logprob"] / num_tokens)
    assert best.get_meta_info("x")["prompt_tokens"] == metas[0]["prompt_tokens"]


def test_the_likeliest_output_is_at_least_as_likely_as_the_greedy_one() -> None:
    """Not so of every model; of this one, where no output ends early."""
    searched = continued(beam=6).get_meta_info("x")["cumulative_logprob"]
    greedy = continued(temperature=0, logprobs=0).get_meta_info("x")["logprobs"]
    assert searched >= sum(token["logprob"] for token in greedy)


def test_a_stop_string_ends_hypotheses_and_is_cut_off() -> None:
    whole = continued(beam=3, n=3, length_penalty=0)
    stop = next(c for c in whole["x"][0][2:] if c.isprintable() and c != "\ufffd")
    cut = continued(beam=3, n=3, length_penalty=0, stop=stop)
    assert all(stop not in text for text in cut["x"])
    metas = [meta for meta in cut.get_meta_info("x") if meta["finish_reason"] == "stop"]
    assert metas and all(meta["matched_stop"] == stop for meta in metas)


def test_all_outputs_match_a_grammar_and_there_are_no_more_than_the_grammar_has() -> None:
    colours = continued(beam=4, n=4, regex="(red|green|blue)")
    assert sorted(colours["x"]) == ["blue", "green", "red"]
    numbers = continued(beam=3, n=3, regex="[0-9]{3}-[a-c]")
    assert all(text[3] == "-" and len(text) == 5 for text in numbers["x"])


def test_a_stream_has_the_text_at_the_end() -> None:
    state = _program.run({"beam": 3}, stream=True)
    assert "".join(state.text_iter("x")) == continued(beam=3)["x"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"beam": 0}, "beam"),
        ({"beam": 65}, "beam"),
        ({"beam": 2, "n": 3}, "n"),
        ({"beam": 2, "temperature": 0.7}, "temperature"),
        ({"beam": 2, "top_p": 0.5}, "top_p"),
        ({"beam": 2, "top_k": 5}, "top_k"),
        ({"beam": 2, "min_p": 0.1}, "min_p"),
        ({"beam": 2, "logprobs": 1}, "logprobs"),
        ({"beam": 2, "early_stopping": "always"}, "early_stopping"),
        ({"beam": 2, "length_penalty": 99}, "length_penalty"),
        ({"beam": 64, "stop_token_ids": list(range(20))}, "stop_token_ids"),
        ({"length_penalty": 1.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
    ],
)
def test_what_a_search_cannot_do_is_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(StemmaError, match=f"{field}=") as refused:
        st.gen("x", **options)  # some are refused here, the others by the engine
        continued(**options)["x"]
    assert refused.value is not None


def test_a_grammar_that_another_process_follows_holds_for_all_outputs() -> None:
    nested = 'start: "(" start ")" | "[" start "]" | LETTER\nLETTER: /[a-c]{2}/'
    found = continued(beam=4, n=4, ebnf=nested)
    assert found.get_meta_info("x")[0]["grammar_path"] == "pushdown"
    assert len(set(found["x"])) == 4
    for text, meta in zip(found["x"], found.get_meta_info("x"), strict=True):
        if meta["finish_reason"] == "stop":
            while text[0] in "([":
                assert text[-1] == {"(": ")", "[": "]"}[text[0]]
                text = text[1:-1]
            assert len(text) == 2 and set(text) <= set("abc")
