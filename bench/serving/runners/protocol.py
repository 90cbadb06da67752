"""What a driver and an engine's runner say to each other: one JSON object a line, over pipes.

    runner -> driver    {"engine", "version", "mode"}              once, when the engine is ready
    driver -> runner    {"op": "load", "path", "repeat"}           read and rotate a workload
    driver -> runner    {"op": "run"}                              carry it out
    driver -> runner    {"op": "log"}                              the same, and log each step

Each is answered by one line: `{}` to load, an `Outcome`'s fields to run, `{"steps": [...]}` to log,
of engines whose `has_log` is true (runtime/schedule/step_log.py), or `{"error": text}`. A
workload under a schema is answered with its outputs, which the driver judges. The runner ends when
its standard input closes. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol, TextIO, runtime_checkable

from ...harness.descendants import (
    GRACE_S,
    INTERRUPTS,
    become_subreaper,
    end_descendants,
    end_with_parent,
    killing_after,
)
from ...harness.process_meter import process_tree
from ...harness.workloads import PromptBook, Workload


class Runner(Protocol):
    """An engine that has loaded its model."""

    engine: str
    version: str
    mode: str  # "offline" or "http"

    def run(self, workload: Workload) -> PromptBook:
        """Run all requests, greedily and under the workload's schema if it has one; returns prompts
        and outputs by request."""

    def close(self) -> None:
        """End the engine."""


@runtime_checkable
class LoggingRunner(Protocol):
    """One whose engine tells of its steps."""

    def log(self, workload: Workload) -> list[dict[str, Any]]:
        """Run the workload; returns its steps, as runtime/schedule/step_log.py has them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a workload. Equal `output_sha` means equal tokens; `outputs`, in the order of
    the requests' ids, are set if the workload has a schema."""

    wall_s: float
    prompt_tokens: int
    output_tokens: int
    output_sha: str
    outputs: list[list[int]] | None = None


def main(start: Callable[[argparse.Namespace], Runner]) -> int:
    """A runner's process: flags, then lines until standard input closes."""
    parser = argparse.ArgumentParser(prog="runner", allow_abbrev=False)
    add = parser.add_argument
    add("--model", help="checkpoint folder or file")
    add("--program", help="path of the engine's own program")
    add("--url", help="of a running server")
    add("--threads", type=int)
    add("--kv-tokens", type=int, help="capacity of the KV cache")
    add("--dtype", help="of weights and KV, as the engine names it (default: bfloat16)")
    add("--speculate", help="kind of drafts, as the engine names them (default: its own)")
    add("--draft-model", help="checkpoint that guesses (default: none)")
    args = parser.parse_args()
    become_subreaper()  # of an engine's processes, all of which end with this one
    end_with_parent()
    try:
        _run(start, args)
    finally:
        end_descendants()
    return 0


def _run(start: Callable[[argparse.Namespace], Runner], args: argparse.Namespace) -> None:
    replies = _take_stdout()
    for number in INTERRUPTS:
        signal.signal(number, lambda *_: sys.exit(1))  # ends what is being started
    runner = start(args)
    for number in INTERRUPTS:
        signal.signal(number, lambda *_: _abandon(runner))
    try:
        has_log = isinstance(runner, LoggingRunner)
        welcome = {"engine": runner.engine, "version": runner.version, "mode": runner.mode}
        _reply(replies, {**welcome, "has_log": has_log})
        _serve(runner, replies)
    finally:
        _ignore_interrupts()
        runner.close()


def _ignore_interrupts() -> None:
    """From here on all ends anyhow. NOTE: where the parent dies its pipe ends and the signal of its
    death comes: handled amid `runner.close()` it would wait for the lock of that one's `wait`."""
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)


def _abandon(runner: Runner) -> NoReturn:
    """Exit in the middle of a workload, without waiting for threads that wait for the engine."""
    _ignore_interrupts()
    with killing_after(GRACE_S, process_tree(os.getpid())[1:]):
        runner.close()
    end_descendants()
    os._exit(1)


def _take_stdout() -> TextIO:
    """The pipe to the driver; an engine's own prints go to stderr instead."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return replies


def _serve(runner: Runner, replies: TextIO) -> None:
    workload: Workload | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["op"] == "load":
                read = Workload.from_json(Path(request["path"]).read_text())
                workload = read.rotated(request["repeat"])
                _reply(replies, {})
            elif request["op"] == "log":
                assert isinstance(runner, LoggingRunner), f"{runner.engine} has no log"
                assert workload is not None, "log before load"
                _reply(replies, {"steps": runner.log(workload)})
            else:
                assert workload is not None, "run before load"
                _reply(replies, asdict(_carry_out(runner, workload)))
        except Exception as error:  # an engine's own, of any kind: the driver reports it
            _reply(replies, {"error": f"{type(error).__name__}: {error}"})


def _carry_out(runner: Runner, workload: Workload) -> Outcome:
    started = time.perf_counter()
    book = runner.run(workload)
    wall_s = time.perf_counter() - started
    outputs = [book.outputs[item.id] for item in sorted(workload.requests, key=lambda r: r.id)]
    return Outcome(
        wall_s=wall_s,
        prompt_tokens=sum(map(len, book.prompts.values())),
        output_tokens=sum(map(len, outputs)),
        output_sha=hashlib.sha256(json.dumps(outputs).encode()).hexdigest()[:12],
        outputs=None if workload.json_schema is None else outputs,
    )


def _reply(replies: TextIO, fields: dict[str, Any]) -> None:
    print(json.dumps(fields), file=replies, flush=True)
