"""Each format of traces, on small files of its own, and what a file that is none is told."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path

import pytest

from stemma.errors import InvalidRequest
from stemma.planning.trace_files import Trace, read_trace
from stemma.planning.traces import Call, Job

OURS = [
    {
        "at_s": 100.0,
        "kind": "react",
        "prefix": {"name": "planner", "tokens": 40},
        "calls": [
            {"new_tokens": 10, "output_tokens": 4},
            [
                {"new_tokens": 3, "output_tokens": 5, "pause_s": 0.5},
                {"new_tokens": 7, "output_tokens": 6},
            ],
            {"new_tokens": 2, "output_tokens": 8, "follows": 2},
        ],
    },
    {
        "at_s": 103.0,
        "prefix": {"name": "planner", "tokens": 60},
        "calls": [{"new_tokens": 0, "output_tokens": 1}],
    },
]
MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 3052, "input_length": 1030, "output_length": 26, "hash_ids": [46, 47, 49]},
]
BURST = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
46,GPT-4,417,0,417,API log
118,GPT-4,417,276,693,API log
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01.017335+00:00,2399,6
"""


def written(folder: Path, text: str) -> Trace:
    path = folder / "trace"
    path.write_text(text)
    return read_trace(path)


def lines(records: list[dict[str, object]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def calls_of(job: Job) -> list[list[Call]]:
    """The calls of each step, all of whose tokens are 7."""
    steps = [list(next(job))]
    while True:
        try:
            steps.append(list(job.send([array("i", [7] * c.num_output) for c in steps[-1]])))
        except StopIteration:
            return steps


def test_programs_keep_their_steps_and_what_follows_what(tmp_path: Path) -> None:
    trace = written(tmp_path, lines(OURS))
    first, second = trace.programs
    assert (first.at_s, second.at_s, first.kind) == (0.0, 3.0, "react")
    assert (trace.num_calls, first.num_output) == (2.5, 23)
    (one,), (left, right), (last,) = calls_of(first.job(random.Random(0)))
    (other,), *_ = calls_of(second.job(random.Random(0)))
    assert [len(each.prompt) for each in (one, left, right, last)] == [50, 57, 61, 69]
    assert one.prompt[:40] == other.prompt[:40], "texts of a name begin alike"
    assert left.prompt[:54] == one.prompt + array("i", [7] * 4) == right.prompt[:54]
    assert last.prompt[:61] == right.prompt, "it follows the second branch"
    assert (left.delay_s, right.delay_s, last.num_output) == (0.5, 0.0, 8)
    assert trace.longest == first.longest == 77


def test_equal_hash_ids_are_equal_prefixes(tmp_path: Path) -> None:
    trace = written(tmp_path, lines(MOONCAKE))
    prompts = [calls_of(each.job(random.Random(0)))[0][0].prompt for each in trace.programs]
    assert [len(prompt) for prompt in prompts] == [1100, 1030]
    same = [a == b for a, b in zip(*prompts, strict=False)]
    assert all(same[:1024]) and not any(same[1024:])
    assert [each.at_s for each in trace.programs] == [0.0, 3.052]


@pytest.mark.parametrize(
    ("text", "times_s", "sizes"),
    [
        (BURST, [0.0, 40.0, 113.0], [(472, 18), (1087, 230), (417, 276)]),
        (AZURE, [0.0, 4.314579], [(374, 44), (396, 109)]),
        (AZURE_2024, [0.0, 1.007405], [(2162, 5), (2399, 6)]),
    ],
    ids=["BurstGPT", "Azure 2023", "Azure 2024"],
)
def test_a_table_s_calls_share_nothing(
    tmp_path: Path, text: str, times_s: list[float], sizes: list[tuple[int, int]]
) -> None:
    trace = written(tmp_path, text)
    assert [each.at_s for each in trace.programs] == pytest.approx(times_s, abs=1e-6)
    found = [calls_of(each.job(random.Random(n)))[0][0] for n, each in enumerate(trace.programs)]
    assert [(len(call.prompt), call.num_output) for call in found] == sizes
    assert len({bytes(call.prompt[:4]) for call in found}) == len(found)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "at least one program"),
        ("a,b\n1,2\n", "line 1"),
        ('{"at_s": 0}\n', "line 1"),
        (lines(OURS) + '{"at_s": 1, "calls": []}\n', "line 3"),
        ('{"at_s": 0, "calls": [{"new_tokens": 0, "output_tokens": 1}]}', "without tokens"),
        ('{"at_s": 0, "calls": [{"new_tokens": 1, "output_tokens": 0}]}', "integer >= 1"),
        (BURST.replace("1087", "many"), "line 3"),
        (AZURE.replace("2023-11-16 18:15:50", "noon"), "line 3"),
    ],
)
def test_what_is_no_trace_is_refused_by_its_line(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named) as raised:
        written(tmp_path, text)
    assert raised.value.field == "trace"


def test_more_of_a_trace_is_more_of_each_of_its_programs(tmp_path: Path) -> None:
    trace = written(tmp_path, BURST)
    assert len(trace.starts(times=3.0)) == 9
    few = [len(trace.starts(seed, times=0.4)) for seed in range(50)]
    assert sum(few) / 50 == pytest.approx(1.2, abs=0.35)
    assert max(start.at_s for start in trace.starts(times=3.0)) < 114.0
    assert sum(trace.call_rates(10.0)) * 10.0 == pytest.approx(3.0)
    assert [each.at_s for each in trace.window(30.0, 60.0).programs] == [10.0]
