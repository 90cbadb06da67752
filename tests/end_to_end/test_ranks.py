"""A model that two or three processes hold together, served: what it says, and what becomes of it
when one of them ends."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from engine_thread import engine_in_thread, load
from mixtures import make_mixture
from server_process import ServerProcess, children, is_alive
from waiting import PATIENCE_S, wait_until

import stemma as st
from stemma.frontend.client.peer_process import is_stopped
from stemma.runtime.config import EngineConfig

FLAGS = ("--dtype", "float64", "--kernels", "reference", "--speculate", "off", "--grace-s", "1")
PROMPT = "The story begins in a small town"


@pytest.fixture(scope="module", params=["--tp-size 2", "--pp-size 3", "--device cuda --pp-size 2"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    division = request.param.split()
    with ServerProcess(tmp_path_factory.mktemp("ranks"), *FLAGS, *division) as server:
        yield server


def ranks_of(engine: int) -> list[int]:
    """The processes of its other ranks."""
    return [
        pid
        for pid in children(engine)
        if b"parallel.follower" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def engine_with(num_others: int) -> int:
    """The process of this process's engine that has so many other ranks."""
    (found,) = (pid for pid in children(os.getpid()) if len(ranks_of(pid)) == num_others)
    return found


@st.function
def story(s: st.ProgramState) -> None:
    s += PROMPT
    forks = s.fork(2)
    for number, fork in enumerate(forks):
        fork += f" ({number})" + st.gen("text", max_tokens=12, temperature=0.7 * number)
    forks.join()
    s += st.gen("end", regex=r"[a-z]{4}\d", temperature=0.0)


def test_a_program_says_what_it_says_on_one_process(server: ServerProcess) -> None:
    options = {"dtype": "float64", "kernels": "reference", "speculate": "off"}
    with (
        engine_in_thread(max_total_tokens=4096, **options) as one,
        st.Runtime(server.endpoint) as two,
    ):
        expected, found = (story.run(backend=backend, seed=4) for backend in (one, two))
        assert found.text() == expected.text()


def test_each_rank_is_told_of_with_its_memory(server: ServerProcess) -> None:
    info = httpx.get(server.url + "/server_info", timeout=PATIENCE_S).json()
    assert [rank["pid"] for rank in info["ranks"]] == ranks_of(server.engine_pid)
    metrics = httpx.get(server.url + "/metrics", timeout=PATIENCE_S).text
    for rank in info["ranks"]:
        assert rank["peak_rss_bytes"] > 50 << 20
        assert f'stemma_rank_peak_rss_bytes{{model="stemma-tiny",rank="{rank["name"]}"}}' in metrics
    with engine_in_thread(max_total_tokens=4096, dtype="float64") as one:
        of_one = one.get_server_info()
    assert of_one["ranks"] == []
    if info["device"] == "cpu":
        assert info["kv_bytes_per_token"] == of_one["kv_bytes_per_token"]


def test_when_a_rank_ends_its_engine_ends_and_programs_go_on_in_the_next(
    server: ServerProcess,
) -> None:
    """Which is there again only after the grace period of this one."""
    before = server.generate(8, prompt=PROMPT).json()["choices"][0]["text"]
    engine = server.engine_pid
    others = ranks_of(engine)
    with st.Runtime(server.endpoint, timeout_s=PATIENCE_S) as runtime:
        whole = story.run(backend=runtime, seed=4).text()
        with server.stream(200, prompt=PROMPT) as events:
            state = story.stream(backend=runtime, seed=4)
            os.kill(others[0], signal.SIGKILL)
            assert any("error" in event for event in events)
        wait_until(lambda: not any(map(is_alive, (engine, *others))))
        assert state.text() == whole
    server.wait_healthy()
    assert server.generate(8, prompt=PROMPT).json()["choices"][0]["text"] == before
    assert server.engine_pid != engine and len(ranks_of(server.engine_pid)) == len(others)


def test_ranks_end_with_their_engine_however_it_ends() -> None:
    """One of them is stopped, and sees nothing of it."""
    engine = st.Engine(tp_size=2, pp_size=2, max_total_tokens=512)
    pid = engine_with(3)
    ranks = ranks_of(pid)
    os.kill(ranks[0], signal.SIGSTOP)
    wait_until(lambda: is_stopped(ranks[0]))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, ranks)))
    engine.shutdown()


def test_a_signal_to_all_processes_at_once_lets_requests_end(tmp_path: Path) -> None:
    """As systemd stops a unit. The ranks are needed until the engine needs them no more."""
    with ServerProcess(tmp_path / "server", *FLAGS, "--tp-size", "2") as server:
        engine = server.engine_pid
        ranks = ranks_of(engine)
        with server.stream(100, prompt=PROMPT) as events:
            for pid in (server.process.pid, engine, *ranks):
                os.kill(pid, signal.SIGTERM)
            assert list(events)[-1] == {"done": True}
        assert server.process.wait(PATIENCE_S) == 0, server.log
    wait_until(lambda: not any(map(is_alive, ranks)))


def test_what_lies_where_it_is_started_is_no_module_of_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('not the one of the library')")
    monkeypatch.chdir(tmp_path)
    st.Engine(pp_size=2, max_total_tokens=512).shutdown()


def test_a_rank_that_ends_while_nothing_runs_ends_the_engine() -> None:
    with st.Engine(tp_size=2, max_total_tokens=512) as engine:
        pid = engine_with(1)
        (rank,) = ranks_of(pid)
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid))
        assert engine.get_server_info()["total_tokens"] == 512  # another one's
        assert engine_with(1) != pid


@pytest.mark.parametrize("divided", ["tp_size", "cp_size"])
def test_a_mixture_placed_by_what_was_counted_says_what_it_says_on_one_process(
    divided: str, tmp_path: Path
) -> None:
    model, counted = tmp_path / "model", tmp_path / "loads.json"
    make_mixture(model, "Mixtral", has_tokenizer=True)
    options = {"model": model, "dtype": "float64", "kernels": "reference", "speculate": "off"}
    options |= {"max_total_tokens": 4096}
    with engine_in_thread(**options) as one:
        expected = story.run(backend=one, seed=4).text()
        info = one.get_server_info()
        counted.write_text(json.dumps(info))
    loads = info["experts"]["loads"]
    assert len(loads) == 2 and len({sum(counts) for counts in loads.values()}) == 1
    placed = {divided: 2, "ep_size": 2, "ep_loads": counted, "ep_extra_experts": 1}
    with engine_in_thread(**options, **placed) as two:
        assert story.run(backend=two, seed=4).text() == expected
        found = two.get_server_info()["experts"]
    assert found["loads"] == loads
    assert all(own >= 1.0 for own in found["group_imbalance"].values())


def test_copies_of_experts_are_refused_without_counts_of_the_model(tmp_path: Path) -> None:
    make_mixture(tmp_path, "Mixtral", has_tokenizer=True)
    groups = {"model": tmp_path, "tp_size": 2, "ep_size": 2}
    with pytest.raises(
        st.StemmaError, match=r"ep_extra_experts=1 is not allowed.*without ep_loads"
    ):
        load(EngineConfig(**groups, ep_extra_experts=1))
    counted = tmp_path / "loads.json"
    allowed = r"experts\.loads, 2 layers of 4 experts"
    for written in ('{"experts": {"loads": {"0": [1, 2, 3, 4]}}}', "", "[1]"):
        counted.write_text(written)
        with pytest.raises(st.StemmaError, match=f"ep_loads=.*is not allowed.*{allowed}"):
            load(EngineConfig(**groups, ep_loads=counted))
    counted.write_text('{"experts": {"loads": {"0": [1, 2, 3, 4], "1": [1, 2, 3, 4]}}}')
    with pytest.raises(st.StemmaError, match=r"ep_extra_experts=3 is not allowed.*in .0, 2.: then"):
        load(EngineConfig(**groups, ep_loads=counted, ep_extra_experts=3))


def test_a_program_says_the_same_where_ranks_divide_tokens_and_kv() -> None:
    options = {"dtype": "float64", "kernels": "cpu", "max_total_tokens": 4096}
    with engine_in_thread(**options) as one, engine_in_thread(cp_size=2, **options) as two:
        expected, found = (story.run(backend=backend, seed=4) for backend in (one, two))
        assert found.text() == expected.text()


def test_groups_of_experts_are_refused_where_a_model_has_none() -> None:
    with pytest.raises(st.StemmaError, match="ep_size=2 is not allowed"):
        load(EngineConfig(tp_size=2, ep_size=2))
