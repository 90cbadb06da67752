"""What a child process writes reaches standard error, and its last lines can be quoted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stemma.frontend.client.engine_process import EngineProcess
from stemma.frontend.client.passed_output import PassedOutput

WRITES = "import sys; [print('line', n, file=sys.stderr) for n in range(5000)]; print('the end')"


def test_all_of_it_is_passed_on_and_the_last_lines_are_known(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITES], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        output = PassedOutput(process.stdout, 2)
        process.wait()
        last = output.last_lines()
    passed = capfd.readouterr().err.splitlines()
    assert len(passed) == 5001 and last == passed[-2:]
    assert process.stdout.closed


def test_an_engine_that_refuses_its_flags_is_quoted_though_its_output_is_passed_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    process = EngineProcess("/nowhere", options={}, has_log=False, is_quoted=True)
    process.wait()
    death = process.peer.death()
    process.stop()
    assert death is not None and "/nowhere does not exist" in death
    assert "/nowhere does not exist" in capfd.readouterr().err
