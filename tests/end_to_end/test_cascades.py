"""Cascades of real engines: a small random model of bytes, or int4, below the embedded model."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
from engine_thread import Backend, engine_in_thread
from waiting import PATIENCE_S, wait_until

import stemma as st

PROMPT = "Text: Ada Moor is 34 years old.\nExtract name, age as JSON."


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(pattern=r"[A-Z][a-z]{1,8}")
    age: int = pydantic.Field(ge=0, le=99)


@pytest.fixture(scope="module")
def coarse() -> Iterator[Backend]:
    """The embedded model in int4: nearly as good, and of the same tokens."""
    with engine_in_thread(quantization="int4", max_total_tokens=16_384) as engine:
        yield engine


@st.function
def extract(s: st.ProgramState, prompt: str = PROMPT) -> None:
    s += st.user(prompt) + st.assistant(st.gen("x", json_schema=Person, max_tokens=48))


@st.function
def write(s: st.ProgramState, prompt: str = PROMPT) -> None:
    s += prompt + st.gen("x", max_tokens=24)


def cascade_of(state: st.ProgramState) -> dict[str, Any]:
    told: dict[str, Any] = state.get_meta_info("x")["cascade"]
    return told


def test_a_confident_answer_never_reaches_the_large_model(
    coarse: Backend, embedded: st.Engine
) -> None:
    alone = extract.run(backend=coarse, temperature=0, return_logprob=True)
    told = [each["logprob"] for each in alone.get_meta_info("x")["logprobs"]]
    mean = sum(told) / len(told)
    both = st.cascade(coarse, embedded, accept=st.mean_logprob(mean - 0.01))
    state = extract.run(backend=both, temperature=0)
    assert state["x"] == alone["x"]
    small, large = both.counts.values()
    assert (small["num_taken"], small["num_escalated"]) == (1, 0)
    assert not any(large.values())
    assert "logprobs" not in state.get_meta_info("x")


def test_an_answer_below_the_bar_is_the_large_models_own(
    engine: st.Engine, embedded: st.Engine
) -> None:
    both = st.cascade(engine, embedded, accept=st.mean_logprob(0))
    for program in (extract, write):
        alone = program.run(backend=embedded, temperature=0)
        state = program.run(backend=both, temperature=0)
        assert state["x"] == alone["x"]
        assert cascade_of(state)["kept_tokens"] == 0
    small, large = both.counts.values()
    assert small["num_escalated"] == large["num_answers"] == 2 and small["num_taken"] == 0
    assert large["num_scored_tokens"] == 0


@pytest.mark.parametrize("accept", [st.agree(0.5), lambda answer: False])
def test_an_empty_answer_that_is_not_taken_is_the_large_models(
    engine: st.Engine, embedded: st.Engine, accept: Any
) -> None:
    """Where a pattern, or `max_tokens`, lets a model say nothing."""

    @st.function
    def silent(s: st.ProgramState) -> None:
        s += PROMPT + st.gen("x", regex="(abc)?", max_tokens=0)

    both = st.cascade(engine, embedded, accept=accept)
    state = silent.run(backend=both)
    assert state["x"] == ""
    assert cascade_of(state)["model"] == embedded.get_server_info()["model"]


@pytest.mark.parametrize("program", [extract, write])
def test_agreement_keeps_the_longest_prefix_at_the_bar_and_goes_on_behind_it(
    engine: st.Engine, embedded: st.Engine, program: st.Function
) -> None:
    """Of another model's answer, in the large one's own tokens; then what that would say there."""
    answer = program.run(backend=engine, temperature=0)["x"]
    scores, ids = scored(embedded, program, answer)
    bar = math.exp(sorted(scores)[len(scores) // 2]) * 0.999
    num = next(i for i, score in enumerate(scores) if score < math.log(bar))
    both = st.cascade(engine, embedded, accept=st.agree(bar))
    state = program.run(backend=both, temperature=0)
    meta = state.get_meta_info("x")
    assert meta["cascade"]["kept_tokens"] == num
    assert meta["output_ids"][:num] == ids[:num]
    kept = both.counts[next(reversed(both.counts))]
    assert kept["num_scored_tokens"] == len(ids)
    assert kept["num_generated_tokens"] == meta["completion_tokens"] - num
    if program is extract:
        Person.model_validate_json(state["x"])
        return

    @st.function
    def go_on(s: st.ProgramState) -> None:
        s += PROMPT + (st.tokens(ids[:num]) if num else "")
        s += st.gen("x", max_tokens=24 - num)

    rest = go_on.run(backend=embedded, temperature=0).get_meta_info("x")["output_ids"]
    assert meta["output_ids"][num:] == rest


def scored(backend: st.Engine, program: st.Function, answer: str) -> tuple[list[float], list[int]]:
    """The log probabilities and ids of an answer's tokens behind the program's prompt."""

    @st.function
    def score(s: st.ProgramState) -> None:
        if program is extract:
            s += st.user(PROMPT) + st.assistant_begin()
        else:
            s += PROMPT
        s += st.select("x", [answer])

    meta = score.run(backend=backend).get_meta_info("x")
    return meta["choice_token_logprobs"][0], meta["choice_token_ids"][0]


def test_all_that_is_agreed_on_counts_as_the_small_models(
    coarse: Backend, embedded: st.Engine
) -> None:
    alone = extract.run(backend=coarse, temperature=0)
    both = st.cascade(coarse, embedded, accept=st.agree(1e-9))
    state = extract.run(backend=both, temperature=0)
    assert state["x"] == alone["x"]
    told = cascade_of(state)
    assert told["model"] == "stemma-tiny#1" and told["kept_tokens"] > 8
    assert [call["generated_tokens"] for call in told["calls"]][1] == 0
    small, large = both.counts.values()
    assert small["num_taken"] == 1 and large["num_generated_tokens"] == 0


def test_of_three_models_an_answer_counts_once_for_who_wrote_its_end(
    coarse: Backend, embedded: st.Engine
) -> None:
    def is_middle(answer: st.Answer) -> bool:
        return answer.model == "stemma-tiny#2"

    for accept, author in [(is_middle, 1), (st.agree(1e-30) | is_middle, 0), (st.agree(1e-30), 0)]:
        three = st.cascade(coarse, embedded, embedded, accept=accept)
        state = extract.run(backend=three, temperature=0)
        assert cascade_of(state)["model"] == [*three.counts][author]
        told = [(each["num_taken"], each["num_escalated"]) for each in three.counts.values()]
        assert told == [
            (1, 0) if place == author else (0, int(place < author)) for place in range(3)
        ]


def test_whole_programs_batches_and_streams_run_on_a_cascade(
    engine: st.Engine, embedded: st.Engine
) -> None:
    """Forks, values of other branches, chats of several turns; plain and async."""

    @st.function
    def talk(s: st.ProgramState, name: str) -> None:
        s += st.user(f"Text: {name} Moor is 34 years old.\nExtract name, age as JSON.")
        s += st.assistant(st.gen("x", json_schema=Person))
        forks = s.fork(2)
        forks += st.user("Once more.") + st.assistant(st.gen("again", max_tokens=8))
        forks.join()
        s += st.user("You said: " + s.var("x")) + st.assistant(st.select("ok", ["yes", "no"]))

    @st.function
    async def later(s: st.ProgramState, name: str) -> str:
        s += f"{name} is " + st.gen("x", max_tokens=6)
        return str(await s.aget("x"))

    both = st.cascade(engine, embedded, accept=st.agree(0.9))
    for name, state in zip("AB", talk.run_batch([["Ada"], ["Bob"]], backend=both), strict=True):
        assert state["x"].startswith(f'{{"name":"{name}') and len(state["again"]) == 2
        assert state["ok"] in ("yes", "no")
    assert asyncio.run(later.arun("Ada", backend=both)).ret_value
    prompt = PROMPT.replace("Ada Moor", "Eve Lund")  # nobody has asked: no draft has it at once
    stream = write.stream(prompt, backend=both, temperature=0)
    pieces = list(stream.text_iter("x"))
    whole = write.run(prompt, backend=both, temperature=0)["x"]
    assert len(pieces) > 1 and "".join(pieces) == whole


def test_a_function_decides_and_its_error_names_it(engine: st.Engine, embedded: st.Engine) -> None:
    asked: list[st.Answer] = []

    def is_fine(answer: st.Answer) -> bool:
        asked.append(answer)
        return False

    def broken(answer: st.Answer) -> bool:
        raise KeyError("classifier")

    both = st.cascade(engine, embedded, accept=is_fine)
    state = extract.run(backend=both, temperature=0)
    assert asked[0].prompt == [{"role": "user", "content": PROMPT}]
    assert asked[0].text != state["x"]
    with pytest.raises(st.ProgramError, match="accept: broken raised KeyError"):
        extract.run(backend=st.cascade(engine, embedded, accept=broken))


def test_a_program_that_is_given_up_leaves_nothing_behind(
    engine: st.Engine, embedded: st.Engine
) -> None:
    @st.function
    def endless(s: st.ProgramState) -> None:
        s += "Once" + st.gen("x", max_tokens=1900, ignore_eos=True)

    both = st.cascade(engine, embedded, accept=st.mean_logprob(0))
    stream = endless.stream(backend=both)
    wait_until(lambda: any(num_running(each) for each in (engine, embedded)))
    stream.cancel()
    wait_until(lambda: not any(num_running(each) for each in (engine, embedded)))


def num_running(backend: st.Engine) -> int:
    return int(backend.get_server_info()["num_running"])


def test_what_ended_by_a_stop_string_and_is_agreed_on_is_taken_whole(
    coarse: Backend, embedded: st.Engine
) -> None:
    """The stop string is read with the answer: the large model need not say it once more."""

    @st.function
    def until_age(s: st.ProgramState) -> None:
        s += st.user(PROMPT) + st.assistant(st.gen("x", stop=',"age":', max_tokens=48))

    both = st.cascade(coarse, embedded, accept=st.agree(1e-9))
    state = until_age.run(backend=both, temperature=0)
    assert state["x"] == '{"name":"Ada Moor"'
    small, large = both.counts.values()
    assert (small["num_taken"], small["num_escalated"]) == (1, 0)
    assert large["num_generated_tokens"] == 0


def test_a_prediction_is_counted_where_the_author_has_given_one(
    coarse: Backend, embedded: st.Engine
) -> None:
    both = st.cascade(coarse, embedded, accept=st.mean_logprob(0))
    told = []
    for options in ({}, {"prediction": '{"name":"Ada Moor"'}):

        @st.function
        def extracted(s: st.ProgramState, options: dict[str, str] = options) -> None:
            s += st.user(PROMPT) + st.assistant(st.gen("x", max_tokens=48, **options))

        meta = extracted.run(backend=both, temperature=0).get_meta_info("x")
        told.append(meta.get("accepted_prediction_tokens"))
    assert told[0] is None and told[1] is not None


def test_a_cascade_that_is_forgotten_leaves_no_thread(
    engine: st.Engine, embedded: st.Engine
) -> None:
    both = st.cascade(engine, embedded, accept=st.agree(0.9))
    thread = next(t for t in threading.enumerate() if t.name == "stemma-cascade")
    write.run(backend=both, temperature=0)
    del both
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_what_a_cascade_cannot_do_is_refused_by_name(
    engine: st.Engine, embedded: st.Engine, checkpoint: Path
) -> None:
    for models, said in [
        ((engine,), "two or more"),
        ((engine, "large"), "base_url"),
        ((engine, 3), "over ZeroMQ"),
    ]:
        with pytest.raises(st.InvalidProgram, match=said):
            st.cascade(*models, accept=st.agree(0.5))  # type: ignore[arg-type]
    both = st.cascade(engine, embedded, accept=st.agree(0.5))
    for options, said in [({"n": 2}, "n=2"), ({"return_logprob": True}, "logprobs=0")]:
        with pytest.raises(st.ProgramError, match=said):
            write.run(backend=both, **options)

    @st.function
    def ids(s: st.ProgramState) -> None:
        s += st.tokens([1, 2])

    with pytest.raises(st.ProgramError, match=r"^tokens: ids are of one model's"):
        ids.run(backend=both)
