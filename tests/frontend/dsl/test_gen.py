"""Programs end to end, over a real socket to a real engine: what a gen and a select do."""

from __future__ import annotations

from typing import Any

import pytest
from dsl_programs import GREEDY, two_gens

import stemma as st

pytestmark = pytest.mark.usefixtures("default_engine", "no_test_hangs")


def test_values_and_text_of_a_program() -> None:
    state = two_gens.run("why?")
    assert state.text() == f"Q: why? A: {state['first']} so {state['second']}"
    assert "first" in state and "third" not in state
    assert state.names() == ["first", "second"]
    assert state.get_var("first") == state["first"]
    with pytest.raises(KeyError, match=r"no value called 'third'; there are \['first', 'second'\]"):
        state["third"]


@st.function
def token_ids_in_and_out(s: st.ProgramState, ids: list[int]) -> None:
    s += st.tokens(ids)
    s += st.gen("first", max_tokens=5, **GREEDY)
    s += st.tokens([72, 105]) + st.gen("second", max_tokens=5, **GREEDY)


def test_token_ids_go_in_as_they_are_and_come_back() -> None:
    ids = [256, 81, 58, 32]
    state = token_ids_in_and_out.run(ids)
    first, second = (state.get_meta_info(name) for name in ("first", "second"))
    assert (first["prompt_tokens"], second["prompt_tokens"]) == (4, 4 + 5 + 2)
    assert len(first["output_ids"]) == 5
    assert state.text().startswith("Q: ") and state.text().endswith("Hi" + state["second"])
    again = token_ids_in_and_out.run([*ids, *first["output_ids"], 72, 105])
    assert again.get_meta_info("first")["output_ids"] == second["output_ids"]


@pytest.mark.parametrize("n", [1, 2])
def test_no_tokens_compute_the_prompt_and_nothing_else(n: int) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "Nothing is said of the sea."
        s += st.gen("none", 0, n=n, logprobs=0, logprob_start=0, regex="[a-z]+")
        s += st.gen("some", 3, **GREEDY)

    state = program.run()
    value, meta = state["none"], state.get_meta_info("none")
    if n > 1:
        assert value == [""] * n
        value, meta = value[0], meta[0]
    assert value == "" and state.text().endswith("sea." + state["some"])
    assert (meta["completion_tokens"], meta["output_ids"], meta["logprobs"]) == (0, [], [])
    assert meta["finish_reason"] == "length"
    assert len(meta["prompt_logprobs"]) == meta["prompt_tokens"] == 27
    assert meta["input_token_logprobs"][0] == [None, ord("N"), "N"]
    assert len(meta["input_token_logprobs"]) == 27 and meta["output_token_logprobs"] == []
    assert state.get_meta_info("some")["cached_tokens"] == 26


def test_no_tokens_are_refused_with_beam() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "a" + st.gen("x", 0, beam=2)

    with pytest.raises(st.ProgramError, match=r"max_tokens=0 is not allowed.*beam"):
        program.run()


def test_a_prediction_changes_no_output_and_what_became_of_it_is_told() -> None:
    @st.function
    def program(s: st.ProgramState, expected: str | None) -> None:
        s += "Q: why? A:" + st.gen("plain", max_tokens=8, **GREEDY)
        s += st.gen("next", max_tokens=8, prediction=expected, **GREEDY)
        s += st.gen("last", max_tokens=8, prediction=s["plain"], **GREEDY)

    bare = program.run(None)
    long = bare["next"] * 50  # sent once, though it comes twice
    for expected in (bare["next"], long, long, "something else", ""):
        state = program.run(expected)
        assert state.text() == bare.text()
        meta = state.get_meta_info("next")
        assert ("accepted_prediction_tokens" in meta) == bool(expected)
        assert meta["drafted_tokens"] >= meta["accepted_tokens"] >= 0
    assert "rejected_prediction_tokens" in bare.get_meta_info("last")
    assert "rejected_prediction_tokens" not in bare.get_meta_info("next")


def test_a_prediction_that_is_no_text_yet_is_refused_where_it_is_written() -> None:
    for given in (3, ["a"], st.gen("x")):
        with pytest.raises(st.InvalidProgram, match="prediction") as caught:
            st.gen("y", prediction=given)  # type: ignore[arg-type]
        assert "s[name]" in str(caught.value)
    with pytest.raises(st.InvalidProgram, match="not together with choices"):
        st.gen("y", choices=["a", "b"], prediction="a")


@pytest.mark.parametrize("ids", [[], [-1], ["1"], [1.0]])
def test_token_ids_that_are_none_are_refused(ids: list[Any]) -> None:
    with pytest.raises(st.InvalidProgram, match="token_ids"):
        st.tokens(ids)


def test_arguments_in_any_form_and_the_return_value() -> None:
    @st.function
    def program(s: st.ProgramState, a: int, b: int = 2) -> int:
        s += f"{a} {b}"
        return a + b

    assert program.run(1).ret_value == program.run(a=1).ret_value == program(1).ret_value == 3
    bound = program.bind(b=5)
    assert bound.run(1).ret_value == 6 and bound.run(1, b=7).ret_value == 8
    with pytest.raises(st.InvalidProgram, match="a parameter of program"):
        program.bind(c=1)


def test_meta_info_has_counts_times_and_the_finish_reason() -> None:
    st.flush_cache()
    cold, warm = (two_gens.run("meta").get_meta_info("first") for _ in range(2))
    assert cold["prompt_tokens"] == len("Q: meta A: ")
    assert cold["completion_tokens"] == 6 and cold["finish_reason"] == "length"
    assert cold["cached_tokens"] == 0 and warm["cached_tokens"] == cold["prompt_tokens"] - 1
    assert 0 <= cold["time_to_first_token_s"] <= cold["latency_s"]


def test_logprobs_come_with_the_meta_info() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "Once" + st.gen("x", max_tokens=3, logprobs=2, **GREEDY)

    entries = program.run().get_meta_info("x")["logprobs"]
    assert len(entries) == 3
    for entry in entries:
        assert len(entry["top"]) == 2 and entry["logprob"] <= 0
        assert entry["top"][0]["token_id"] == entry["token_id"], "greedy takes the best"
        assert entry["top"][0]["logprob"] >= entry["top"][1]["logprob"]


def test_stop_strings_end_a_gen_before_them() -> None:
    full = two_gens.run("stop")["first"]
    assert len(full) > 2

    @st.function
    def program(s: st.ProgramState, stop: Any) -> None:
        s += "Q: stop A: " + st.gen("x", max_tokens=6, stop=stop, **GREEDY) + "|"

    state = program.run(full[2])
    assert state["x"] == full[: full.index(full[2])]
    assert state.get_meta_info("x")["finish_reason"] == "stop"
    assert state.get_meta_info("x")["matched_stop"] == full[2]
    assert state.text() == f"Q: stop A: {state['x']}|"
    assert program.run(["never there", full[2]])["x"] == state["x"]


def test_one_seed_gives_one_text_and_forks_differ() -> None:
    @st.function
    def program(s: st.ProgramState) -> list[str]:
        s += "Say: " + st.gen("root", max_tokens=8, temperature=1.0)
        forks = s.fork(3)
        forks += st.gen("x", max_tokens=8, temperature=1.0)
        return [s["root"], *(fork["x"] for fork in forks)]

    first, again, other = (program.run(seed=seed).ret_value for seed in (1, 1, 2))
    assert first == again and first != other
    assert len(set(first[1:])) == 3, "forks draw alike"
    batch = program.run_batch([{}, {}], seed=1)
    assert batch[0].ret_value == first and batch[1].ret_value != first


def test_defaults_of_a_run_hold_for_gens_that_do_not_say_themselves() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "x" + st.gen("a", ignore_eos=True) + st.gen("b", max_tokens=2, ignore_eos=True)

    state = program.run(max_tokens=5, temperature=0)
    assert state.get_meta_info("a")["completion_tokens"] == 5
    assert state.get_meta_info("b")["completion_tokens"] == 2


@st.function
def said(s: st.ProgramState, params: dict[str, Any]) -> None:
    s += "Say it again, say it again: " + st.gen("x", max_tokens=12, ignore_eos=True, **params)


@pytest.mark.parametrize(
    ("option", "neutral"),
    [
        ({"frequency_penalty": 2.0}, {"frequency_penalty": 0.0}),
        ({"presence_penalty": 2.0}, {"presence_penalty": 0.0}),
        ({"repetition_penalty": 5.0}, {"repetition_penalty": 1.0}),
    ],
    ids=str,
)
def test_penalties_reach_the_model_from_a_gen_and_as_defaults_of_a_run(
    option: dict[str, float], neutral: dict[str, float]
) -> None:
    few = {"logit_bias": {ord(letter): 100 for letter in "uvwxz"}}  # so that they repeat
    plain = said.run(params=few, temperature=0)["x"]
    by_gen = said.run(params={**few, **option}, temperature=0)["x"]
    assert by_gen != plain
    assert said.run(params=few, temperature=0, **option)["x"] == by_gen
    assert said.run(params={**few, **neutral}, temperature=0, **option)["x"] == plain


def test_min_p_of_one_leaves_only_the_best_token() -> None:
    greedy = said.run(params={}, temperature=0)["x"]
    assert said.run(params={}, temperature=2.0, seed=1)["x"] != greedy
    assert said.run(params={}, temperature=2.0, seed=1, min_p=1.0)["x"] == greedy


def test_a_bias_makes_a_token_certain_or_impossible() -> None:
    assert said.run(params={"logit_bias": {ord("Z"): 100}})["x"] == "Z" * 12
    banned = {byte: -100.0 for byte in range(256) if byte != ord("Q")}
    specials = {256: -100.0, 257: -100.0, 258: -100.0, 259: -100.0}
    assert said.run(params={"logit_bias": banned | specials})["x"] == "Q" * 12


def test_no_stop_token_comes_before_min_tokens() -> None:
    stop = {"stop_token_ids": range(256)}
    assert said.run(params=stop, seed=1).get_meta_info("x")["completion_tokens"] == 0
    meta = said.run(params={**stop, "min_tokens": 4}, seed=1).get_meta_info("x")
    assert meta["completion_tokens"] >= 4


def test_logprobs_are_the_models_own_whatever_changes_the_logits() -> None:
    plain = said.run(params={"logprobs": 3}, temperature=0).get_meta_info("x")
    changed = said.run(params={"logprobs": 3, "logit_bias": {ord("Z"): 100}}, temperature=0)
    first, biased = plain["logprobs"][0], changed.get_meta_info("x")["logprobs"][0]
    assert biased["token"] == "Z" and biased["logprob"] < first["logprob"] <= 0
    assert biased["top"] == first["top"]


def test_several_samples_are_a_list_and_the_program_goes_on_with_the_first() -> None:
    @st.function
    def program(s: st.ProgramState, n: int | None) -> None:
        s += "Q: " + st.gen("x", max_tokens=6, temperature=1.5, n=n, ignore_eos=True)
        s += "; " + st.gen("y", max_tokens=4, **GREEDY)

    four, one = program.run(n=4, seed=3), program.run(n=None, seed=3)
    assert len(set(four["x"])) == 4 and four["x"][0] == one["x"]
    assert four.text() == one.text() == f"Q: {one['x']}; {one['y']}"
    assert program.run(n=2, seed=3)["x"] == four["x"][:2]
    metas = four.get_meta_info("x")
    assert [meta["completion_tokens"] for meta in metas] == [6] * 4
    stream = program.stream(n=4, seed=3)
    assert "".join(stream.text_iter("x")) == one["x"] and stream["x"] == four["x"]
    assert stream.text() == four.text()


@pytest.mark.parametrize("num_tokens", [1, 700])
def test_samples_compute_their_prompt_once(engine: st.Engine, num_tokens: int) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "p" * num_tokens + st.gen("x", max_tokens=1, temperature=1.0, n=8, ignore_eos=True)

    engine.flush_cache()
    before = engine.get_server_info()["stats"]["num_computed_tokens"]
    metas = program.run().get_meta_info("x")
    assert [meta["cached_tokens"] for meta in metas] == [0] + [num_tokens - 1] * 7
    after = engine.get_server_info()["stats"]["num_computed_tokens"]
    assert after - before == num_tokens + 7, "the last prompt token's logits, seven times more"


@pytest.mark.parametrize(
    "method",
    ["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"],
)
def test_select_takes_one_of_the_choices(method: Any) -> None:
    choices = ["red", "green", "greenish"]

    @st.function
    def program(s: st.ProgramState) -> None:
        s += "The sky is " + st.select("color", choices, choices_method=method)
        s += st.gen("by_gen", choices=["a", "b"], choices_method=method)

    state = program.run()
    assert state["color"] in choices and state["by_gen"] in "ab"
    assert state.text() == "The sky is " + state["color"] + state["by_gen"]
    meta = state.get_meta_info("color")
    assert len(meta["choice_logprobs"]) == 3
    if method == "token_length_normalized":
        best = max(range(3), key=meta["choice_logprobs"].__getitem__)
        assert state["color"] == choices[best]


def test_roles_in_every_form_give_the_same_text() -> None:
    @st.function
    def by_sum(s: st.ProgramState) -> None:
        s += st.system("Be brief.") + st.user("Hi") + st.assistant(st.gen("a", 3, **GREEDY))

    @st.function
    def by_marks(s: st.ProgramState) -> None:
        s += st.system_begin() + "Be brief." + st.system_end()
        s += st.user_begin() + "Hi" + st.user_end()
        s += st.assistant_begin() + st.gen("a", 3, **GREEDY) + st.assistant_end()

    @st.function
    def by_method(s: st.ProgramState) -> None:
        s.system("Be brief.")
        with s.user():
            s += "Hi"
        with s.assistant():
            s += st.gen("a", 3, **GREEDY)

    states = [program.run() for program in (by_sum, by_marks, by_method)]
    text = f"<bos>SYSTEM: Be brief.\nUSER: Hi\nASSISTANT: {states[0]['a']}\n"
    assert [state.text() for state in states] == [text] * 3
    assert states[0].messages() == states[2].messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": states[0]["a"]},
    ]  # fmt: skip
