"""The engine's process: its birth, its death, its clients."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from dsl_programs import GREEDY, deadline, two_gens, wait_until_idle

import stemma as st
from stemma.frontend.client.client import Connection

pytestmark = pytest.mark.usefixtures("default_engine", "no_test_hangs")


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
        with deadline(120):
            with pytest.raises(st.EngineError, match="ended"):
                list(pieces)
            with pytest.raises(st.EngineError):
                state["x"]
            wait = doomed._channel
            assert isinstance(wait, Connection) and "exit code -9" in str(wait.wait_ended())


def test_an_engine_that_died_is_started_again_by_the_next_run(checkpoint: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_total_tokens": 4096}
    with st.Engine(checkpoint, **options) as engine:
        before, endpoint = two_gens.run("mortal", backend=engine).text(), engine.endpoint
        first = engine.pid
        os.kill(first, signal.SIGKILL)
        with deadline(60), pytest.raises(st.EngineError, match="exit code -9"):
            while True:  # until its death is known
                two_gens.run("mortal", backend=engine)
        assert two_gens.run("mortal", backend=engine).text() == before
        assert engine.pid != first and engine.get_server_info()["total_tokens"] == 4096
        assert not Path(endpoint.removeprefix("ipc://")).parent.exists(), "it left its folder"
    with pytest.raises(st.EngineError, match="closed"):
        two_gens.run("mortal", backend=engine)


def test_a_runtime_is_reached_again_whenever_it_is_back(checkpoint: Path, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/programs.ipc"
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_total_tokens": 4096}
    with st.Engine(checkpoint, listen=[endpoint], **options):
        runtime = st.Runtime(endpoint, timeout_s=10)
        before = two_gens.run("away", backend=runtime).text()
    connection = runtime._channel
    assert isinstance(connection, Connection) and "stopped" in str(connection.wait_ended())
    with st.Engine(checkpoint, listen=[endpoint], **options):
        assert two_gens.run("away", backend=runtime).text() == before
        assert runtime.get_server_info()["num_programs"] == 0
        runtime.shutdown()
        with pytest.raises(st.EngineError, match="closed"):
            two_gens.run("away", backend=runtime)


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    """In its own words, as no accident."""
    with deadline(120), pytest.raises(st.ModelLoadError, match=r"^model \S*no-such-model does not"):
        st.Engine(tmp_path / "no-such-model")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "nope"}, r"^dtype: invalid choice: 'nope' \(choose from .*float32"),
        ({"max_model_len": "many"}, "^max_model_len: invalid int value: 'many'$"),
        ({"log_level": "loud"}, "^log_level: invalid choice: 'LOUD' .*WARNING"),
        ({"dtype": "--help"}, "^dtype: invalid choice: '--help'"),
        ({"listen": "tcp://0.0.0.0:0"}, "^endpoint='tcp://0.0.0.0:0' can be reached from outside"),
    ],
    ids=str,
)
def test_an_option_that_is_refused_is_named_with_what_it_may_be(
    options: dict[str, Any], words: str
) -> None:
    with deadline(120), pytest.raises(st.EngineError, match=words) as caught:
        st.Engine(**options)
    assert "usage" not in str(caught.value) and caught.type is st.EngineError


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
    for options in ({{"backend": engine}}, {{}}):
        try:
            print("child answered", program.run(**options)["x"])
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
    refusal = "child a connection cannot be used after fork()"
    assert done.stdout.count(refusal) == 2, "with a backend that is named, or that was set before"
    assert "child answered" not in done.stdout
    assert "parent True" in done.stdout
    pid = int(done.stdout.rsplit("pid ", 1)[1])
    end = time.monotonic() + 120
    while _is_alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _is_alive(pid), "the engine outlived its parent"


OF_NOBODY = """
import os
from stemma.frontend import backend

backend.Engine = object  # what is started, where nobody sets a backend
first = backend.get_default_backend()
assert backend.get_default_backend() is first
child = os.fork()
if child == 0:
    os._exit(backend.get_default_backend() is first)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert backend.get_default_backend() is first
"""


def test_a_fork_starts_a_default_engine_of_its_own_where_none_was_set() -> None:
    subprocess.run([sys.executable, "-c", OF_NOBODY], check=True, timeout=150)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
