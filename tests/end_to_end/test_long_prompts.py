"""Long and hostile texts through a real engine: whoever sends them harms nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from checkpoints import BACKTRACKS, make_backtracking, make_checkpoint, make_long_token

import stemma as st
from stemma.runtime.tokenizer.tokenizer import UNLOCKED_CHARS, VERY_LONG_CHARS

HANGS_S = 120.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[st.Engine]:
    """Its tokenizer panics over BACKTRACKS; by its longest token a text of 8 MB might fit."""
    folder = make_checkpoint(tmp_path_factory.mktemp("panics"), max_position_embeddings=8192)
    make_long_token(make_backtracking(folder), 1024)
    with st.Engine(folder, dtype="float32", max_total_tokens=8192, num_threads=1) as started:
        yield started


@st.function
def ask(s: st.ProgramState, text: str) -> None:
    s += text
    s += st.gen("x", max_tokens=1, temperature=0)


@st.function
def choose(s: st.ProgramState, text: str) -> None:
    s += "which?"
    s += st.select("x", ["a", text])


@st.function
def chat(s: st.ProgramState, text: str) -> None:
    s += st.user(text)
    s += st.assistant(st.gen("x", max_tokens=1))


@st.function
def stream(s: st.ProgramState) -> None:
    s += "hello" + st.gen("x", max_tokens=4096, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("program", [ask, choose, chat])
@pytest.mark.parametrize("num_chars", [300, UNLOCKED_CHARS, VERY_LONG_CHARS])
def test_a_text_over_which_the_tokenizer_panics_fails_alone(
    engine: st.Engine, program: st.Function, num_chars: int
) -> None:
    text = (BACKTRACKS * (num_chars // len(BACKTRACKS) + 1))[-num_chars:]
    with pytest.raises(st.ProgramError, match="tokenizer cannot take this text"):
        program.run(text=text, backend=engine)["x"]
    assert ask.run(text="fine", backend=engine)["x"]


def test_the_runtimes_calls_about_such_texts_fail_alone(engine: st.Engine) -> None:
    connection = engine.connection
    for text in (BACKTRACKS, BACKTRACKS * 100):
        with pytest.raises(st.InvalidRequest, match="tokenizer cannot take this text"):
            connection.call("tokenize", text=text)
        target = {"action_type": "pin", "payload": {"target": {"prompt": text}}}
        (outcome,) = connection.call("kv_hints", actions=[target])
        assert outcome["outcome"] == "rejected" and "tokenizer" in outcome["reason"]
    long = "fine " * UNLOCKED_CHARS
    ids = connection.call("tokenize", text=long)
    assert ids == list(long.encode())
    assert connection.call("detokenize", ids=ids) == long


def test_others_go_on_while_a_text_of_4_mb_is_tokenized(engine: st.Engine) -> None:
    """Before, the stream had no more than a step's token until the long text had its answer."""
    num_pieces, has_begun, is_answered = 0, threading.Event(), threading.Event()

    def read() -> None:
        nonlocal num_pieces
        while not is_answered.is_set():
            for _ in stream.run(backend=engine, stream=True).text_iter("x"):
                num_pieces += 1
                has_begun.set()
                if is_answered.is_set():
                    return

    reader = threading.Thread(target=read)
    reader.start()
    assert has_begun.wait(HANGS_S)
    before = num_pieces
    with pytest.raises(st.ProgramError, match="tokens > 8191 maximum"):
        ask.run(text="many words " * 380_000, backend=engine)["x"]
    num_meanwhile = num_pieces - before
    is_answered.set()
    reader.join(HANGS_S)
    assert num_meanwhile > 20
