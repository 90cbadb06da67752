"""Rows: what counts in a median, and which way a ratio points."""

from __future__ import annotations

from pathlib import Path

import pytest

import stemma as st
from stemma.bench.serving.comparison import summary
from stemma.bench.serving.engines import EngineSpec, Measurement, peer_spec

STEMMA, VLLM = EngineSpec("stemma", ""), EngineSpec("vllm", "")


def measured(engine: str, repeat: int, wall_s: float, others: float = 0.0) -> Measurement:
    return Measurement(
        engine=engine,
        work="W1",
        repeat=repeat,
        wall_s=wall_s,
        cpu_s=2 * wall_s,
        others_cores=others,
        prompt_tokens=10,
        output_tokens=100,
        output_sha=f"{repeat}",
        peak_rss_bytes=2**20,
    )


def test_a_disturbed_repeat_takes_its_pair_out_of_the_medians() -> None:
    found = [measured("stemma", r, 1.0) for r in range(3)]
    found += [measured("vllm", 0, 2.0), measured("vllm", 1, 3.0), measured("vllm", 2, 90.0, 0.5)]
    row = summary("W1", VLLM, found, None)
    assert (row["ratio"], row["ratio_min"], row["ratio_max"]) == (2.5, 2.0, 3.0)
    assert (row["wall_s"], row["cpu_s"], row["quiet"], row["target"]) == (2.5, 5.0, "2/3", 1.2)
    assert row["tok_s"] == 40 and row["equal_outputs"] == 3
    assert summary("W1", STEMMA, found, 0.5)["share"] == 0.5


def test_disturbed_repeats_count_where_no_other_is_there() -> None:
    found = [measured(name, 0, wall, 1.0) for name, wall in (("stemma", 1.0), ("vllm", 1.5))]
    row = summary("W1", VLLM, found, None)
    assert row["ratio"] == 1.5 and row["quiet"] == "0/1"


def test_a_peer_may_be_told_how_to_draft() -> None:
    spec = peer_spec("vllm=/bin/sh,ngram", Path("model"))
    assert (spec.name, spec.flags) == ("vllm ngram", ("--model", "model", "--speculate", "ngram"))
    spec = peer_spec("llamacpp=/bin/sh,/bin/sh,ngram-simple", Path("model"))
    assert spec.name == "llama.cpp ngram-simple" and spec.flags[-2:] == (
        "--speculate",
        "ngram-simple",
    )
    assert peer_spec("stemma=off", Path("model")).flags[-2:] == ("--speculate", "off")


def test_vllm_may_be_told_to_multiply_in_float32() -> None:
    spec = peer_spec("vllm=/bin/sh,float32", Path("model"))
    assert (spec.name, spec.flags) == ("vllm float32", ("--model", "model", "--dtype", "float32"))


def test_a_peer_may_be_given_a_draft_model(tmp_path: Path) -> None:
    draft = tmp_path / "draft.gguf"
    draft.touch()
    peers = (
        f"stemma=auto,{tmp_path}",
        f"vllm=/bin/sh,{tmp_path}",
        f"llamacpp=/bin/sh,/bin/sh,{draft}",
    )
    for given in peers:
        path = given.rpartition(",")[2]
        assert peer_spec(given, Path("model")).flags[-2:] == ("--draft-model", path)
        with pytest.raises(st.InvalidRequest, match="must exist"):
            peer_spec(given.replace(str(tmp_path), str(tmp_path / "other")), Path("model"))


@pytest.mark.parametrize(
    "given",
    [
        "vllm",
        "vllm=/no/such/python",
        "vllm=/bin/sh,ngram,x",
        "llamacpp=/bin/sh",
        "sglang=x",
        "stemma=",
        "openai=host:1",
    ],
)
def test_a_peer_that_cannot_be_is_refused(given: str) -> None:
    with pytest.raises(st.InvalidRequest, match=r"peer=.*vllm=PYTHON"):
        peer_spec(given, Path("model"))
