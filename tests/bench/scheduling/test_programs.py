"""`stemma bench programs` as a user runs it, its scripts, and its figures from known records."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from array import array
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from stemma.bench.scheduling.programs.figures import Figures, clairvoyant_share, figures_of
from stemma.bench.scheduling.programs.measure import Measured, rows_of
from stemma.bench.scheduling.programs.record import (  # fmt: skip
    CallRecord,
    Counters,
    ProgramRecord,
    RunRecord,
    carry_out,
)
from stemma.bench.scheduling.programs.scripts import (  # fmt: skip
    QUICK_REACT,
    MixedSizes,
    ReactSizes,
    Script,
    Turn,
    Work,
    mixed,
    react,
)
from stemma.bench.scheduling.programs.simulated import simulate
from stemma.bench.scheduling.programs.stemma_engine import StemmaEngine
from stemma.bench.scheduling.programs.targets import mixed_targets, react_targets
from stemma.bench.scheduling.programs.variants import Variant
from stemma.bench.scheduling.programs.vllm_server import CompletionsClient
from stemma.cli.parser import run_command


def test_a_repeat_has_the_same_structure_over_other_ids() -> None:
    first, again, other = (react(ReactSizes(), vocab=32_000, repeat=r) for r in (0, 0, 1))
    assert first == again != other
    assert len(first.scripts) == 64 and {s.num_calls for s in first.scripts} == {6}
    for one, two in zip(first.scripts, other.scripts, strict=True):
        for turn, moved in zip(one.turns, two.turns, strict=True):
            assert turn.pause_s == moved.pause_s and turn.expected_s == moved.expected_s
            assert [*map(len, turn.parts)] == [*map(len, moved.parts)]
            assert turn.parts != moved.parts
    pauses = [turn.pause_s for script in first.scripts for turn in script.turns[1:]]
    assert 0.2 <= min(pauses) < 0.4 and 2.5 < max(pauses) <= 3.0
    assert {script.turns[0].pause_s for script in first.scripts} == {0.0}


def test_the_working_set_counts_what_is_shared_once() -> None:
    sizes = ReactSizes()
    work = react(sizes, vocab=32_000)
    own = sizes.num_task + 5 * sizes.num_observed + 6 * sizes.num_output
    assert work.working_set == sizes.num_common + 64 * own
    assert {script.max_context for script in work.scripts} == {sizes.num_common + own}
    kinds = [script.kind for script in mixed(MixedSizes(), vocab=32_000).scripts]
    assert kinds.count("short") == 48 and kinds.count("long") == 6
    longs = [s for s in mixed(MixedSizes(), vocab=32_000).scripts if s.kind == "long"]
    assert {script.num_calls for script in longs} == {20}


def record(
    prompt: str, output: str, cached: int, sent_s: float, ended_s: float, queue_s: float = 0.0
) -> CallRecord:
    ids = array("i", map(ord, prompt)), array("i", map(ord, output))
    return CallRecord(*ids, cached, sent_s, ended_s, queue_s, 0.25, ended_s - sent_s - 0.5)


def two_programs() -> RunRecord:
    """The second goes on from where the first began, and then from itself, after a pause."""
    turns = (Turn(((1,),), 2), Turn(((1,),), 2, pause_s=3.0))
    calls = (record("abd", "pq", 0, 1.0, 2.0, 0.25), record("abdpqr", "st", 2, 5.0, 6.0))
    programs = (
        ProgramRecord(Script("react", turns[:1]), 1.0, (record("abc", "xy", 0, 0.0, 1.0),)),
        ProgramRecord(Script("react", turns), 6.0, calls),
    )
    scripts = tuple(program.script for program in programs)
    return RunRecord(Work("two", "", 2, scripts), 8.0, programs, Counters(20, 1, 9))


def test_figures_count_what_an_infinite_cache_would_not_have_computed() -> None:
    figures = figures_of(two_programs())
    assert figures.hit_rate == 2 / 12
    # Of "abd" it knows "ab", of "abdpqr" also "d" and "p": "q" was sampled and never computed.
    assert figures.infinite_hit_rate == 6 / 12
    # 20 computed; 3 of them sampled tokens fed back; of the 17 the infinite cache computes 6.
    assert figures.recomputed_tokens == 17 - 6
    assert figures.displaced_tokens == 20 - 9 and figures.preemptions == 1
    assert (figures.mean_s, figures.p50_s, figures.p99_s, figures.longest_s) == (3.5, 1, 6, 6)
    assert figures.idle_share == 1 - 3 / 8 and figures.paused_s == 1.5
    assert figures.queued_s == 0.125 and figures.prefill_s == (0.25 + 0.5) / 2


def test_without_the_engines_counters_misses_count() -> None:
    run = two_programs()
    figures = figures_of(RunRecord(run.work, run.wall_s, run.programs, Counters()))
    assert figures.recomputed_tokens == 10 - 6
    assert figures.displaced_tokens is None and figures.preemptions is None


def test_the_clairvoyant_share_is_of_the_same_calls() -> None:
    assert clairvoyant_share(two_programs(), 100) == 2 / 6
    assert clairvoyant_share(two_programs(), 6) == 2 / 6
    assert clairvoyant_share(two_programs(), 3) == 2 / 5


def measured(engine: str, wall_s: float, again: int, mean_s: float, longest_s: float) -> Measured:
    figures = Figures(wall_s, 0.5, 0.9, again, 0, 7, mean_s, 1, 2, longest_s, 0.1, 1, 1, 1, 1)
    return Measured(engine, 0, figures, 0.95, 3.0, 0.0)


def test_targets_hold_the_best_rival_against_ours() -> None:
    runs = {
        "program": [measured("program", 10, 0, 2, 11)],
        "fcfs": [measured("fcfs", 20, 90, 5, 10)],
        "lpm": [measured("lpm", 14, 120, 5, 10)],
        "vllm": [measured("vllm", 15, 80, 5, 10)],
    }
    rows = [target.row() for target in react_targets(runs)]
    found = [(row["target"], row["figure"], row["met"]) for row in rows]
    assert found == [
        ("react, program: times faster than lpm", 1.4, "yes"),
        ("react, program: times fewer tokens again", 90, "yes"),
        ("react: times faster than vLLM per call", 1.5, "no"),
        ("react: share of the clairvoyant hits", 0.95, "yes"),
    ]
    mean, longest = (target.row() for target in mixed_targets(runs))
    assert (mean["figure"], mean["met"]) == (2.5, "yes")
    assert (longest["figure"], longest["wanted"], longest["met"]) == (1.1, "<= 1.2", "yes")
    assert react_targets({"fcfs": runs["fcfs"]}) == mixed_targets({"fcfs": runs["fcfs"]}) == []
    assert [row["ratio"] for row in rows_of("react", runs)] == [1.0, 2.0, 1.4, 1.5]


def test_a_variant_that_this_engine_does_not_know_says_why() -> None:
    assert Variant("one", {"schedule_policy": "fcfs"}).reason_against() is None
    reason = Variant("one", {"schedule_policy": "mind-reading"}).reason_against()
    assert reason is not None and "mind-reading" in reason


def test_scripts_are_carried_out_as_they_say(checkpoint: Path) -> None:
    """Prompts and outputs are those of the script, branches begin where the trunk is, and the
    times are in order."""
    rounds = (
        Turn(((256, 65, 66),), 3),
        Turn(((67, 68), (67, 69)), 2, pause_s=0.05, expected_s=0.05),
        Turn(((70,),), 2),
    )
    work = Work("one", "", 0, (Script("react", rounds), Script("react", rounds[:1], 0.1)))
    player = StemmaEngine(
        "stemma", checkpoint, {"dtype": "float32", "max_total_tokens": 256, "num_threads": 1}
    )
    try:
        run = carry_out(player, work)
    finally:
        player.close()
    long, short = run.programs
    first, left, right, last = (call for call in long.calls)
    assert first.prompt.tolist() == [256, 65, 66] and len(first.output) == 3
    trunk = first.prompt + first.output
    assert left.prompt == trunk + array("i", [67, 68])
    assert right.prompt == trunk + array("i", [67, 69])
    assert last.prompt == trunk + array("i", [70]) and len(last.output) == 2
    assert left.sent_s - first.ended_s >= 0.05 and last.sent_s > right.admitted_s
    assert left.num_cached == len(trunk) - 1, "the last token of an output has no KV yet"
    assert last.num_cached == len(trunk), "until the branches have computed it"
    assert short.calls[0].output == first.output and short.calls[0].sent_s >= 0.1
    assert run.added.num_preemptions == 0
    assert figures_of(run).recomputed_tokens == 0
    assert run.wall_s >= long.completion_s > 0.05


class CountingHandler(BaseHTTPRequestHandler):
    """Answers a completion with the numbers from the prompt's length on."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        length = len(body["prompt"])
        assert body["ignore_eos"] and body["return_token_ids"] and body["temperature"] == 0
        answer = {
            "choices": [{"token_ids": [*range(length, length + body["max_tokens"])]}],
            "usage": {"prompt_tokens_details": {"cached_tokens": length // 2}},
        }
        self._send(json.dumps(answer))

    def do_GET(self) -> None:
        self._send('# HELP x\nvllm:num_preemptions_total{model_name="m"} 3.0\n')

    def _send(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Not to standard error."""


def programs(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stemma", "bench", "programs", "--out", str(folder), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_a_server_is_asked_call_by_call_with_what_it_answered_before() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), CountingHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = CompletionsClient(f"http://127.0.0.1:{server.server_port}")
    turns = (
        Turn(((7, 8),), 3),
        Turn(((9,), (10,)), 1),
        Turn(((11,),), 2, pause_s=0.02),
    )
    try:
        run = carry_out(client, Work("one", "", 0, (Script("react", turns),)))
        assert client.counters().num_preemptions == 3
    finally:
        server.shutdown()
        server.server_close()
    first, left, right, last = run.programs[0].calls
    assert first.output.tolist() == [2, 3, 4] and first.num_cached == 1
    assert [left.prompt[-1], right.prompt[-1]] == [9, 10]
    assert last.prompt.tolist() == [7, 8, 2, 3, 4, 11] and last.output.tolist() == [6, 7]
    assert last.sent_s - max(left.ended_s, right.ended_s) >= 0.02
    assert figures_of(run).queued_s is None, "it does not tell"


@pytest.mark.slow  # six engines
def test_react_holds_the_policies_against_each_other(tmp_path: Path) -> None:
    done = programs(tmp_path, "--quick", "--work", "react", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    rows = {row["engine"]: row for row in printed["rows"]}
    assert {"fcfs", "lpm", "dfs-weight"} <= rows.keys()
    for row in rows.values():
        # The order of admissions is read off the clients' clocks, so a little more is possible.
        assert row["hit_rate"] < row["infinite_hit_rate"] + 0.01 < 1
        assert row["recomputed_tokens"] >= 0 and row["displaced_tokens"] > 0
        assert 0 < row["clairvoyant_share"] <= 1.01
        assert row["wall_s"] >= row["longest_s"] >= row["p50_s"] > row["paused_s"] / 2 > 0
    assert rows["fcfs"]["recomputed_tokens"] > 0
    report = json.loads((tmp_path / "programs.json").read_text())
    assert report["targets"] == printed["targets"]
    assert report["details"]["react"]["num_agents"] == QUICK_REACT.num_agents
    assert len(report["repeats"]) == len(rows)
    if "program" in rows:
        assert any("times faster" in target["target"] for target in printed["targets"])
    else:
        assert "program is left out: " in done.stderr


@pytest.mark.slow
def test_mixed_and_restart_are_measured_or_said_to_be_left_out(tmp_path: Path) -> None:
    done = programs(tmp_path, "--quick", "--work", "mixed,restart", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    rows = {row["engine"]: row for row in printed["rows"]}
    assert "fcfs" in rows
    assert all(row["longest_s"] >= row["mean_s"] > 0 for row in rows.values())
    assert (printed["restart"] is not None) != ("restart is left out: " in done.stderr)
    assert ("program" in rows) != ("program is left out: " in done.stderr)


def test_a_simulation_has_the_same_figures_each_time() -> None:
    work = react(QUICK_REACT, vocab=4096)
    variants = [
        *(Variant(policy, {"schedule_policy": policy}) for policy in ("fcfs", "lpm")),
        Variant("unknown", {"schedule_policy": "mind-reading"}),
    ]
    runs = simulate(work, variants)
    assert runs == simulate(work, variants) and runs.keys() == {"fcfs", "lpm"}
    figures = runs["fcfs"][0].figures
    pauses = [sum(turn.pause_s for turn in script.turns) for script in work.scripts]
    assert figures.paused_s == pytest.approx(sum(pauses) / len(pauses))
    parts = [figures.paused_s, figures.queued_s, figures.prefill_s, figures.decode_s]
    assert sum(part for part in parts if part is not None) == pytest.approx(figures.mean_s)
    assert figures.recomputed_tokens > 0 and figures.hit_rate < figures.infinite_hit_rate


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--work", "chess"), "('react', 'mixed', 'restart')"),
        (("--peer", "vllm=/nowhere/python"), "vllm=PYTHON"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    flags: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["bench", "programs", "--out", str(tmp_path), *flags]) == 1
    assert said in capsys.readouterr().err
