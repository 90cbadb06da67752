"""Grammars compiled in another process: once, within limits, and whatever becomes of it."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stemma.constrained.serving import compiler_service as grammar_compiler
from stemma.constrained.serving.compiler_service import ENTRY_BYTES, GrammarCompiler
from stemma.constrained.serving.grammar_state import PendingGrammar
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.vocabulary import Vocabulary

Make = Callable[..., GrammarCompiler]
DIGITS = GrammarSpec("regex", "[0-9]{3}")
LETTERS = GrammarSpec("regex", "[a-z]{3}")


def vocabulary() -> Vocabulary:
    return Vocabulary([bytes([i]) for i in range(256)], lambda text: list(text.encode()), 256)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """On a busy machine what is quick may take the quick lane's 0.5 s, and another worker then."""
    monkeypatch.setattr(grammar_compiler, "QUICK_LIMIT_S", 20.0)
    made: list[GrammarCompiler] = []

    def make_one(**options: float) -> GrammarCompiler:
        made.append(GrammarCompiler(vocabulary, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make_one
    for compiler in made:
        compiler.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[GrammarCompiler]:
    """For tests that leave it as good as new."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(grammar_compiler, "QUICK_LIMIT_S", 20.0)
        compiler = GrammarCompiler(vocabulary)
    yield compiler
    compiler.close()


def wait(compiler: GrammarCompiler, *pending: PendingGrammar) -> None:
    deadline = time.monotonic() + 30
    while not all(grammar.is_done for grammar in pending):
        assert select.select([compiler.fileno()], [], [], deadline - time.monotonic())[0]
        compiler.collect()


def stop(pid: int) -> None:
    """Stop a process, all its threads: one may run on for a while after the signal."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def worker_pid(compiler: GrammarCompiler) -> int:
    worker = compiler._lanes[0]._worker
    assert worker is not None
    return worker._process.pid


def test_a_grammar_arrives_and_is_remembered(shared: GrammarCompiler) -> None:
    pending = shared.ask(DIGITS)
    wait(shared, pending)
    assert pending.bound is not None and pending.bound.matcher().consume(ord("7"))
    num_hits = shared.stats.num_hits
    assert shared.ask(GrammarSpec("regex", "[0-9]{" + "3}")) is pending
    assert shared.stats.num_hits == num_hits + 1


def test_equal_grammars_on_their_way_are_compiled_once(shared: GrammarCompiler) -> None:
    before = shared.stats.num_compiled
    several = [shared.ask(LETTERS) for _ in range(5)]
    wait(shared, *several)
    assert len(set(map(id, several))) == 1 and shared.stats.num_compiled == before + 1


def test_what_is_no_grammar_is_refused_and_remembered(shared: GrammarCompiler) -> None:
    wrong = shared.ask(GrammarSpec("regex", "(a"))
    right = shared.ask(GrammarSpec("regex", "(a)"))
    wait(shared, wrong, right)
    assert wrong.failure is not None and wrong.failure.kind == "InvalidGrammar"
    assert "regex" in wrong.failure.message and right.bound is not None
    assert shared.ask(GrammarSpec("regex", "(a")) is wrong


@pytest.mark.parametrize(
    ("schema", "begin"),
    [
        ('{"type":"array","uniqueItems":true}', "json_schema: /: uniqueItems"),
        ('{"type":"nonsense"}', "json_schema: "),
        ("{", "json_schema: not JSON"),
    ],
)
def test_a_refusal_begins_with_what_was_asked_for(
    shared: GrammarCompiler, schema: str, begin: str
) -> None:
    refused = shared.ask(GrammarSpec("json_schema", schema))
    wait(shared, refused)
    assert refused.failure is not None and refused.failure.message.startswith(begin)


def test_a_worker_killed_while_idle_is_replaced(shared: GrammarCompiler) -> None:
    wait(shared, shared.ask(DIGITS))
    os.kill(worker_pid(shared), signal.SIGKILL)
    after = shared.ask(GrammarSpec("regex", "after [a-z]+"))
    wait(shared, after)
    assert after.bound is not None


def test_a_worker_killed_at_work_is_replaced_and_its_grammar_begun_again(make: Make) -> None:
    compiler = make()
    wait(compiler, compiler.ask(DIGITS))
    stop(worker_pid(compiler))
    lost, next_one = compiler.ask(LETTERS), compiler.ask(GrammarSpec("regex", "b"))
    time.sleep(0.05)
    os.kill(worker_pid(compiler), signal.SIGKILL)
    wait(compiler, lost, next_one)
    assert lost.bound is not None and next_one.bound is not None


def test_without_a_worker_grammars_fail_and_are_not_remembered(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = make()
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/bin/false")
        lost = compiler.ask(DIGITS)
        wait(compiler, lost)
        assert lost.failure is not None and lost.failure.kind == "EngineError"
    again = compiler.ask(DIGITS)
    wait(compiler, again)
    assert again.bound is not None


def test_what_takes_too_long_is_refused_by_the_workers_own_alarm(make: Make) -> None:
    compiler = make(timeout_s=0.002)
    slow = compiler.ask(GrammarSpec("regex", "|".join(f"word{i}[0-9]*x" for i in range(2000))))
    wait(compiler, slow)
    assert slow.failure is not None and slow.failure.kind == "InvalidGrammar"
    assert "more than 0.002 s" in slow.failure.message


def test_a_worker_that_hangs_is_killed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "GRACE_S", 0.1)
    compiler = make(timeout_s=20.0)
    wait(compiler, compiler.ask(DIGITS))
    stop(worker_pid(compiler))
    lane = compiler._lanes[0]
    lane._limit_s, lane._patient = 0.5, None  # nobody takes over
    hung = compiler.ask(LETTERS)
    wait(compiler, hung)
    assert hung.failure is not None and "more than 0.5 s" in hung.failure.message


def test_what_is_too_slow_for_the_quick_lane_is_done_by_the_patient_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "QUICK_LIMIT_S", 0.002)
    compiler = make(timeout_s=20.0)
    slow = compiler.ask(GrammarSpec("regex", "|".join(f"word{i}[0-9]*x" for i in range(500))))
    wait(compiler, slow)
    assert slow.bound is not None, slow.failure
    assert compiler._lanes[1]._worker is not None


def test_what_has_waited_too_long_for_the_patient_lane_is_to_come_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "QUICK_LIMIT_S", 0.002)
    compiler = make(timeout_s=20.0)
    spec = GrammarSpec("regex", "|".join(f"word{i}[0-9]*x" for i in range(500)))
    with monkeypatch.context() as crowded:
        crowded.setattr(grammar_compiler, "MAX_WAIT_S", -1.0)
        late = compiler.ask(spec)
        wait(compiler, late)
    assert late.failure is not None and late.failure.kind == "EngineError"
    assert "busy" in late.failure.message and "again" in late.failure.message
    again = compiler.ask(spec)
    wait(compiler, again)
    assert again.bound is not None


def test_the_least_recently_used_are_forgotten_past_the_bound(make: Make) -> None:
    compiler = make(max_cached_bytes=3 * (ENTRY_BYTES + 2048))
    specs = [GrammarSpec("regex", f"{letter}+") for letter in "abcdefgh"]
    for spec in specs:
        wait(compiler, compiler.ask(spec), compiler.ask(specs[0]))
    describe = compiler.describe()
    assert describe["cached_bytes"] <= 3 * (ENTRY_BYTES + 2048)
    assert 1 < describe["num_cached"] < len(specs)
    num_hits = compiler.stats.num_hits
    compiler.ask(specs[0])
    assert compiler.stats.num_hits == num_hits + 1, "the one in use was forgotten"


def test_too_many_on_their_way_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_WAITING", 2)
    compiler = make()
    accepted = [compiler.ask(DIGITS), compiler.ask(LETTERS)]
    refused = compiler.ask(GrammarSpec("regex", "c"))
    assert refused.failure is not None and "later" in refused.failure.message
    wait(compiler, *accepted)
    assert not compiler.ask(GrammarSpec("regex", "c")).is_done


def chain(length: int) -> GrammarSpec:
    """Rules one within the other: llguidance takes a frame of its stack for each."""
    links = [f'r{i}: "a" r{i + 1} "b"' for i in range(length)]
    return GrammarSpec("ebnf", "\n".join(["start: r0", *links, f'r{length}: "c"']))


def nested(levels: int) -> list[GrammarSpec]:
    """What nests in each kind of source."""
    parens = "(" * levels, ")" * levels
    schema = '{"items":' * levels + "true" + "}" * levels
    tag = '{"triggers":["<"],"structures":[{"begin":"<a>","schema":%s,"end":"</a>"}]}'
    return [
        chain(levels),
        GrammarSpec("ebnf", f'start: {parens[0]}"a"{parens[1]}'),
        GrammarSpec("ebnf", f"start: /{parens[0]}a{parens[1]}/"),
        GrammarSpec("ebnf", f'root ::= {parens[0]}"a"{parens[1]}'),
        GrammarSpec("regex", f"{parens[0]}a{parens[1]}"),
        GrammarSpec("json_schema", schema),
        GrammarSpec("structural_tag", tag % schema),
    ]


def test_what_nests_too_deeply_is_refused_in_words(shared: GrammarCompiler) -> None:
    deep = shared.ask(chain(20_000))
    wait(shared, deep)
    assert deep.failure is not None and deep.failure.kind == "InvalidGrammar"
    assert "ebnf: nested too deeply" in deep.failure.message
    assert shared.ask(chain(20_000)) is deep


def test_no_depth_takes_the_engine_along_however_large_the_stacks_are() -> None:
    """Where stacks are unlimited a thread's is smaller than the main one's: what the worker could
    compile ended the process that bound it."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_compiler_service import *\n"
        "compiler = GrammarCompiler(vocabulary)\n"
        "specs = [spec for levels in (150, 1000) for spec in nested(levels)]\n"
        "asked = [compiler.ask(spec) for spec in specs]; wait(compiler, *asked)\n"
        "print(sum(pending.bound is not None for pending in asked)); compiler.close()"
    )
    most = resource.getrlimit(resource.RLIMIT_STACK)[1]
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (most, most)),
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1


def test_a_worker_ends_with_its_parent_however_that_dies(tmp_path: Path) -> None:
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_compiler_service import *\n"
        "compiler = GrammarCompiler(vocabulary); wait(compiler, compiler.ask(DIGITS))\n"
        "print(worker_pid(compiler), flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)], capture_output=True, text=True
    )
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_alive(pid)


def test_closing_ends_the_worker(make: Make) -> None:
    compiler = make()
    wait(compiler, compiler.ask(DIGITS))
    pid = worker_pid(compiler)
    compiler.close()
    assert not _is_alive(pid)


def test_closing_leaves_what_still_waits(make: Make) -> None:
    compiler = make()
    wait(compiler, compiler.ask(DIGITS))
    stop(worker_pid(compiler))
    for letter in "abcdefgh":
        compiler.ask(GrammarSpec("regex", letter))
    while compiler._lanes[0]._queue.qsize() == 8:
        time.sleep(0.001)
    begun = time.monotonic()
    compiler.close()
    assert time.monotonic() - begun < 3.0  # 0.4 on a machine of its own; one worker alone takes 0.5
    assert compiler._lanes[0]._queue.qsize() >= 7
    thread = compiler._lanes[0]._thread
    assert thread is not None and not thread.is_alive()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
