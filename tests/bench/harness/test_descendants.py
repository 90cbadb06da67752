"""What a benchmark has started ends with it, and nothing else does."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from stemma.bench.harness.descendants import INTERRUPTS, ending_descendants
from stemma.bench.harness.process_meter import has_ended

SLEEP = "['sleep', '600'], stdout=-3, start_new_session=True"
ORPHAN = f"import subprocess as s; print(s.Popen({SLEEP}).pid)"
FORK = """
import multiprocessing, time
from stemma.bench.harness.descendants import ending_descendants
forks = multiprocessing.get_context("fork")
runs = forks.Event()
def work():
    runs.set()
    while True:  # a signal before a single long wait would not end that
        time.sleep(0.01)
with ending_descendants():
    child = forks.Process(target=work)
    child.start()
    runs.wait()  # Python forgets a signal that comes while it forks
    child.terminate()
    child.join()
    print(child.exitcode)
"""


def test_an_orphan_in_a_session_of_its_own_ends_with_the_block_and_an_earlier_child_does_not() -> (
    None
):
    with subprocess.Popen(["sleep", "600"]) as earlier:
        with ending_descendants():
            orphan = int(_output(ORPHAN))
            assert not has_ended(orphan)
        assert has_ended(orphan) and not has_ended(earlier.pid)
        earlier.kill()


@pytest.mark.parametrize("first", INTERRUPTS)
def test_the_first_signal_interrupts_and_later_ones_leave_the_end_alone(first: int) -> None:
    before = [signal.getsignal(number) for number in INTERRUPTS]
    seen = []
    with pytest.raises(KeyboardInterrupt), ending_descendants():
        try:
            signal.raise_signal(first)
        finally:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            seen.append("the end")
    assert seen == ["the end"]
    assert [signal.getsignal(number) for number in INTERRUPTS] == before


def test_a_fork_ends_by_a_signal_as_it_would_without_the_block() -> None:
    assert int(_output(FORK)) == -signal.SIGTERM


def _output(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
