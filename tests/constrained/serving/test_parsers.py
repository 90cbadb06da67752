"""Grammars followed in other processes: what they say, and whatever becomes of those processes."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from grammars import ids_of
from random_ebnf import random_ebnf
from waiting import ready

from stemma.constrained.compiler import compile_grammar
from stemma.constrained.lark import json_to_lark
from stemma.constrained.schema.schema_grammar import schema_grammar
from stemma.constrained.serving import host_process, parser_host
from stemma.constrained.serving import parsers as parsers_module
from stemma.constrained.serving.compiler_service import GrammarCompiler
from stemma.constrained.serving.follower import Follower
from stemma.constrained.serving.grammar_state import PendingGrammar
from stemma.constrained.serving.host_process import HostProcess
from stemma.constrained.serving.positions import Channel
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.vocabulary import single_bytes

BYTES = single_bytes()
# Bytes are forced without end: between them a greedy A leaves nothing to B.
ENDLESS = GrammarSpec("ebnf", 'start: "~" | /[A-Z]/ A B\nA: /a+/\nB: /ab/')
ANOTHER_ENDLESS = GrammarSpec("ebnf", 'start: "" | /[A-Z]/ A B\nA: /b+/\nB: /bc/')
NESTED = GrammarSpec("ebnf", 'start: "(" start ")" | "xyz" start | "end"')
NODE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kids": {"type": "array", "items": {"$ref": "#/$defs/n"}},
    },
    "required": ["name", "kids"],
}
# A schema's own grammar is followed here; this one is as a caller's.
TREE = GrammarSpec(
    "ebnf", json_to_lark(schema_grammar({"$ref": "#/$defs/n", "$defs": {"n": NODE}}).grammar)
)
ANY_OBJECT = GrammarSpec("ebnf", json_to_lark(schema_grammar({"type": "object"}).grammar))
HANG_TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(single_bytes, timeout_s=60.0)
    yield compiler
    compiler.close()


def wait(compiler: GrammarCompiler, is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_TIMEOUT_S
    while True:
        compiler.parsers.send()
        if is_there():
            return
        assert ready([compiler.fileno()], deadline - time.monotonic())
        compiler.collect()


def asked(compiler: GrammarCompiler, spec: GrammarSpec) -> PendingGrammar:
    """Compiled, or refused."""
    pending = compiler.ask(spec)
    wait(compiler, lambda: pending.is_done)
    return pending


def open_grammar(compiler: GrammarCompiler, spec: GrammarSpec) -> PendingGrammar:
    pending = asked(compiler, spec)
    assert pending.bound is not None, pending.failure
    return pending


def follow(compiler: GrammarCompiler, pending: PendingGrammar, text: bytes = b"") -> Follower:
    """An output that has taken this text."""
    output = pending.follower(True, frozenset())
    for byte in text:
        take(compiler, output, byte)
    return output


def take(compiler: GrammarCompiler, output: Follower, token: int) -> None:
    assert output.consume(token)
    settle(compiler, output)


def settle(compiler: GrammarCompiler, *outputs: Follower) -> None:
    """Wait until it is known where they stand."""
    wait(compiler, lambda: all(output.is_ready for output in outputs))


def allowed(output: Follower) -> set[int]:
    out = np.full(BYTES.num_words, 0xFFFFFFFF, np.uint32)
    output.mask(out)
    return ids_of(out)


def parsers_of(compiler: GrammarCompiler) -> list[int]:
    """Process ids of the parsers that have a grammar."""
    process = compiler.parsers._host._process
    assert process is not None
    return [pid for pid in children(process.pid) if name_of(pid) == parser_host.NAME]


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("spec", [TREE, NESTED, ANY_OBJECT], ids=["0", "1", "2"])
@pytest.mark.parametrize("jump_forward", [True, False])
def test_an_output_is_told_what_a_matcher_here_says(
    compiler: GrammarCompiler, spec: GrammarSpec, jump_forward: bool
) -> None:
    pending = open_grammar(compiler, spec)
    local = PendingGrammar(bound=compile_grammar(spec).bind(BYTES))
    rng = np.random.default_rng(4)
    for _ in range(3):
        here = local.follower(jump_forward, frozenset({0}))
        there = pending.follower(jump_forward, frozenset({0}))
        for _ in range(30):
            settle(compiler, there)
            while run := here.forced_run():
                assert tuple(run) == tuple(there.forced_run()[: len(run)])
                assert all(here.consume(token) and there.consume(token) for token in run)
                settle(compiler, there)
            mine = allowed(here)
            assert allowed(there) == mine and there.error is None
            assert there.is_finished == here.is_finished
            mine -= {0}  # which stops the output
            if not mine:
                break
            token = int(rng.choice(sorted(mine)))
            assert here.consume(token) and there.consume(token)
        there.close()


@pytest.mark.parametrize("spec", [TREE, NESTED, ANY_OBJECT], ids=["0", "1", "2"])
def test_what_was_expected_is_known_ahead(compiler: GrammarCompiler, spec: GrammarSpec) -> None:
    """Each position of the way is that of a matcher here, ahead and once it is gone; of other
    tokens nothing is known."""
    pending = open_grammar(compiler, spec)
    local = PendingGrammar(bound=compile_grammar(spec).bind(BYTES))
    rng, num_told = np.random.default_rng(6), 0
    for _ in range(4):
        here = local.follower(True, frozenset())
        there = pending.follower(True, frozenset())
        for _ in range(12):
            settle(compiler, there)
            while run := there.forced_run():
                assert all(here.consume(token) and there.consume(token) for token in run)
                settle(compiler, there)
            if there.is_finished:
                break
            token = int(rng.choice(sorted(allowed(here))))
            assert here.consume(token) and there.consume(token)
            if there.is_ready:  # it was told ahead
                continue
            walk = here.fork()
            guess = []
            for _ in range(rng.integers(1, 5)):
                guess += (run := walk.forced_run())
                assert all(map(walk.consume, run))
                if walk.is_finished:
                    break
                guess.append(int(rng.choice(sorted(allowed(walk)))))
                assert walk.consume(guess[-1])
            there.expect([*guess, 255, 255])
            settle(compiler, there)
            ahead, mine = there.look_ahead(), here.fork()
            for token in guess if ahead is not None else ():
                num_told += 1
                assert ahead.consume(token) and mine.consume(token)
                if not ahead.forced_run():
                    assert ahead.is_finished == mine.is_finished
                    assert mine.is_finished or allowed(ahead) == allowed(mine)
            assert ahead is None or not ahead.consume(255)
        there.close()
    assert num_told


def test_a_guess_over_which_the_parser_ends_harms_nobody(compiler: GrammarCompiler) -> None:
    grammar = GrammarSpec("ebnf", 'start: ("x" | "y") ("~" | /[A-Z]/ A B)\nA: /a+/\nB: /ab/\n')
    pending = open_grammar(compiler, grammar)
    parser = parsers_of(compiler)[-1]
    for number in range(parsers_module.MAX_FAILED_OUTPUTS + 2):
        output = pending.follower(True, frozenset())
        assert output.consume(ord("x")) and not output.is_ready
        output.expect([ord("Q"), ord("a")])
        settle(compiler, output)
        has_ended = not is_alive(parser)
        assert has_ended == (number < parsers_module.MAX_FAILED_GUESSES), "then it guesses no more"
        parser = parsers_of(compiler)[-1]
        assert output.error is None and output.look_ahead() is None
        take(compiler, output, ord("~"))
        assert output.is_finished and output.error is None


def test_forks_stand_where_a_matcher_here_does(compiler: GrammarCompiler) -> None:
    """Also behind the death of their process: another one follows all of their tokens again."""
    spec = GrammarSpec("json_object")
    pending = open_grammar(compiler, spec)
    local = PendingGrammar(bound=compile_grammar(spec).bind(BYTES))
    rng = np.random.default_rng(5)
    here = local.follower(False, frozenset())
    there = pending.follower(False, frozenset())
    for number, token in enumerate(b'{"ab":[1,{"c":"d"},2],"e":true}'):
        mine = sorted(allowed(here))
        forks = [
            (here.fork(), there.fork(), taken)
            for taken in (int(rng.choice(mine)), token, int(rng.choice(mine)))
        ]
        for ours, theirs, taken in forks:
            assert ours.consume(taken) and theirs.consume(taken)
        settle(compiler, *(theirs for _, theirs, _ in forks))
        for ours, theirs, _ in forks:
            assert allowed(theirs) == allowed(ours) and theirs.error is None
            assert theirs.is_finished == ours.is_finished
        there.close()
        forks[0][1].close()
        forks[2][1].close()
        here, there, _ = forks[1]
        if number == 20:
            os.kill(parsers_of(compiler)[-1], signal.SIGKILL)
    assert there.is_finished


def test_a_fork_begins_where_it_was_made_however_far_its_origin_has_gone(
    compiler: GrammarCompiler,
) -> None:
    pending = open_grammar(compiler, NESTED)
    origin = follow(compiler, pending, b"(")
    fork = origin.fork()
    take(compiler, origin, ord("("))
    take(compiler, fork, ord("x"))
    assert allowed(fork) == allowed(follow(compiler, pending, b"(x")) and fork.error is None


def test_a_token_that_is_not_allowed_is_refused_and_changes_nothing(
    compiler: GrammarCompiler,
) -> None:
    output = follow(compiler, open_grammar(compiler, NESTED), b"(")
    assert not output.consume(ord("q")) and output.is_ready
    take(compiler, output, ord("x"))
    assert output.forced_run() == (ord("y"), ord("z")) and not output.consume(ord("z"))


def test_a_grammar_that_never_answers_is_an_error_of_its_output_alone(
    compiler: GrammarCompiler,
) -> None:
    endless, nested = open_grammar(compiler, ENDLESS), open_grammar(compiler, NESTED)
    stuck, ended = follow(compiler, endless), follow(compiler, endless, b"~")
    assert stuck.consume(ord("Q"))
    other = follow(compiler, nested)
    for _ in range(20):  # while the other process computes
        take(compiler, other, ord("("))
    settle(compiler, stuck)
    assert stuck.error is not None and "0.25 s of CPU time" in stuck.error
    assert not allowed(stuck) and not stuck.forced_run() and not stuck.is_finished
    assert ended.is_finished and ended.error is None and other.error is None
    assert follow(compiler, endless, b"~").is_finished


def test_a_grammar_whose_outputs_never_answer_is_given_up(compiler: GrammarCompiler) -> None:
    endless = open_grammar(compiler, ANOTHER_ENDLESS)
    for _ in range(parsers_module.MAX_FAILED_OUTPUTS):
        assert follow(compiler, endless, b"Q").error is not None
    late = follow(compiler, endless)
    assert late.consume(ord("Q")) and late.is_ready and late.error is not None


@pytest.mark.parametrize("is_noticed", [False, True], ids=["at_once", "later"])
def test_outputs_go_on_when_their_process_is_killed(
    compiler: GrammarCompiler, is_noticed: bool
) -> None:
    nested = open_grammar(compiler, NESTED)
    first, second = follow(compiler, nested, b"(("), follow(compiler, nested, b"(")
    pids = parsers_of(compiler)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    if is_noticed:  # by the socket, which refuses what is sent next
        wait_for_end(pids)
    assert first.consume(ord("x")) and second.consume(ord("e"))
    settle(compiler, first, second)
    assert first.forced_run() == tuple(b"yz") and second.forced_run() == tuple(b"nd)")
    assert first.error is None and second.error is None


def test_a_host_that_was_killed_is_replaced(compiler: GrammarCompiler) -> None:
    nested = open_grammar(compiler, NESTED)
    output = follow(compiler, nested, b"(")
    pids = parsers_of(compiler)
    process = compiler.parsers._host._process
    assert process is not None
    process.kill()
    process.wait()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    take(compiler, output, ord("e"))
    assert output.forced_run() == tuple(b"nd)")


def test_a_host_that_was_stopped_is_replaced(compiler: GrammarCompiler) -> None:
    """Nobody but its parsers would wait for it, but these for ever."""
    nested = open_grammar(compiler, NESTED)
    process = compiler.parsers._host._process
    assert process is not None
    orphans = parsers_of(compiler)
    os.kill(process.pid, signal.SIGSTOP)
    open_grammar(compiler, GrammarSpec("ebnf", 'start: "<" start ">" | "y"'))
    wait_for_end([process.pid])
    for pid in orphans:  # so that `parsers_of` names all
        os.kill(pid, signal.SIGKILL)
    wait_for_end(orphans)
    assert follow(compiler, nested, b"(").error is None


def test_a_parser_that_was_stopped_is_replaced(compiler: GrammarCompiler) -> None:
    output = follow(compiler, open_grammar(compiler, NESTED), b"(")
    for pid in parsers_of(compiler):
        os.kill(pid, signal.SIGSTOP)
    take(compiler, output, ord("e"))
    assert output.forced_run() == tuple(b"nd)")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_parser_forked_ahead_may_end_before_it_is_needed(
    compiler: GrammarCompiler, number: signal.Signals
) -> None:
    open_grammar(compiler, NESTED)
    process = compiler.parsers._host._process
    assert process is not None
    deadline = time.monotonic() + HANG_TIMEOUT_S
    while not (ahead := [p for p in children(process.pid) if name_of(p) == parser_host.NEXT_NAME]):
        assert time.monotonic() < deadline
    for pid in ahead:
        os.kill(pid, number)
    wait_for_end(ahead)
    other = open_grammar(compiler, GrammarSpec("ebnf", 'start: "<" start ">" | "y"'))
    assert follow(compiler, other, b"<").error is None
    assert set(ahead).isdisjoint(parsers_of(compiler))


def test_being_killed_from_outside_never_counts_against_a_grammar(
    compiler: GrammarCompiler,
) -> None:
    nested = open_grammar(compiler, NESTED)
    for _ in range(2 * parsers_module.MAX_LOSSES * parsers_module.MAX_FAILED_OUTPUTS):
        output = follow(compiler, nested)
        killed = parsers_of(compiler)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait_for_end(killed)
        assert output.consume(ord("("))
        compiler.parsers.send()
        for pid in parsers_of(compiler):
            os.kill(pid, signal.SIGKILL)
        settle(compiler, output)
        output.close()
    take(compiler, follow(compiler, nested), ord("("))


@pytest.mark.parametrize("number", [signal.SIGPROF, signal.SIGKILL])
def test_the_host_tells_how_a_process_has_ended(
    compiler: GrammarCompiler, number: signal.Signals
) -> None:
    open_grammar(compiler, NESTED)
    host, before = compiler.parsers._host, set(parsers_of(compiler))
    channel = host.fork()
    deadline = time.monotonic() + HANG_TIMEOUT_S
    while not (forked := set(parsers_of(compiler)) - before):
        assert time.monotonic() < deadline
    os.kill(forked.pop(), number)
    assert ready([channel], HANG_TIMEOUT_S)
    with pytest.raises(EOFError):
        channel.receive()
    assert host.ending_of(channel.number) == -number
    channel.close()


@pytest.mark.parametrize(
    ("ending", "kind", "is_remembered"),
    [
        (-signal.SIGPROF, "InvalidGrammar", True),
        (-signal.SIGSEGV, "InvalidGrammar", True),
        (-signal.SIGKILL, "EngineError", False),
        (None, "EngineError", False),
        ("no processes left", "EngineError", False),
    ],
)
def test_only_a_limit_that_ends_a_process_as_it_opens_is_remembered(
    compiler: GrammarCompiler,
    monkeypatch: pytest.MonkeyPatch,
    ending: int | str | None,
    kind: str,
    is_remembered: bool,
) -> None:
    spec = GrammarSpec("ebnf", f'start: "{ending}" start | "x"')
    with monkeypatch.context() as lost:
        lost.setattr(HostProcess, "fork", lambda _: dead_channel())
        lost.setattr(HostProcess, "ending_of", lambda *_: ending)
        failure = asked(compiler, spec).failure
    assert failure is not None and failure.kind == kind
    assert (asked(compiler, spec).failure is failure) == is_remembered


def dead_channel() -> Channel:
    ours, theirs = socket.socketpair()
    theirs.close()
    return Channel(ours, 0)


def test_without_descriptors_an_output_fails_and_its_grammar_does_not(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    nested = open_grammar(compiler, NESTED)
    outputs = [follow(compiler, nested) for _ in range(parsers_module.MAX_FAILED_OUTPUTS)]
    pids = parsers_of(compiler)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for_end(pids)

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as exhausted:
        exhausted.setattr("socket.socketpair", refuse)
        for output in outputs:
            take(compiler, output, ord("("))
            assert output.error is not None and "Too many open files" in output.error
    output = follow(compiler, nested, b"(")
    assert output.error is None


def test_other_grammars_do_not_wait_for_one_that_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = GrammarCompiler(single_bytes, timeout_s=60.0)
    ours, silent = socket.socketpair()
    monkeypatch.setattr(HostProcess, "fork", lambda _: Channel(ours, 0))
    opening = compiler.ask(NESTED)
    wait(compiler, lambda: len(compiler.parsers) == 1)
    assert asked(compiler, GrammarSpec("regex", "[0-9]+")).bound is not None
    assert not opening.is_done
    compiler.close()
    silent.close()


def test_a_host_is_started_with_one_vocabulary_and_off_the_engines_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pickled_in: list[int] = []
    started_in: list[int] = []
    pickled, started = host_process._pickled, HostProcess._started
    monkeypatch.setattr(
        host_process, "_pickled", lambda v: pickled_in.append(threading.get_ident()) or pickled(v)
    )
    monkeypatch.setattr(
        HostProcess, "_started", lambda h: started_in.append(threading.get_ident()) or started(h)
    )
    compiler = GrammarCompiler(single_bytes, timeout_s=60.0)
    output = follow(compiler, open_grammar(compiler, NESTED))
    process = compiler.parsers._host._process
    assert process is not None
    pids = parsers_of(compiler)
    for pid in (process.pid, *pids):
        os.kill(pid, signal.SIGKILL)
    wait_for_end([process.pid, *pids])
    take(compiler, output, ord("e"))
    assert output.forced_run() == tuple(b"nd")
    compiler.close()
    assert len(pickled_in) == 1 and len(started_in) == 2
    assert threading.get_ident() not in pickled_in + started_in


def test_the_least_recently_used_processes_are_ended_and_come_back(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsers_module, "MAX_PARSERS", 2)
    grammars = [open_grammar(compiler, GrammarSpec("ebnf", f'start: "{c}" "x"+')) for c in "abcd"]
    outputs = [follow(compiler, grammar) for grammar in grammars]
    assert len(compiler.parsers) == 2
    for output in outputs * 2:
        for token in output.forced_run():
            assert output.consume(token)
        take(compiler, output, ord("x"))
        assert len(compiler.parsers) <= 2 and allowed(output) == {ord("x")}


def test_processes_beyond_the_limit_end_when_they_are_idle_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many were busy at once, and with no traffic after."""
    monkeypatch.setattr(parsers_module, "MAX_PARSERS", 2)
    specs = [GrammarSpec("ebnf", f'start: "{c}" start ")" | "y"') for c in "abcdef"]
    outputs = [follow(compiler, open_grammar(compiler, spec)) for spec in specs]
    for output in outputs:
        assert output.consume(ord("y"))
    compiler.parsers.send()
    assert len(compiler.parsers) == len(outputs)
    settle(compiler, *outputs)
    assert len(compiler.parsers) == 2


def test_closing_does_not_wait_for_a_parser_and_leaves_no_process() -> None:
    compiler = GrammarCompiler(single_bytes, timeout_s=60.0)
    output = follow(compiler, open_grammar(compiler, ENDLESS))
    assert output.consume(ord("Q"))
    compiler.parsers.send()
    process = compiler.parsers._host._process
    assert process is not None
    pids = [process.pid, *parsers_of(compiler)]
    compiler.close()
    wait_for_end(pids)


def test_closing_leaves_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    compiler = GrammarCompiler(single_bytes, timeout_s=60.0)
    follow(compiler, open_grammar(compiler, NESTED))
    compiler.ask(TREE)
    compiler.close()
    compiler.close()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_processes_end_with_their_parent_however_that_dies() -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from test_parsers import *\n"
        "compiler = GrammarCompiler(single_bytes, timeout_s=60.0)\n"
        "output = follow(compiler, open_grammar(compiler, ENDLESS)); output.consume(ord('Q'))\n"
        "compiler.parsers.send()\n"
        "print(compiler.parsers._host._process.pid, *parsers_of(compiler), flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    here = Path(__file__).parent
    folders = [str(here), str(here.parents[1] / "support")]
    done = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True)
    assert len(done.stdout.split()) == 2, done.stderr
    wait_for_end([int(pid) for pid in done.stdout.split()])


def wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + HANG_TIMEOUT_S
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.01)


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 5_000), marks=pytest.mark.slow)], ids=str
)
def test_no_grammar_keeps_an_output_waiting(seeds: range) -> None:
    """Random small grammars, each followed for some tokens: an answer, a refusal or an error."""
    compiler = GrammarCompiler(single_bytes)
    num_followed = 0
    for seed in seeds:
        pending = asked(compiler, GrammarSpec("ebnf", random_ebnf(seed)))
        if pending.failure is None:
            walk(compiler, pending, np.random.default_rng(seed))
            num_followed += 1
    compiler.close()
    assert num_followed > len(seeds) / 2


def walk(compiler: GrammarCompiler, pending: PendingGrammar, rng: np.random.Generator) -> None:
    """Follow a grammar for at most 12 tokens of the walk's choice, and what they force."""
    output = pending.follower(True, frozenset())
    for _ in range(12):
        while run := output.forced_run():
            assert all(map(output.consume, run))
            settle(compiler, output)
        if output.error is not None or output.is_finished:
            break
        take(compiler, output, int(rng.choice(sorted(allowed(output)))))
    output.close()
