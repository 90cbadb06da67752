"""One engine computes the prompts of another: what is said is the same, and nothing is left.

Two whole engines in threads of this process, in float64, whose KV goes over real sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_thread import serving
from waiting import wait_until

import stemma as st
from stemma.errors import InvalidRequest
from stemma.frontend.client.backend import Backend
from stemma.runtime.config import EngineConfig
from stemma.runtime.speculate.guesses import ModelDrafter

OPTIONS = {"max_total_tokens": 8192, "max_model_len": None, "chunked_prefill_size": 256}
TEXT = "The quick brown fox jumps over the lazy dog. " * 20


@st.function
def story(s: st.ProgramState, number: int, text: str = TEXT) -> None:
    s += f"Story {number}: " + text
    s += st.gen("a", max_tokens=8, temperature=0.7, ignore_eos=True)
    s += " And then: "
    s += st.gen("b", max_tokens=4, temperature=0.7, ignore_eos=True)


def said_by(backend: Backend, num_stories: int = 4) -> list[Any]:
    """The stories' tokens."""
    arguments = [{"number": n} for n in range(num_stories)]
    states = story.run_batch(arguments, seed=1, backend=backend)
    return [[s.get_meta_info(name)["output_ids"] for name in ("a", "b")] for s in states]


def coming(backend: Backend) -> dict[str, Any]:
    return dict(backend.get_server_info()["coming"])


def prefills(backend: Backend) -> dict[str, Any]:
    return dict(backend.get_server_info()["prefills"])


@contextmanager
def decoding(checkpoint: Path, endpoint: str, **options: Any) -> Iterator[Backend]:
    """Without its peers it would be any engine; waits for none."""
    with serving(checkpoint, role="decode", prefill_engines=[endpoint], **OPTIONS | options) as one:
        yield one


@contextmanager
def prefilling(checkpoint: Path, endpoint: str, **options: Any) -> Iterator[Backend]:
    own = {"role": "prefill", "prefill_endpoint": endpoint}
    with serving(checkpoint, **own, **OPTIONS | options) as one:
        yield one


@pytest.fixture(scope="module")
def truth(checkpoint: Path) -> list[Any]:
    with serving(checkpoint, **OPTIONS) as alone:
        return said_by(alone)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/kv"


@pytest.mark.parametrize("page_sizes", [(1, 1), (16, 1), (4, 64)])
def test_what_another_engine_has_computed_says_the_same(
    checkpoint: Path, endpoint: str, truth: list[Any], page_sizes: tuple[int, int]
) -> None:
    there, here = page_sizes
    with (
        prefilling(checkpoint, endpoint, page_size=there) as prefill,
        decoding(checkpoint, endpoint, page_size=here) as decode,
    ):
        wait_until(lambda: coming(decode)["num_able_peers"] == 1)
        assert said_by(decode) == truth
        told = coming(decode)
        assert told["num_streams"] >= 4 and told["num_failed"] == told["num_late_writes"] == 0
        assert told["num_restored_tokens"] >= 4 * (len(TEXT) - here)
        assert told["num_bytes_held"] == told["num_coming"] == told["num_held_requests"] == 0
        wait_until(lambda: prefills(prefill)["num_streams"] == 0)
        assert prefills(prefill)["num_tokens"] >= 4 * len(TEXT)


def test_the_kv_of_a_draft_model_comes_with_it(
    checkpoint: Path, endpoint: str, truth: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the model drafts for itself, no guess is wrong unless that is missing."""
    monkeypatch.setattr(ModelDrafter, "num_ahead", lambda _, texts, *__: [3] * len(texts))
    monkeypatch.setattr(ModelDrafter, "pays", lambda *_: True)
    draft = {"draft_model": str(checkpoint), "speculate": "model"}
    with (
        prefilling(checkpoint, endpoint, **draft),
        decoding(checkpoint, endpoint, **draft) as decode,
    ):
        wait_until(lambda: coming(decode)["num_able_peers"] == 1)
        assert said_by(decode) == truth
        assert coming(decode)["num_restored_tokens"] >= 4 * (len(TEXT) - 1)
        stats = decode.get_server_info()["stats"]
        assert 0 < stats["num_draft_tokens"] == stats["num_accepted_tokens"]


def test_an_engine_whose_kv_differs_is_not_asked(
    checkpoint: Path, endpoint: str, truth: list[Any]
) -> None:
    with (
        prefilling(checkpoint, endpoint, dtype="float32"),
        decoding(checkpoint, endpoint) as decode,
    ):
        wait_until(lambda: coming(decode)["num_peers"] == 1)
        assert said_by(decode) == truth
        assert coming(decode)["num_able_peers"] == coming(decode)["num_streams"] == 0


def test_a_role_changes_while_an_engine_runs(
    checkpoint: Path, endpoint: str, truth: list[Any]
) -> None:
    with prefilling(checkpoint, endpoint) as prefill, decoding(checkpoint, endpoint) as decode:
        wait_until(lambda: coming(decode)["num_able_peers"] == 1)
        assert prefill._channel.call("set_role", role="decode") == {"role": "decode"}
        wait_until(lambda: coming(decode)["num_able_peers"] == 0)
        assert said_by(decode) == truth and coming(decode)["num_streams"] == 0
        assert said_by(prefill) == truth, "an engine of any role runs programs"
        with pytest.raises(InvalidRequest, match="role='draft'"):
            prefill._channel.call("set_role", role="draft")


def test_a_program_that_is_cancelled_leaves_nothing_on_either_side(
    checkpoint: Path, endpoint: str
) -> None:
    with prefilling(checkpoint, endpoint) as prefill, decoding(checkpoint, endpoint) as decode:
        wait_until(lambda: coming(decode)["num_able_peers"] == 1)
        state = story.run(0, backend=decode, stream=True)
        wait_until(lambda: coming(decode)["num_streams"] == 1)
        state.cancel()
        wait_until(lambda: coming(decode)["num_held_requests"] == 0)
        assert coming(decode)["num_bytes_held"] == 0
        wait_until(lambda: prefills(prefill)["num_requests"] == 0)


def test_addresses_that_others_reach_are_refused() -> None:
    for fields in ({"prefill_endpoint": "tcp://0.0.0.0:1"}, {"prefill_engines": ["host:1"]}):
        with pytest.raises(InvalidRequest, match="an address of this host"):
            EngineConfig(**fields)
    with pytest.raises(InvalidRequest, match="role='prefill'"):
        EngineConfig(role="prefill")
