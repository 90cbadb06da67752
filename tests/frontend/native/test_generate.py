"""`generate`, `encode` and the tokenizer of a backend, on a real engine."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from pathlib import Path
from typing import Any

import pytest

import stemma as st

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
ENDLESS = {"temperature": 0, "max_new_tokens": 3000, "ignore_eos": True}
TEXT = "The river runs to the sea."

pytestmark = pytest.mark.usefixtures("no_test_hangs")


@st.function
def written(s: st.ProgramState) -> None:
    s += TEXT + st.gen("x", 6, temperature=0, ignore_eos=True)


def test_one_prompt_has_one_answer_and_it_is_that_of_a_program(engine: st.Engine) -> None:
    answer: Any = engine.generate(TEXT, GREEDY, rid="mine")
    meta = answer["meta_info"]
    assert answer["text"] == written.run(backend=engine)["x"]
    assert len(answer["output_ids"]) == meta["completion_tokens"] == 6
    assert (meta["id"], meta["prompt_tokens"]) == ("mine", len(TEXT))
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    by_ids: Any = engine.generate(input_ids=list(TEXT.encode()), sampling_params=GREEDY)
    assert by_ids["output_ids"] == answer["output_ids"]


def test_each_prompt_has_its_own_sampling_and_samples(engine: st.Engine) -> None:
    short = {**GREEDY, "max_new_tokens": 2}
    answers: Any = engine.generate([TEXT, "Up"], [GREEDY, short], return_logprob=[False, True])
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [6, 2]
    first, second = (answer["meta_info"] for answer in answers)
    assert "output_token_logprobs" not in first
    assert len(second["output_token_logprobs"]) == 2
    drawn = {"max_new_tokens": 8, "n": 3, "temperature": 5.0, "sampling_seed": 4}
    samples: Any = engine.generate(TEXT, drawn)
    assert len({sample["text"] for sample in samples}) == 3
    again: Any = engine.generate(TEXT, drawn)
    assert [sample["text"] for sample in again] == [sample["text"] for sample in samples]


def test_log_probabilities_of_the_prompt_are_told_where_they_are_asked_for(
    engine: st.Engine,
) -> None:
    answer: Any = engine.generate(
        TEXT,
        {"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    meta = answer["meta_info"]
    assert [token[2] for token in meta["input_token_logprobs"]] == list(TEXT)
    assert meta["input_top_logprobs"][0] is None and len(meta["input_top_logprobs"][1]) == 2
    assert (answer["text"], meta["output_token_logprobs"]) == ("", [])


def test_a_stream_grows_to_the_whole_answer(engine: st.Engine) -> None:
    whole: Any = engine.generate(TEXT, GREEDY)
    *parts, last = engine.generate(TEXT, GREEDY, stream=True, return_logprob=True)
    assert last["text"] == whole["text"]  # all of it may come of one step
    for part in parts:
        meta = part["meta_info"]
        assert last["text"].startswith(part["text"]) and meta["finish_reason"] is None
        assert part["output_ids"] == last["output_ids"][: meta["completion_tokens"]]
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    batch = list(engine.generate([TEXT, "Up"], GREEDY, stream=True))
    last_of = {part["index"]: part for part in batch}
    assert last_of[0]["text"] == whole["text"] and len(last_of) == 2


def test_async_functions_await_answers_and_streams(engine: st.Engine) -> None:
    async def ask() -> Any:
        one, many = await asyncio.gather(
            engine.async_generate(TEXT, GREEDY), engine.async_generate([TEXT, TEXT], GREEDY)
        )
        stream: Any = await engine.async_generate(TEXT, GREEDY, stream=True)
        return one, many, [part async for part in stream]

    one, many, parts = asyncio.run(ask())
    assert [each["text"] for each in many] == [one["text"]] * 2
    assert parts[-1]["text"] == one["text"]


def test_a_stream_that_is_dropped_ends_what_it_runs(engine: st.Engine) -> None:
    stream: Any = engine.generate([TEXT, "Up"], ENDLESS, stream=True)
    next(stream)
    assert engine.get_server_info()["num_programs"] == 2
    del stream
    gc.collect()
    _await_none(engine)

    async def leave() -> None:
        stream: Any = await engine.async_generate(TEXT, ENDLESS, stream=True)
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(leave())
    _await_none(engine)
    unread: Any = engine.generate(TEXT, ENDLESS, stream=True)
    assert engine.get_server_info()["num_programs"] == 0, "one that is never read never runs"
    unread.close()


def _await_none(engine: st.Engine) -> None:
    """Until no program runs; a test that waits forever is ended."""
    while engine.get_server_info()["num_programs"]:
        threading.Event().wait(0.01)


def test_one_that_is_awaited_no_longer_is_cancelled(engine: st.Engine) -> None:
    async def give_up() -> None:
        task = asyncio.create_task(engine.async_generate(TEXT, ENDLESS))
        while not engine.get_server_info()["num_programs"]:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    _await_none(engine)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "one of prompt and input_ids"),
        ({"prompt": "a", "input_ids": [1]}, "one of prompt and input_ids"),
        ({"prompt": []}, "prompt="),
        ({"prompt": ["a", ""]}, "prompt="),
        ({"input_ids": [[1], []]}, "input_ids="),
        ({"input_ids": [1, -1]}, "input_ids="),
        ({"prompt": "a", "sampling_params": 3}, "sampling_params="),
        ({"prompt": "a", "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens=3"),
        ({"prompt": "a", "sampling_params": {"no_stop_trim": True}}, "no_stop_trim=True"),
        ({"prompt": "a", "sampling_params": {"n": 65}}, "sampling_params.n=65"),
        ({"prompt": "a", "sampling_params": {"top_p": "x"}}, "top_p='x'"),
        ({"prompt": "a", "sampling_params": {"regex": "("}}, "not closed"),
        ({"prompt": ["a", "b"], "sampling_params": [{}]}, "sampling_params='1 values'"),
        ({"prompt": "a", "return_logprob": [True]}, "return_logprob="),
        ({"prompt": "a", "image_data": "cat.png"}, "image_data="),
        ({"prompt": "a", "lora_path": "nobody"}, "serves no adapters"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(
    engine: st.Engine, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(st.StemmaError) as caught:
        engine.generate(**given)
    assert said in str(caught.value)


def test_one_bad_prompt_of_several_ends_the_others(engine: st.Engine) -> None:
    with pytest.raises(st.ProgramError, match="top_k=0"):
        engine.generate([TEXT, "Up"], [ENDLESS, {"top_k": 0}])
    _await_none(engine)


def test_texts_have_embeddings(engine: st.Engine) -> None:
    one: Any = engine.encode(TEXT)
    assert math.hypot(*one["embedding"]) == pytest.approx(1.0, abs=1e-5)
    assert one["meta_info"]["prompt_tokens"] == len(TEXT)
    ids = list(TEXT.encode())
    first, second = engine.encode(input_ids=[ids, ids[:5]])
    assert first["embedding"] == pytest.approx(one["embedding"], abs=1e-4)
    assert second["embedding"] != first["embedding"]
    assert asyncio.run(engine.async_encode([TEXT]))[0]["embedding"] == pytest.approx(  # type: ignore[index]
        one["embedding"], abs=1e-4
    )


def test_the_tokenizer_is_the_models(engine: st.Engine) -> None:
    tokenizer = engine.get_tokenizer()
    ids = tokenizer.encode("Ada")
    assert tokenizer.decode(ids) == "Ada" == tokenizer.decode(tuple(ids))
    assert tokenizer.batch_decode([ids, ids[:1]]) == ["Ada", tokenizer.decode(ids[0])]
    assert tokenizer("Ada") == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    with pytest.raises(st.InvalidRequest, match="token_ids="):
        tokenizer.decode([tokenizer.vocab_size])
    with pytest.raises(st.InvalidRequest, match="text="):
        tokenizer.encode(3)  # type: ignore[arg-type]


def test_a_runtime_of_a_models_path_is_an_engine_of_its_own(checkpoint: Path) -> None:
    with st.Runtime(model_path=checkpoint, max_total_tokens=4096, tp_size=1) as runtime:
        answer: Any = runtime.generate(TEXT, GREEDY)
        assert answer["text"] == written.run(backend=runtime)["x"]
        engine = runtime._engine
        assert engine is not None and engine._process.peer.death() is None
    assert engine._process.peer.death() is not None
    with pytest.raises(st.InvalidRequest, match="tenant='a' is not allowed"):
        st.Runtime(model_path=checkpoint, tenant="a")
    with pytest.raises(st.InvalidRequest, match="only together with model_path"):
        st.Runtime("ipc:///nowhere", dtype="float32")
    with pytest.raises(st.InvalidRequest, match="endpoint=None"):
        st.Runtime()
