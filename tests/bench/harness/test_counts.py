"""Benchmarks of nothing: refused before anything is loaded."""

from __future__ import annotations

import pytest

from stemma.cli.parser import run_command


@pytest.mark.parametrize(
    "arguments",
    [
        "beam --beams 4 0",
        "beam --rounds 0",
        "determinism --batches 0",
        "determinism --repeats 0",
        "drafting --conversations 0",
        "drafting-peers --repeats 0",
        "oracle --steps 0",
        "load --clients 0",
        "masks --rounds 0",
        "programs --repeats 0",
        "speculation --conversations 0",
        "speculation --parallel 0",
    ],
)
def test_a_benchmark_of_nothing_is_refused(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(["bench", *arguments.split()])
    assert ended.value.code == 2
    assert "'0' is not allowed; allowed: an integer >= 1" in capsys.readouterr().err
