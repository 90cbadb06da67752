"""What the router knows of its replicas' caches is what they have."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from cluster_caches import is_right, texts_in
from cluster_threads import clustered
from waiting import wait_until

import stemma as st
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL

GEN: dict[str, Any] = {"temperature": 0.7, "ignore_eos": True}


@st.function
def ask(s: st.ProgramState, number: int, branches: int) -> None:
    s += f"You are a helpful agent. Group {number % 3}. Task {number}: "
    s += st.gen("a", max_tokens=8, **GEN)
    forks = s.fork(branches)
    forks += lambda i: f" part {i} " + st.gen("b", max_tokens=5, **GEN)
    forks.join()


@st.function
def chat(s: st.ProgramState, number: int) -> None:
    s += st.system("You are kind.") + st.user(f"Hello {number}")
    s += st.assistant(st.gen("a", max_tokens=8, **GEN))


@pytest.mark.parametrize("options", [{}, {"max_total_tokens": 400}, {"page_size": 16}], ids=str)
def test_the_router_knows_what_its_replicas_have(checkpoint: Path, options: dict[str, Any]) -> None:
    rng = random.Random(1)
    with clustered(checkpoint, 2, **options) as (cluster, backend):
        for _ in range(3):
            jobs = [
                {"number": rng.randrange(30), "branches": rng.randrange(1, 4)} for _ in range(12)
            ]
            ask.run_batch(jobs, backend=backend)
            chat.run_batch([{"number": rng.randrange(5)} for _ in range(4)], backend=backend)
            wait_until(lambda: is_right(cluster))
            assert sum(len(texts_in(cluster, number)) for number in (0, 1)) > 8
        backend.flush_cache()
        wait_until(lambda: is_right(cluster) and not texts_in(cluster, 0))
        ask.run(number=1, branches=2, backend=backend)
        cluster.kill(0)
        cluster.kill(1)
        cluster.wait_ready()
        ask.run(number=1, branches=2, backend=backend)
        wait_until(lambda: is_right(cluster))


def test_a_bos_is_no_text_also_where_texts_part_right_behind_it() -> None:
    """The embedded model begins texts with one."""

    @st.function
    def say(s: st.ProgramState, text: str) -> None:
        s += text + st.gen("a", max_tokens=3, **GEN)

    with clustered(EMBEDDED_MODEL, 1) as (cluster, backend):
        for text in ("You are kind.", "You are wise.", "Once, far away", "Once more"):
            say.run(text=text, backend=backend)
        wait_until(lambda: is_right(cluster))
        texts = {text[:4] for _, text in texts_in(cluster, 0)}
        assert texts == {b"You ", b"Once"}


def test_a_chat_is_found_where_it_is(checkpoint: Path) -> None:
    """Though nobody has tokenized it, and what its template puts around it is learnt."""
    with clustered(checkpoint, 3) as (cluster, backend):
        for number in range(6):  # what roles look like, and where each chat is
            chat.run(number=number, backend=backend)
        wait_until(lambda: is_right(cluster))
        before = dict(cluster.router.num_placed)
        info = backend.get_server_info()["stats"]
        for _ in range(3):
            for number in range(6):
                chat.run(number=number, backend=backend)
        after = backend.get_server_info()["stats"]
        cached = after["num_cached_tokens"] - info["num_cached_tokens"]
        prompt = after["num_prompt_tokens"] - info["num_prompt_tokens"]
        assert cached > 0.9 * prompt, (before, cluster.router.num_placed)


def test_a_follower_that_is_behind_is_told_all_anew(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with clustered(checkpoint, 1) as (cluster, backend):
        ask.run(number=1, branches=2, backend=backend)
        wait_until(lambda: is_right(cluster))
        feed = cluster.engines[0].gateway._control.feed
        tell, told = feed._tell, []

        def lose(client: Any, changes: Any, *, is_reset: bool = False) -> None:
            if is_reset:
                tell(client, changes, is_reset=True)
            else:
                told.append(len(changes))

        monkeypatch.setattr(feed, "_tell", lose)
        ask.run(number=2, branches=2, backend=backend)
        assert told and not is_right(cluster)
        monkeypatch.undo()
        for client in feed._followers:
            feed._followers[client] = False
        ask.run(number=3, branches=2, backend=backend)
        wait_until(lambda: is_right(cluster))
