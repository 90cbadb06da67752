"""W5's documents: which outputs count as valid."""

from __future__ import annotations

import pytest

from stemma.bench.constrained.documents import DocumentJudge, Documents
from stemma.bench.constrained.matchers.tokenizer_file import TokenizerFile
from stemma.bench.harness.workloads import make_workload
from stemma.bench.serving.comparison import shown_documents, summary
from stemma.bench.serving.engines import EngineSpec, Measurement
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL

GOOD = (
    '{"name":"Ada","title":"Countess \\u00e9","age":36,"score":9999,"status":"active","comment":""}'
)


@pytest.fixture(scope="module")
def file() -> TokenizerFile:
    return TokenizerFile(EMBEDDED_MODEL / "tokenizer.json")


@pytest.fixture(scope="module")
def judge() -> DocumentJudge:
    schema = make_workload("W5").json_schema
    assert schema is not None
    return DocumentJudge(EMBEDDED_MODEL, schema)


def test_a_documents_end_of_sequence_is_no_part_of_it(
    judge: DocumentJudge, file: TokenizerFile
) -> None:
    ids = file.encode(GOOD)
    assert judge.judge([ids, [*ids, file.eos_id]]) == Documents(2, 2, len(ids), len(ids))


@pytest.mark.parametrize(
    "text",
    [
        "",
        GOOD[:-1],
        GOOD + "}",
        GOOD.replace("Ada", "A\tda"),
        GOOD.replace("Ada", "seventeen letters"),
        GOOD.replace("36", "121"),
        GOOD.replace("36", "NaN"),
        GOOD.replace('"age":36,', ""),
    ],
)
def test_what_is_not_strict_json_of_the_schema_is_not_valid(
    text: str, judge: DocumentJudge, file: TokenizerFile
) -> None:
    assert judge.judge([file.encode(text)]).num_valid == 0


def test_text_split_otherwise_has_the_same_canonical_length(
    judge: DocumentJudge, file: TokenizerFile
) -> None:
    bytewise = [file.token_bytes.index(bytes([byte])) for byte in GOOD.encode()]
    found = judge.judge([bytewise])
    assert found == Documents(1, 1, len(GOOD.encode()), len(file.encode(GOOD)))


def test_bytes_that_are_no_utf8_are_not_valid(judge: DocumentJudge, file: TokenizerFile) -> None:
    before, after = (file.encode(part) for part in GOOD.split("Ada"))
    byte = file.token_bytes.index(b"\xff")
    assert judge.judge([[*before, byte, *after]]).num_valid == 0


def measured(engine: str, wall_s: float, num_valid: int) -> Measurement:
    return Measurement(
        engine=engine, work="W5", repeat=0, wall_s=wall_s, cpu_s=2 * wall_s, others_cores=0.0,
        prompt_tokens=1, output_tokens=320, output_sha="", peak_rss_bytes=1,
        documents=Documents(32, num_valid, 10.0, 9.0),
    )  # fmt: skip


def test_seconds_are_shared_by_the_valid_documents_alone() -> None:
    found = [measured("stemma", 1.6, 32), measured("vllm", 2.9, 29), measured("none", 1.0, 0)]
    rows = {
        name: shown_documents(summary("W5", EngineSpec(name, ""), found, None))
        for name in ("stemma", "vllm", "none")
    }
    assert rows["stemma"]["s per valid"] == pytest.approx(0.05)
    assert rows["vllm"]["s per valid"] == pytest.approx(0.1)
    assert rows["vllm"]["valid"] == "29/32"
    assert (rows["vllm"]["tokens"], rows["vllm"]["canonical"]) == ("10.0", "9.0")
    assert rows["vllm"]["ratio"] == pytest.approx(2.9 / 1.6)
    assert rows["none"]["s per valid"] is None
