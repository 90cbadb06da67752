"""Exactness of whole programs: pauses, hints, leases, tiers and policies change nothing they say.

In float64 through the reference kernels, agents with pauses and forks run together in pools that
hold them all or a third of them; each says the same ids in all of these. And a program with ops of
all kinds says the same captured, waited for or streamed, alone or in a batch, in forks or apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_thread import serving
from waiting import wait_until

import stemma as st
from stemma.frontend.client.backend import Backend

NUM_AGENTS = 6
NAMES = ("t0", "t1", "t2", "last")
ROOMY, TIGHT = 4096, 420  # tokens; an agent ends with about 170, of which 40 are everybody's
GEN: dict[str, Any] = {"temperature": 0.7, "ignore_eos": True, "max_tokens": 7}


@st.function
def agent(s: st.ProgramState, number: int, hints: bool) -> None:
    """Three turns with a tool between them, then two drafts, one of which is used."""
    s += "You have one tool and answer in a word. "
    if hints:
        s.pin(ttl_s=5)
    for turn in range(3):
        s += f"Agent {number}, turn {turn}: " + st.gen(f"t{turn}", **GEN)
        with s.pause(expected_s=0.01 * (number % 3), label="tool"):
            s.sync()
        if hints and turn == 0:
            s.retain(priority=number)
            s.demote()
        if hints and turn == 1:
            s.prefetch()
            s.share()
    drafts = s.fork(2)
    drafts += lambda i: f"draft {i} " + st.gen("draft", **GEN)
    drafts.join()
    s += "end " + st.gen("last", **GEN)


def said_by(backend: Backend, *, hints: bool = False) -> list[list[Any]]:
    """All ids that each agent has generated; its drafts at the end."""
    instances = [{"number": i, "hints": hints} for i in range(NUM_AGENTS)]
    states = agent.run_batch(instances, seed=3, backend=backend)
    said = []
    for state in states:
        metas = [state.get_meta_info(name) for name in NAMES] + state.get_meta_info("draft")
        said.append([meta["output_ids"] for meta in metas])
    return said


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The products are tiny: threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def truth(checkpoint: Path, one_thread: None) -> list[list[Any]]:
    """With room for all, first come, first served, nothing leased."""
    plain = {"schedule_policy": "fcfs", "disable_leases": True}
    with serving(checkpoint, max_total_tokens=ROOMY, **plain) as backend:
        return said_by(backend)


@pytest.mark.parametrize("hints", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"max_total_tokens": ROOMY},
        {"max_total_tokens": TIGHT},
        {"max_total_tokens": TIGHT, "schedule_policy": "lpm", "disable_leases": True},
        {"max_total_tokens": TIGHT, "host_kv_tokens": ROOMY, "chunked_prefill_size": 32},
        {"max_total_tokens": 432, "page_size": 16, "host_kv_tokens": 512},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
def test_programs_say_the_same_with_any_leases_hints_tiers_and_policies(
    checkpoint: Path, truth: list[list[Any]], options: dict[str, Any], hints: bool
) -> None:
    with serving(checkpoint, **options) as backend:
        assert said_by(backend, hints=hints) == truth


def test_programs_say_the_same_with_a_store_and_after_a_restart(
    checkpoint: Path, truth: list[list[Any]], tmp_path: Path
) -> None:
    for _ in range(2):
        with serving(checkpoint, max_total_tokens=ROOMY, kv_store=tmp_path) as backend:
            assert said_by(backend, hints=True) == truth


@st.function
def waiting_agent(s: st.ProgramState, result: str, wait: Callable[[], object]) -> None:
    """A tool runs until what may follow has been computed."""
    s += "You have one tool and answer in a word. " + st.gen("t0", **GEN)
    s["t0"]
    with s.pause(label="tool"):
        wait()
    s += f" The tool says that it is {result}. " + st.gen("last", **GEN)


@pytest.mark.parametrize(
    "options", [{}, {"page_size": 16, "chunked_prefill_size": 32}, {"host_kv_tokens": ROOMY}],
    ids=str,
)  # fmt: skip
def test_programs_say_the_same_where_what_follows_is_computed_ahead_be_it_right_or_wrong(
    checkpoint: Path, one_thread: None, options: dict[str, Any]
) -> None:
    results = ("rain", "sun in the afternoon", "rain and wind", "rain")

    def said(backend: Backend, wait: Callable[[], object]) -> list[list[int]]:
        texts = []
        for result in results:
            state = waiting_agent.run(result, wait, seed=3, backend=backend)
            texts.append(state.get_meta_info("last")["output_ids"])
            wait = waited
        return texts

    def nothing() -> None: ...

    waited: Callable[[], object] = nothing
    with serving(checkpoint, max_total_tokens=ROOMY, disable_ahead=True) as backend:
        truth = said(backend, nothing)
        assert not backend.get_server_info()["ahead"]
    with serving(checkpoint, max_total_tokens=ROOMY, **options) as backend:
        computed = [0]

        def until_computed() -> None:
            def has_more() -> bool:
                return int(backend.get_server_info()["ahead"]["num_tokens"]) > computed[0]

            wait_until(has_more)
            computed[0] = int(backend.get_server_info()["ahead"]["num_tokens"])

        waited = until_computed  # from the second program on
        assert said(backend, nothing) == truth
        ahead = backend.get_server_info()["ahead"]
        assert 0 < ahead["num_used_tokens"] < ahead["num_tokens"], "some were right, some wrong"


# --- all kinds of ops -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backend(checkpoint: Path, one_thread: None) -> Iterator[Backend]:
    """With room for all of a program."""
    options = {"max_total_tokens": 8192, "max_running_requests": 16, "max_model_len": None}
    with serving(checkpoint, **options) as backend:
        yield backend


@st.function
def story(s: st.ProgramState, sampling: dict[str, Any], waits: bool) -> None:
    """Every kind of op. With `waits` the author reads each value as soon as it is appended."""

    def settle(state: st.ProgramState) -> None:
        if waits:
            state.sync()

    gen: dict[str, Any] = {"ignore_eos": True, **sampling}
    s += st.system("Be brief.") + st.user("Tell me ")
    settle(s)
    s += st.assistant(st.gen("opening", max_tokens=9, stop=["\x07"], **gen))
    settle(s)
    s += st.user_begin() + "Now choose: "
    s += st.select("choice", ["red", "green", "greenish blue"])
    settle(s)
    s += st.user_end()
    forks = s.fork(3)
    for index, branch in enumerate(forks):
        branch += f"Branch {index}: "
        branch += st.gen("part", max_tokens=5 + index, **gen)
        settle(branch)
        branch += " and " + st.gen("more", max_tokens=4, **gen)
        settle(branch)
    forks.join("concate_and_append")
    settle(s)
    s += " Titles: " + st.gen("titles", max_tokens=4, n=3, **gen)
    settle(s)
    s += " In short: " + s.var("opening") + st.gen("end", max_tokens=8, **gen)


def _summary(state: st.ProgramState) -> dict[str, object]:
    names = ("opening", "choice", "titles", "end")
    metas = [state.get_meta_info(name) for name in names]
    each = [meta for item in metas for meta in (item if isinstance(item, list) else [item])]
    return {
        "text": state.text(),
        "messages": state.messages(),
        "values": [state[name] for name in names],
        "counts": [meta["completion_tokens"] for meta in each],
        "prompts": [meta["prompt_tokens"] for meta in each],
    }


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.5, "min_p": 0.01, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    ],
    ids=str,
)
def test_a_program_says_the_same_captured_waited_for_or_streamed(
    backend: Backend, sampling: dict[str, Any]
) -> None:
    summaries = []
    for waits, stream, is_cold in [
        (False, False, True), (False, False, False), (True, False, True), (True, False, False),
        (False, True, True), (True, True, True),
    ]:  # fmt: skip
        if is_cold:
            backend.flush_cache()
        state = story.run(sampling, waits, seed=3, stream=stream, backend=backend)
        if stream:
            assert "".join(state.text_iter()) == state.text()
        summaries.append(_summary(state))
    assert all(summary == summaries[0] for summary in summaries[1:])


def test_a_program_says_the_same_alone_and_in_a_batch(backend: Backend) -> None:
    arguments = [{"sampling": {"temperature": 0.0}, "waits": bool(i % 2)} for i in range(6)]
    backend.flush_cache()
    batch = [_summary(state) for state in story.run_batch(arguments, backend=backend)]
    backend.flush_cache()
    single = _summary(story.run(**arguments[0], backend=backend))
    assert all(summary == single for summary in batch)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_forks_say_what_the_same_branches_say_alone(backend: Backend, temperature: float) -> None:
    def tail(state: st.ProgramState, index: int) -> None:
        state += f" number {index}:"
        state += st.gen("x", max_tokens=8, temperature=temperature, seed=index, ignore_eos=True)
        state += " then " + st.gen("y", max_tokens=5, temperature=temperature, seed=index)

    @st.function
    def forked(s: st.ProgramState) -> list[tuple[str, str]]:
        s += "A prefix that all of them share, long enough to matter"
        forks = s.fork(4)
        for index, branch in enumerate(forks):
            tail(branch, index)
        return [(branch["x"], branch["y"]) for branch in forks]

    @st.function
    def single(s: st.ProgramState, index: int) -> tuple[str, str]:
        s += "A prefix that all of them share, long enough to matter"
        tail(s, index)
        return s["x"], s["y"]

    backend.flush_cache()
    together = forked.run(backend=backend).ret_value
    for index in range(4):
        backend.flush_cache()
        assert single.run(index, backend=backend).ret_value == together[index]
