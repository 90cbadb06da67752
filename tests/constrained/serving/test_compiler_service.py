"""Grammars compiled in another process: once, within limits, and whatever becomes of it."""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from stemma import piped_process
from stemma.constrained.fsm import FsmGrammar
from stemma.constrained.serving import compiler_service as grammar_compiler
from stemma.constrained.serving import worker_process
from stemma.constrained.serving.compiler_service import ENTRY_BYTES, GrammarCompiler
from stemma.constrained.serving.follower import Follower
from stemma.constrained.serving.grammar_state import PendingGrammar
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.vocabulary import single_bytes

Make = Callable[..., GrammarCompiler]
DIGITS = GrammarSpec("regex", "[0-9]{3}")
LETTERS = GrammarSpec("regex", "[a-z]{3}")
LONG = GrammarSpec("ebnf", f'start: "a" // {"a" * 200_000}')


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """On a slow machine what is quick may take the quick lane's 0.5 s, and another worker then."""
    monkeypatch.setattr(grammar_compiler, "QUICK_LIMIT_S", 20.0)
    made: list[GrammarCompiler] = []

    def make_one(**options: float | str) -> GrammarCompiler:
        made.append(GrammarCompiler(single_bytes, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make_one
    for compiler in made:
        compiler.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[GrammarCompiler]:
    """For tests that leave it as good as new."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(grammar_compiler, "QUICK_LIMIT_S", 20.0)
        compiler = GrammarCompiler(single_bytes)
    yield compiler
    compiler.close()


def wait(compiler: GrammarCompiler, *pending: PendingGrammar) -> None:
    deadline = time.monotonic() + 120
    while not all(grammar.is_done for grammar in pending):
        poll = select.poll()  # the file is also run without the folder of `waiting`
        poll.register(compiler.fileno(), select.POLLIN)
        assert poll.poll(1000 * max(0.0, deadline - time.monotonic()))
        compiler.collect()


def stop(pid: int) -> None:
    """Stop a process, all its threads: one may run on for a while after the signal."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def slow_spec(number: int) -> GrammarSpec:
    """One of many that take a worker about 0.2 s."""
    words = (f"[ab]*a[ab]{{12}}x{i}y{number}" for i in range(60))
    return GrammarSpec("regex", "|".join(words))


def stop_at_work(compiler: GrammarCompiler, pid: int) -> None:
    """Stop a worker in the midst of a grammar, or after it."""
    before = cpu_ticks(pid)
    while cpu_ticks(pid) < before + 2 and not compiler.is_ready:
        time.sleep(0.001)
    stop(pid)


def cpu_ticks(pid: int) -> int:
    """CPU time of a process, mostly in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def worker_pid(compiler: GrammarCompiler, lane: int = 0) -> int:
    worker = compiler._lanes[lane]._worker
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
        ('{"type":"integer","multipleOf":12345}', "json_schema: /: multipleOf"),
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


@pytest.mark.parametrize("verb", ["subprocess.Popen", "os.setpriority"])
def test_a_lane_outlives_a_system_without_processes_or_descriptors(
    make: Make, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    compiler = make()
    checked: list[tuple[str, ...]] = []

    def check() -> None:
        compiler.validate("{}", "1", checked.append)
        outcomes(compiler, 1)

    check()
    with monkeypatch.context() as exhausted:

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

        exhausted.setattr(verb, refuse)
        os.kill(worker_pid(compiler, 1), signal.SIGKILL)
        check()
    check()
    assert checked[0] == checked[2] == () and "process" in checked[1][0]


def test_where_no_thread_can_be_started_that_is_said_and_the_next_one_tries_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = make()
    checked: list[tuple[str, ...]] = []
    with monkeypatch.context() as exhausted:

        def refuse(*_: object) -> threading.Thread:
            raise RuntimeError("can't start new thread")

        exhausted.setattr(grammar_compiler, "start_thread", refuse)
        lost = compiler.ask(DIGITS)
        compiler.validate("{}", "1", checked.append)
        wait(compiler, lost)
    assert lost.failure is not None and lost.failure.kind == "EngineError"
    assert "can't start new thread" in lost.failure.message and "thread" in checked[0][0]
    again = compiler.ask(DIGITS)
    wait(compiler, again)
    assert again.bound is not None


def test_what_takes_too_long_is_refused_by_the_workers_own_alarm(make: Make) -> None:
    compiler = make(timeout_s=0.002)
    slow = compiler.ask(slow_spec(0))
    wait(compiler, slow)
    assert slow.failure is not None and slow.failure.kind == "InvalidGrammar"
    assert "more than 0.002 s of CPU time" in slow.failure.message
    assert compiler.ask(slow_spec(0)) is slow


@pytest.mark.parametrize("spec", [LETTERS, LONG], ids=["short", "longer than a pipe holds"])
def test_a_worker_that_was_stopped_is_replaced_and_its_grammar_begun_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, spec: GrammarSpec
) -> None:
    monkeypatch.setattr(piped_process, "LOOK_S", 0.05)
    compiler = make(timeout_s=0.5)
    wait(compiler, compiler.ask(DIGITS))
    stopped = worker_pid(compiler)
    stop(stopped)
    pending, behind = compiler.ask(spec), compiler.ask(GrammarSpec("regex", "behind it"))
    wait(compiler, pending, behind)
    assert pending.bound is not None and behind.bound is not None, pending.failure
    assert not _is_alive(stopped)


def test_a_worker_without_time_to_run_is_given_up_and_nothing_is_remembered(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it is stopped, and nobody can see that."""
    compiler = make(timeout_s=0.05)
    wait(compiler, compiler.ask(DIGITS))
    with monkeypatch.context() as starved:
        starved.setattr(piped_process, "LOOK_S", 0.01)
        starved.setattr(worker_process, "WALL_LIMIT_S", 0.1)
        starved.setattr(piped_process.PipedProcess, "_is_stopped", lambda _: False)
        stop(worker_pid(compiler))
        late = compiler.ask(LETTERS)
        wait(compiler, late)
    assert late.failure is not None and late.failure.kind == "EngineError"
    assert "busy" in late.failure.message and "again" in late.failure.message
    again = compiler.ask(LETTERS)
    wait(compiler, again)
    assert again.bound is not None, again.failure


def test_time_in_which_the_worker_does_not_run_is_not_charged_to_the_grammar(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piped_process, "LOOK_S", 30.0)  # nobody sees that it is stopped
    compiler = make(timeout_s=1.0)
    compiler._lanes[0]._patient = None  # nobody takes over
    wait(compiler, compiler.ask(DIGITS))
    pid = worker_pid(compiler)
    for attempt in range(20):
        slow = compiler.ask(slow_spec(attempt))
        stop_at_work(compiler, pid)
        if not compiler.is_ready:  # else it was faster than the signal
            break
        os.kill(pid, signal.SIGCONT)
        wait(compiler, slow)
    time.sleep(1.5)
    os.kill(pid, signal.SIGCONT)
    wait(compiler, slow)
    assert slow.bound is not None, slow.failure


@pytest.mark.slow
def test_a_worker_that_is_paused_with_its_engine_goes_on_with_it() -> None:
    """For longer than its limit of wall time."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_compiler_service import *\n"
        "worker_process.WALL_LIMIT_S, piped_process.LOOK_S = 8.0, 2.0\n"
        "compiler = GrammarCompiler(single_bytes); wait(compiler, compiler.ask(DIGITS))\n"
        "pid = worker_pid(compiler); stop(pid); pending = compiler.ask(LETTERS)\n"
        "print(pid, flush=True); os.kill(os.getpid(), signal.SIGSTOP); wait(compiler, pending)\n"
        "print(pending.bound is not None and worker_pid(compiler) == pid); compiler.close()"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        os.waitid(os.P_PID, engine.pid, os.WSTOPPED | os.WNOWAIT)
        time.sleep(10.0)
        os.kill(pid, signal.SIGCONT)
        os.kill(engine.pid, signal.SIGCONT)
        assert engine.stdout.read() == "True\n"


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


def test_what_a_grammar_holds_is_counted_and_again_as_it_grows(make: Make) -> None:
    """An automaton by its tables, which are large from the start; a pattern whose forced runs are
    found as outputs follow it."""
    compiler = make()
    words = "|".join(f"{letter}-{letter * 500}" for letter in "abcdefgh")
    pending = compiler.ask(GrammarSpec("regex", words))
    wait(compiler, pending)
    assert isinstance(pending.bound, FsmGrammar)
    before = compiler.describe()["cached_bytes"]
    tables = pending.bound.dfa.transitions.nbytes
    assert tables > 10_000 and tables < before - ENTRY_BYTES < 2 * tables + len(words)
    for letter in "abcdefgh":
        matcher = pending.bound.matcher()
        assert matcher.consume(ord(letter)) and len(matcher.forced_tokens()) == 501
    compiler.ask(GrammarSpec("regex", words))
    assert compiler.describe()["cached_bytes"] > before + 8 * 501


def test_no_more_than_so_many_are_kept_however_small(make: Make) -> None:
    compiler = make(max_cached=3)
    wrong = [GrammarSpec("regex", f"({letter}") for letter in "abc"]
    for spec in [DIGITS, *wrong, LETTERS, DIGITS]:
        wait(compiler, compiler.ask(spec))
    assert compiler.describe()["num_cached"] == 3 and compiler.stats.num_compiled == 3


def test_too_many_on_their_way_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_WAITING", 4)
    compiler = make()
    accepted = [compiler.ask(DIGITS), compiler.ask(LETTERS)]
    refused = compiler.ask(GrammarSpec("regex", "c"))
    assert refused.failure is not None and "2 of them yours, and 4 may" in refused.failure.message
    wait(compiler, *accepted)
    assert not compiler.ask(GrammarSpec("regex", "c")).is_done


def test_one_tenant_cannot_take_all_that_may_wait(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_WAITING", 8)
    compiler = make()
    flood = [compiler.ask(spec, tenant="flood") for spec in plain_specs(8)]
    assert [pending.failure is not None for pending in flood] == 4 * [False] + 4 * [True]
    beside = compiler.ask(DIGITS, tenant="beside")
    wait(compiler, *flood, beside)
    assert beside.bound is not None, beside.failure
    assert not compiler.ask(LETTERS, tenant="flood").is_done, "what was given back is free again"


def test_a_tenants_grammar_waits_for_one_of_another_tenant_not_for_all(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piped_process, "LOOK_S", 30.0)  # nobody sees that it is stopped
    compiler = make()
    wait(compiler, compiler.ask(DIGITS))
    pid = worker_pid(compiler)
    stop(pid)
    for spec in plain_specs(10):
        compiler.ask(spec, tenant="flood")
    compiler.ask(LETTERS, tenant="beside")
    os.kill(pid, signal.SIGCONT)
    order = [outcome.entry.tenant for outcome in outcomes(compiler, 11)]  # type: ignore[attr-defined]
    assert order.index("beside") <= 2 and order.count("flood") == 10


def test_an_output_is_validated_after_one_of_another_tenant_not_after_all(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piped_process, "LOOK_S", 30.0)
    compiler = make()
    compiler.validate("{}", "1", lambda _: None)
    outcomes(compiler, 1)
    pid = worker_pid(compiler, 1)
    stop(pid)
    for _ in range(10):
        compiler.validate("{}", "1", lambda _: None, tenant="flood")
    compiler.validate("{}", "1", lambda _: None, tenant="beside")
    os.kill(pid, signal.SIGCONT)
    order = [checked.tenant for checked in outcomes(compiler, 11)]  # type: ignore[attr-defined]
    assert order.index("beside") <= 2 and order.count("flood") == 10


def outcomes(compiler: GrammarCompiler, num: int) -> list[object]:
    """In the order in which the lanes have come to them."""
    deadline = time.monotonic() + 120
    while len(compiler._outcomes) < num:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    in_order = list(compiler._outcomes)
    compiler.collect()
    return in_order


def plain_specs(num: int) -> list[GrammarSpec]:
    return [GrammarSpec("regex", f"plain {number}") for number in range(num)]


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
        "compiler = GrammarCompiler(single_bytes)\n"
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
        "compiler = GrammarCompiler(single_bytes); wait(compiler, compiler.ask(DIGITS))\n"
        "print(worker_pid(compiler), flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)], capture_output=True, text=True
    )
    pid = int(done.stdout)
    deadline = time.monotonic() + 120
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_alive(pid)


def test_a_lane_that_two_threads_start_at_once_has_one_thread(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's, to validate an output, and the quick lane's, for a slow grammar."""
    begun, begun_twice = threading.Event(), threading.Event()

    def start_thread(*_: object) -> threading.Thread:
        (begun_twice if begun.is_set() else begun).set()
        begun_twice.wait(0.2)
        return threading.Thread()

    with monkeypatch.context() as slow:
        slow.setattr(grammar_compiler, "start_thread", start_thread)
        lane = make()._lanes[1]
        threads = [threading.Thread(target=lane.start) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lane._thread = None  # never ran
    assert begun.is_set() and not begun_twice.is_set()


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
    while len(compiler._lanes[0]._queue) == 8:
        time.sleep(0.001)
    compiler.close()
    assert len(compiler._lanes[0]._queue) >= 7
    thread = compiler._lanes[0]._thread
    assert thread is not None and not thread.is_alive()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("backend", ["llguidance", "outlines"])
def test_another_backends_grammar_is_followed_in_a_process_of_its_own(
    make: Make, backend: str
) -> None:
    compiler = make(backend=backend)
    pending, refused = compiler.ask(DIGITS), compiler.ask(GrammarSpec("structural_tag", "{}"))
    wait(compiler, pending, refused)
    assert refused.failure is not None
    assert f"the grammar backend '{backend}' has no structural_tag" in refused.failure.message
    assert pending.bound is not None and pending.bound.path == backend
    output = pending.follower(False, frozenset({0}))
    for digit in b"123":
        ready(compiler, output)
        mask = np.zeros(8, np.uint32)
        output.mask(mask)
        assert [i for i in range(256) if mask[i // 32] >> (i % 32) & 1] == [*range(48, 58)]
        assert output.consume(digit)
    ready(compiler, output)
    assert output.is_finished
    output.close()
    counts = compiler.describe()
    assert counts["backend"] == backend and counts[f"num_{backend}"] == 1
    assert counts["num_compiled"] == 1 and counts["num_fsm"] == 0


def ready(compiler: GrammarCompiler, output: Follower) -> None:
    deadline = time.monotonic() + 120
    while not output.is_ready:
        assert time.monotonic() < deadline
        compiler.collect(0.01)
