"""KV policies through the public interface: calls, branches, background, streams, HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from engine_thread import Backend, engine_in_thread, load

import stemma as st
from stemma.runtime.config import EngineConfig

DOCUMENTS = "\n".join(
    f"Text: Item {i} costs {3 * i} euros and weighs {i} kilos." for i in range(20)
)
QUESTION = "Text: Ada Moor lives in Bern. Ada is 34 years old.\nExtract name, age as JSON."
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@st.function
def extract(s: st.ProgramState, policy: st.KVPolicy | None = None) -> None:
    s += st.user(st.text(DOCUMENTS + "\n", kv="background") + QUESTION)
    s += st.assistant(st.gen("x", json_schema=PERSON, temperature=0, kv_policy=policy))


@pytest.mark.parametrize("policy", [st.snapkv(0.1, window=8), st.h2o(0.1, recent=8)])
def test_background_is_dropped_and_the_question_is_not(
    embedded: st.Engine, policy: st.KVPolicy
) -> None:
    whole = extract.run(backend=embedded)
    meta = whole.get_meta_info("x")
    assert "dropped_tokens" not in meta
    for _ in range(2):
        state = extract.run(policy, backend=embedded)
        kept = state.get_meta_info("x")
        assert kept["prompt_tokens"] == meta["prompt_tokens"]
        assert 0.7 * meta["prompt_tokens"] < kept["dropped_tokens"] < meta["prompt_tokens"]
        assert json.loads(state["x"]) == {"name": "Ada Moor", "age": 34}
    assert kept["cached_tokens"] >= meta["prompt_tokens"] - 1
    assert extract.run(backend=embedded)["x"] == whole["x"]
    assert extract.run(st.snapkv(1.0), backend=embedded)["x"] == whole["x"]


@st.function
def compressed(s: st.ProgramState, policy: st.KVPolicy) -> None:
    s += st.user(st.text(DOCUMENTS + "\n", kv="background") + QUESTION)
    s.compress(policy)
    s += st.assistant(st.gen("x", json_schema=PERSON, temperature=0))
    forks = s.fork(3)
    for number, fork in enumerate(forks):
        fork += st.user(f"What is {number} + 2?")
        fork += st.assistant(st.gen("y", max_tokens=12, temperature=0))
    forks.join()
    s += st.user("Is Ada old?") + st.assistant(st.select("z", ["yes", "no"]))


def test_what_a_branch_has_compressed_holds_for_all_that_follows(embedded: st.Engine) -> None:
    made = embedded.get_server_info()["compressed"]["num_prefixes"]
    first, again = (compressed.run(st.snapkv(0.1, window=8), backend=embedded) for _ in range(2))
    assert json.loads(first["x"]) == {"name": "Ada Moor", "age": 34}
    assert embedded.get_server_info()["compressed"]["num_prefixes"] == made + 1
    dropped = first.get_meta_info("x")["dropped_tokens"]
    assert dropped > 300
    assert first.get_meta_info("z")["prompt_tokens"] > first.get_meta_info("x")["prompt_tokens"]
    assert (again["x"], again["z"]) == (first["x"], first["z"])


@pytest.mark.parametrize(
    "tail", [" Go on", " and tell me all of it, one item after the other." * 4]
)
def test_few_tokens_behind_a_compressed_branch_are_kept_whole(
    embedded: st.Engine, tail: str
) -> None:
    """Slots have no queries of which SnapKV could look at the last ones."""

    @st.function
    def ask(s: st.ProgramState, policy: st.KVPolicy | None) -> None:
        s += DOCUMENTS
        s.compress(st.snapkv(0.5))
        s += tail + st.gen("x", max_tokens=4, temperature=0, kv_policy=policy)

    states = [ask.run(policy, backend=embedded) for policy in (None, st.snapkv(0.5))]
    before, after = (state.get_meta_info("x")["dropped_tokens"] for state in states)
    assert (after > before) == (len(tail) > 100)


def test_h2o_chooses_again_from_what_was_kept(embedded: st.Engine) -> None:
    @st.function
    def ask(s: st.ProgramState) -> None:
        s += st.user(st.text(DOCUMENTS + "\n", kv="background") + QUESTION)
        s.compress(st.snapkv(0.3))
        s += st.assistant(st.gen("x", max_tokens=12, temperature=0))
        s += st.user(st.text(DOCUMENTS + "\n", kv="background") + QUESTION)
        s.compress(st.h2o(0.1, recent=4))
        s += st.assistant(st.gen("y", json_schema=PERSON, temperature=0))

    first, again = (ask.run(backend=embedded) for _ in range(2))
    dropped = [first.get_meta_info(name)["dropped_tokens"] for name in ("x", "y")]
    assert dropped[1] > dropped[0] + 300
    assert json.loads(first["y"]) == {"name": "Ada Moor", "age": 34}
    assert (again["x"], again["y"]) == (first["x"], first["y"])


def test_a_beam_search_goes_on_from_what_is_kept(embedded: st.Engine) -> None:
    @st.function
    def search(s: st.ProgramState, is_compressed: bool) -> None:
        policy = st.snapkv(0.5, window=8)
        s += DOCUMENTS + "\n" + QUESTION
        if is_compressed:
            s.compress(policy)
        policy = None if is_compressed else policy
        s += st.gen("x", beam=2, max_tokens=12, kv_policy=policy)

    states = [search.run(value, backend=embedded) for value in (True, False)]
    assert states[0]["x"] == states[1]["x"]
    assert all(state.get_meta_info("x")["dropped_tokens"] > 200 for state in states)


def test_an_engines_policy_gives_way_to_what_a_branch_has_kept() -> None:
    @st.function
    def ask(s: st.ProgramState) -> None:
        s += DOCUMENTS
        s.compress(st.snapkv(0.25))
        s += QUESTION + st.gen("x", max_tokens=80, temperature=0, ignore_eos=True)

    with engine_in_thread(kv_policy="streaming:64") as engine:
        meta = ask.run(backend=engine).get_meta_info("x")
        assert meta["completion_tokens"] == 80
        assert 300 < meta["dropped_tokens"] < 340


def test_a_chat_goes_on_beyond_the_context_in_bounded_kv() -> None:
    @st.function
    def chat(s: st.ProgramState, num_turns: int) -> None:
        for turn in range(num_turns):
            s += st.user(f"What is {turn} + 7?")
            s += st.assistant(st.gen(f"a{turn}", max_tokens=24, temperature=0))

    with engine_in_thread(
        max_model_len=256, max_total_tokens=640, kv_policy="streaming:96"
    ) as engine:
        state = chat.run(60, backend=engine)
        meta = state.get_meta_info("a59")
        assert meta["prompt_tokens"] > 256
        assert meta["prompt_tokens"] - meta["dropped_tokens"] <= 96 + 48
        assert state["a0"] and state["a59"]

        @st.function
        def read(s: st.ProgramState) -> None:
            s += DOCUMENTS * 4 + st.gen("x", max_tokens=8, temperature=0)

        assert read.run(backend=engine).get_meta_info("x")["prompt_tokens"] > 1000


def test_a_crowd_in_a_small_pool_comes_to_its_end() -> None:
    """Prefixes are evicted while they are waited for, and calls that had run are preempted."""

    @st.function
    def ask(s: st.ProgramState, number: int) -> None:
        s += st.user(st.text(f"Number {number}. " + DOCUMENTS + "\n", kv="background") + QUESTION)
        s += st.assistant(st.gen("x", json_schema=PERSON, temperature=0, kv_policy=st.snapkv(0.5)))
        s += st.user("Why?") + st.assistant(st.gen("y", max_tokens=40, temperature=0))

    with engine_in_thread(max_total_tokens=1400, speculate="off") as engine:
        states = ask.run_batch([{"number": number} for number in range(24)], backend=engine)
        assert all(state["x"] and state["y"] for state in states)
        info = engine.get_server_info()
        assert info["compressed"]["num_waiting"] == 0
        assert info["compressed"]["num_prefixes"] >= 24
        engine.flush_cache()
        assert engine.get_server_info()["free_tokens"] == 1400


def test_over_http(served: Any) -> None:
    def ask(policy: Any) -> dict[str, Any]:
        body = {
            "messages": [{"role": "user", "content": DOCUMENTS + "\n" + QUESTION}],
            "max_tokens": 16, "temperature": 0, "kv_policy": policy,
        }  # fmt: skip
        request = urllib.request.Request(
            served.url + "/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            told: dict[str, Any] = json.load(answer)
        return told

    whole = ask(None)["usage"]["prompt_tokens"]
    for kind in ("snapkv", "h2o"):
        assert ask({"kind": kind, "keep": 0.25, "window": 8})["usage"]["prompt_tokens"] == whole
    for policy, field in (
        ({"kind": "pyramid", "keep": 0.25}, "kv_policy.kind"),
        ({"kind": "window", "keep": 16, "sinks": 0}, "by themselves"),
        ({"kind": "snapkv", "keep": 1.5}, "kv_policy.keep"),
        ({"kind": "snapkv"}, "kv_policy"),
        ({"kind": "streaming", "keep": 4}, "kv_policy.keep"),
        ({"kind": "snapkv", "keep": 0.5, "window": 65}, "kv_policy.window"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(policy)
        assert refused.value.code == 400
        assert field in json.load(refused.value)["error"]["message"]


def test_a_model_that_cannot_says_why(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "mistral", sliding_window=16)
    with pytest.raises(st.StemmaError, match="windows"):
        load(EngineConfig(model=folder, kv_policy="snapkv:0.5"))
    with pytest.raises(st.StemmaError, match="KIND:KEEP"):
        st.Engine(kv_policy="snapkv")


def test_a_model_with_windows_gives_up_what_is_behind_them(tmp_path: Path) -> None:
    """Also where branches fork and are scored and searched, in a pool smaller than the text."""
    folder = make_checkpoint(tmp_path, "mistral", sliding_window=16)

    @st.function
    def tell(s: st.ProgramState) -> None:
        s += "x" * 60
        s += st.gen("a", max_tokens=50, temperature=0, ignore_eos=True)
        forks = s.fork(2)
        for number, fork in enumerate(forks):
            fork += f"{number}" * 30 + st.gen("b", max_tokens=30, seed=number, ignore_eos=True)
        s += "-" + st.select("c", ["one " * 5, "two " * 5]) + "y" * 40
        s += st.gen("d", max_tokens=6, beam=2, ignore_eos=True)
        s += st.gen("e", max_tokens=5, n=2, temperature=1.0, seed=3, logprobs=1, ignore_eos=True)
        s += st.gen("f", max_tokens=5, seed=4, repetition_penalty=1.5, ignore_eos=True)
        s["forks"] = [fork["b"] for fork in forks]

    told = []
    for options in ({"max_total_tokens": 160}, {"kv_policy": "none"}):
        with engine_in_thread(folder, dtype="float64", kernels="reference", **options) as engine:
            for _ in range(2):
                state = tell.run(backend=engine)
                names = ("a", "c", "d", "e", "f", "forks")
                told.append([state[name] for name in names])
            dropped = state.get_meta_info("f").get("dropped_tokens", 0)
            assert (dropped > 150) == ("max_total_tokens" in options)
    assert all(each == told[0] for each in told)


def test_what_the_pool_cannot_hold_beside_its_prompt_is_refused() -> None:
    @st.function
    def ask(s: st.ProgramState, keep: float) -> None:
        s += DOCUMENTS + st.gen("x", max_tokens=4, temperature=0, kv_policy=st.snapkv(keep))

    with engine_in_thread(max_total_tokens=640) as engine:
        with pytest.raises(st.ProgramError, match=r"kv_policy\.keep=0\.9.*pool of 640"):
            _ = ask.run(0.9, backend=engine)["x"]
        assert ask.run(0.3, backend=engine).get_meta_info("x")["dropped_tokens"]
        with pytest.raises(st.ProgramError, match=r"kv_policy\.keep=300.*pool of 640"):
            _ = ask.run(backend=engine, keep=0.3)["x"] + _stream(engine, 300)


def _stream(engine: Backend, keep: int) -> str:
    @st.function
    def ask(s: st.ProgramState) -> None:
        s += "Text: Ada." + st.gen("x", max_tokens=4, kv_policy=st.streaming(keep))

    return str(ask.run(backend=engine)["x"])
