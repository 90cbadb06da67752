"""Programs end to end: the DSL over a real socket to a real engine in its own process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stemma as st
from stemma.frontend.function import open_program

HERE = Path(__file__).name


@pytest.fixture(scope="module", autouse=True)
def default_engine(engine: st.Engine) -> Iterator[None]:
    st.set_default_backend(engine)
    yield
    st.set_default_backend(None)


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Fails, rather than hangs, when the block takes longer."""

    def expire(*_: object) -> None:
        raise AssertionError(f"still waiting after {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def no_test_hangs() -> Iterator[None]:
    with deadline(180):
        yield


def line_of(marker: str) -> str:
    """ "file:line" of the one line of this file that ends in the comment `marker`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {marker}")]
    return f"{HERE}:{number}"


GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


# --- generating -----------------------------------------------------------------------------------


@st.function
def two_gens(s: st.ProgramState, question: str) -> None:
    s += "Q: " + question + " A: "
    s += st.gen("first", max_tokens=6, **GREEDY) + " so "
    s += st.gen("second", max_tokens=4, **GREEDY)


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


# --- data flow ------------------------------------------------------------------------------------


def test_fork_join_gathers_values_in_order() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "Topics:"
        forks = s.fork(3)
        forks += lambda index: f" {index}: "
        forks += st.gen("tip", max_tokens=3, **GREEDY)
        for index, fork in enumerate(forks):
            fork["number"] = index
        forks.join()
        s += " done " + st.gen("end", max_tokens=2, **GREEDY)

    state = program.run()
    assert state["number"] == [0, 1, 2] and len(state["tip"]) == 3
    assert state.text() == "Topics: done " + state["end"]


def test_join_can_append_what_the_branches_wrote() -> None:
    @st.function
    def program(s: st.ProgramState) -> list[str]:
        s += "root"
        forks = s.fork(2)
        for index, fork in enumerate(forks):
            fork += f" [{index}:" + st.gen("v", max_tokens=2, **GREEDY) + "]"
        forks.join("concate_and_append")
        s += st.gen("end", max_tokens=2, **GREEDY)
        return [fork["v"] for fork in forks]

    state = program.run()
    first, second = state.ret_value
    assert state.text() == f"root [0:{first}] [1:{second}]" + state["end"]


def test_a_copy_goes_on_alone_and_a_var_carries_its_value_back() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "text "
        with s.copy() as side:
            side += "aside " + st.gen("thought", max_tokens=4, **GREEDY)
            s += "because " + side.var("thought") + "."

    assert program.run().text().startswith("text because ")


def test_a_var_of_a_known_value_is_its_text_and_one_of_a_list_is_refused() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s["n"] = 7
        s += s.var("n")
        forks = s.fork(2)
        forks += st.gen("v", max_tokens=1, **GREEDY)
        forks.join()
        with pytest.raises(st.InvalidProgram, match="is a list; index it first"):
            s.var("v")

    assert program.run().text() == "7"


def test_functions_nest() -> None:
    @st.function
    def inner(s: st.ProgramState, word: str) -> str:
        s += word + st.gen("w", max_tokens=2, **GREEDY)
        return s["w"]

    @st.function
    def outer(s: st.ProgramState) -> str:
        s += "outer "
        return inner(s, "inner ")

    state = outer.run()
    assert state.text() == "outer inner " + state.ret_value == "outer inner " + state["w"]


# --- batches and streams --------------------------------------------------------------------------


def test_a_batch_equals_single_runs_in_order() -> None:
    questions = [f"number {i}" for i in range(12)]
    batch = two_gens.run_batch([{"question": q} for q in questions])
    assert [state.text() for state in batch] == [two_gens.run(q).text() for q in questions]
    assert two_gens.run_batch([]) == []


def test_a_progress_bar_counts_the_instances(capfd: pytest.CaptureFixture[str]) -> None:
    two_gens.run_batch([{"question": "a"}] * 3, progress_bar=True)
    assert "3/3" in capfd.readouterr().err


def test_more_waiting_programs_than_threads_all_end() -> None:
    @st.function
    def program(s: st.ProgramState, i: int) -> int:
        s += str(i) + st.gen("x", max_tokens=2, **GREEDY)
        return len(s["x"]) and i

    states = program.run_batch([{"i": i + 1} for i in range(8)], num_threads=2)
    assert [state.ret_value for state in states] == list(range(1, 9))


def test_a_stream_yields_pieces_that_add_up() -> None:
    state = two_gens.stream("stream")
    pieces = list(state.text_iter())
    assert "".join(pieces) == state.text() == two_gens.run("stream").text()

    @st.function
    def long(s: st.ProgramState) -> None:
        s += "q" + st.gen("x", max_tokens=300, **GREEDY)

    assert len(list(long.stream().text_iter("x"))) > 4, "the pieces should come one by one"


def test_one_value_can_be_streamed_alone() -> None:
    state = two_gens.run("value", stream=True)
    assert "".join(state.text_iter("second")) == state["second"]
    assert "".join(two_gens.run("value").text_iter("second")) == state["second"]


def test_a_value_of_a_streaming_run_can_be_read_before_its_gen_was_appended() -> None:
    go_on = threading.Event()

    @st.function
    def program(s: st.ProgramState) -> None:
        assert "x" not in s and go_on.wait(20)
        s += "late" + st.gen("x", max_tokens=3, **GREEDY)

    state = program.stream()
    threading.Timer(0.1, go_on.set).start()
    assert state["x"] == state.text().removeprefix("late")
    with pytest.raises(KeyError, match="no value called 'y'; there are"):
        state["y"]


def test_a_whole_text_of_a_streaming_run_waits_for_its_end() -> None:
    go_on = threading.Event()

    @st.function
    def program(s: st.ProgramState) -> None:
        with s.user():
            assert s.text() and go_on.wait(20)
            s += "late"

    state = program.stream()
    threading.Timer(0.1, go_on.set).start()
    assert "late" in state.text()
    assert state.messages() == [{"role": "user", "content": "late"}]


def test_text_appended_before_a_pause_is_streamed_during_it() -> None:
    go_on = threading.Event()

    @st.function
    def program(s: st.ProgramState) -> None:
        s += "early"
        assert go_on.wait(20)
        s += " late"

    pieces = program.stream().text_iter()
    assert next(pieces) == "early"
    go_on.set()
    assert "".join(pieces) == " late"


# --- errors ---------------------------------------------------------------------------------------


@st.function
def fails(s: st.ProgramState, temperature: float) -> str:
    s += "before"
    s += st.gen("bad", max_tokens=2, temperature=temperature)  # the bad gen
    return s["bad"]


def test_an_error_is_raised_at_the_wait_with_the_source_line_and_the_runtimes_message() -> None:
    with pytest.raises(st.ProgramError) as caught:
        fails.run(-1.0)
    assert caught.value.op == "bad" and caught.value.kind == "InvalidRequest"
    assert caught.value.source is not None and caught.value.source.endswith(line_of("the bad gen"))
    assert "temperature=-1.0 is not allowed: a number in [0, 10000]" in str(caught.value)
    assert line_of("the bad gen") in str(caught.value)
    assert caught.traceback[-1].name != "<module>"


def test_a_prompt_too_long_is_an_error_of_its_op() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "x" * 5000 + st.gen("y", max_tokens=1)

    with pytest.raises(
        st.ProgramError, match=r"the prompt has 5000 tokens.*at most 4095"
    ) as caught:
        program.run()
    assert caught.value.kind == "PromptTooLong"


def test_an_error_in_a_fork_is_raised_at_its_wait_and_by_the_join() -> None:
    waits: list[str] = []

    @st.function
    def program(s: st.ProgramState) -> None:
        s += "q"
        forks = s.fork(2)
        forks[0] += st.gen("x", max_tokens=2, **GREEDY)
        forks[1] += st.gen("x", max_tokens=2, top_p=7.0)  # the bad fork
        forks.join()
        s += "after"
        for fork in forks:
            try:
                waits.append(fork["x"])
            except st.ProgramError as error:
                waits.append(str(error.source))
        s.sync()

    with pytest.raises(st.ProgramError, match=r"a joined branch failed: x: top_p=7\.0") as caught:
        program.run()
    assert caught.value.op == "join"
    assert waits[1].endswith(line_of("the bad fork")) and len(waits[0]) < 20


def test_an_error_that_nobody_read_is_raised_by_run() -> None:
    @st.function
    def program(s: st.ProgramState) -> str:
        side = s.copy()
        side += "x" + st.gen("unread", max_tokens=0)  # the unread gen
        s += "y" + st.gen("fine", max_tokens=1, **GREEDY)
        return s["fine"]

    with pytest.raises(st.ProgramError, match="max_tokens=0") as caught:
        program.run()
    assert line_of("the unread gen") in str(caught.value)


def test_an_error_that_was_handled_is_not_raised_again() -> None:
    @st.function
    def program(s: st.ProgramState) -> str:
        side = s.copy()
        side += "x" + st.gen("bad", max_tokens=0)
        try:
            return str(side["bad"])
        except st.ProgramError:
            assert side.error() is not None and s.error() is None
            return "handled"

    assert program.run().ret_value == "handled"


def test_an_error_is_raised_where_a_stream_is_read() -> None:
    with pytest.raises(st.ProgramError, match="temperature") as caught:
        list(fails.stream(-1.0).text_iter())
    assert line_of("the bad gen") in str(caught.value)


def test_the_authors_own_exception_is_raised_where_a_stream_is_read() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "some text"
        raise LookupError("the author's own")

    pieces: list[str] = []
    with pytest.raises(LookupError, match="the author's own"):
        pieces.extend(program.stream().text_iter())
    with pytest.raises(LookupError, match="the author's own"):
        program.stream()["never made"]


def test_the_authors_own_exception_cancels_the_program(engine: st.Engine) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "long" + st.gen("x", max_tokens=4000, **GREEDY)
        while not engine.get_server_info()["num_running"]:
            time.sleep(0.01)
        raise LookupError("the author's own")

    with pytest.raises(LookupError, match="the author's own"):
        program.run()
    wait_until_idle(engine, seconds=1.0)


def wait_until_idle(engine: st.Engine, seconds: float = 10.0) -> None:
    """Nothing runs, and all that is not free is cached and evictable."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        info = engine.get_server_info()
        held = info["total_tokens"] - info["free_tokens"] - info["evictable_tokens"]
        if not (info["num_running"] or info["num_waiting"] or info["num_programs"] or held):
            return
        time.sleep(0.02)
    raise AssertionError(f"still busy: {info}")


def test_a_batch_names_each_failed_instance_and_finishes_the_others() -> None:
    arguments = [{"temperature": t} for t in (0.0, -1.0, 0.0, -2.0)]
    with pytest.raises(st.BatchError, match="2 of 4 instances failed") as caught:
        fails.run_batch(arguments)
    assert sorted(caught.value.errors) == [1, 3]
    assert "temperature=-2.0" in str(caught.value)
    assert line_of("the bad gen") in str(caught.value.errors[1])
    states = fails.run_batch(arguments, raise_errors=False)
    assert [state.error() is None for state in states] == [True, False, True, False]
    assert states[2]["bad"] == states[0]["bad"]


def test_arguments_that_are_no_mapping_fail_that_instance(engine: st.Engine) -> None:
    with pytest.raises(st.BatchError) as caught:
        two_gens.run_batch([{"question": "a"}, None, {"queston": "b"}])  # type: ignore[list-item]
    assert sorted(caught.value.errors) == [1, 2]
    wait_until_idle(engine)


@pytest.mark.parametrize(
    "append",
    [
        lambda s: s.append("\ud800"),
        lambda s: s.append(st.gen("x", temperature=object())),  # type: ignore[arg-type]
        lambda s: s.append("x" * 17_000_000),
        lambda s: s.append(3),
    ],
    ids=["a lone surrogate", "an object", "a huge text", "a number"],
)
def test_what_cannot_be_sent_is_refused_at_once_and_appends_nothing(append: Any) -> None:
    """Nor does it harm the connection, or programs beside it."""

    @st.function
    def program(s: st.ProgramState) -> None:
        s += "a"
        with pytest.raises(st.InvalidProgram):
            append(s)
        s += "b" + st.gen("x", max_tokens=2, **GREEDY)

    state = program.run()
    assert state.text() == "ab" + state["x"]


def test_texts_larger_than_a_message_travel_in_several(engine: st.Engine) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        for _ in range(5):
            s.copy().append("x" * 4_000_000)
        s += "q" + st.gen("x", max_tokens=1, **GREEDY)

    assert program.run().text().startswith("q")


def test_senseless_arguments_are_refused_where_they_are_given() -> None:
    for call in (
        lambda: st.gen(""),
        lambda: st.gen("n" * 2000),
        lambda: st.select("x", []),
        lambda: st.select("x", ["a", ""]),
        lambda: st.select("x", ["a"], choices_method="best"),  # type: ignore[arg-type]
        lambda: st.gen("x", choices_method="greedy_token_selection"),
        lambda: two_gens.run("q", seed=-1),
        lambda: two_gens.run("q", seed=2**63),
        lambda: two_gens.run("q", seed="one"),
        lambda: two_gens.run("q", backend="here"),
        lambda: two_gens.run_batch([{"question": "q"}], num_threads=0),
        lambda: st.user(3),  # type: ignore[arg-type]
        lambda: st.Runtime("ftp://somewhere"),
    ):
        with pytest.raises(st.InvalidRequest):
            call()


def test_wrong_use_of_a_state_is_refused_at_its_line() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        with pytest.raises(st.InvalidProgram, match="assistant message begun inside a user"):
            s += st.user_begin() + st.assistant("x")
        with pytest.raises(st.InvalidProgram, match="but the open message is user"):
            s += st.assistant_end()
        s += st.user_end()
        forks = s.fork(1)
        forks.join()
        with pytest.raises(st.InvalidProgram, match="was joined"):
            forks[0] += "x"
        with pytest.raises(st.InvalidProgram, match="size=0"):
            s.fork(0)
        with pytest.raises(st.InvalidProgram, match="cannot be replaced"):
            forks[0] = s
        with pytest.raises(st.InvalidProgram, match="mode='glue'"):
            s.fork(1).join("glue")  # type: ignore[arg-type]

    state = program.run()
    with pytest.raises(st.InvalidProgram, match="has ended"):
        state += "x"


def test_a_wait_in_a_fork_ends_when_the_runtime_refuses_the_whole_program() -> None:
    """An op that no client of ours sends: the program is refused, and no wait hangs."""
    state = open_program(st_backend())
    fork = state.fork(1)[0]
    fork += "q" + st.gen("x", max_tokens=2)
    state._seq += 5  # a gap in the numbers
    state += "text"
    with deadline(30), pytest.raises(st.ProgramError, match="seq"):
        fork["x"]
    state.cancel()


def st_backend() -> Any:
    from stemma.frontend.backend import get_default_backend

    return get_default_backend()


def test_reading_a_cancelled_program_raises() -> None:
    state = open_program(st_backend())
    state += "q" + st.gen("x", max_tokens=4000, **GREEDY)
    threading.Timer(0.2, state.cancel).start()
    with pytest.raises(st.EngineError, match="cancelled"):
        state["x"]


# --- the engine's life ----------------------------------------------------------------------------


def test_after_all_of_this_the_engine_is_idle(engine: st.Engine) -> None:
    wait_until_idle(engine)
    engine.flush_cache()
    info = engine.get_server_info()
    assert info["free_tokens"] == info["total_tokens"]


def test_an_engine_killed_in_the_middle_ends_every_wait(checkpoint: Path) -> None:
    @st.function
    def long(s: st.ProgramState) -> str:
        s += "q" + st.gen("x", max_tokens=3500, **GREEDY)
        return s["x"]

    with st.Engine(checkpoint, dtype="float32", num_threads=1, max_total_tokens=8192) as doomed:
        state = long.stream(backend=doomed)
        pieces = state.text_iter("x")
        next(pieces)
        os.kill(doomed.pid, signal.SIGKILL)
        with deadline(30):
            with pytest.raises(st.EngineError, match="ended"):
                list(pieces)
            with pytest.raises(st.EngineError):
                state["x"]
            with pytest.raises(st.EngineError, match="exit code -9"):
                long.run(backend=doomed)
            with pytest.raises(st.EngineError):
                doomed.get_server_info()


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    with deadline(120), pytest.raises(st.EngineError, match=r"no-such-model"):
        st.Engine(tmp_path / "no-such-model")


def test_an_unknown_flag_is_named(checkpoint: Path) -> None:
    with deadline(120), pytest.raises(st.EngineError, match="--frobnicate"):
        st.Engine(checkpoint, frobnicate=3)


def test_nobody_at_an_endpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(st.EngineError, match="no runtime answered"):
        st.Runtime(f"ipc://{tmp_path}/nobody.ipc", timeout_s=0.3)


def test_a_second_client_may_join_a_running_engine(engine: st.Engine) -> None:
    with st.Runtime(engine.endpoint) as other:
        text = two_gens.run("joined", backend=other).text()
    assert text == two_gens.run("joined").text()


SCRIPT = """
import os, sys
import stemma as st

engine = st.Engine({model!r}, dtype="float32", num_threads=1, max_total_tokens=4096)
st.set_default_backend(engine)

@st.function
def program(s):
    s += "a" + st.gen("x", max_tokens=3, temperature=0, ignore_eos=True)

print("says", repr(program.run()["x"]))
child = os.fork()
if child == 0:
    try:
        program.run(backend=engine)
    except st.EngineError as error:
        print("child", error)
    sys.exit(0)
os.waitpid(child, 0)
assert os.path.exists(engine.endpoint.removeprefix("ipc://")), "the child took the engine down"
print("parent", program.run()["x"] == program.run()["x"])
print("pid", engine.pid)
"""


def test_a_script_needs_no_main_guard_and_a_fork_cannot_use_or_end_the_engine(
    checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(model=str(checkpoint)))
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=150, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("says") >= 1
    assert "child a connection cannot be used after fork()" in done.stdout
    assert "parent True" in done.stdout
    pid = int(done.stdout.rsplit("pid ", 1)[1])
    end = time.monotonic() + 10
    while _is_alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _is_alive(pid), "the engine outlived its parent"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
