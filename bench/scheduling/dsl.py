"""DSL overhead: CPU time of the client a program and an op, by itself and with an engine behind it.

By itself the ops go to a channel that answers at once, so what is counted is the DSL: building
expressions, making ops, binding names. With an engine (a process of its own, on the embedded model)
the connection's thread is counted too: encoding, sending, receiving. Times are CPU time of this
process, all threads, the least of `--repeats` runs: other work on the machine only adds to it.
With `--sglang PATH` SGLang's interpreter runs the same programs against a backend that answers at
once.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import InvalidRequest
from ...flags import count
from ...frontend.backend import Engine
from ...frontend.client.backend import Backend
from ...frontend.client.channel import EventSink
from ...frontend.dsl.function import Function, function
from ...frontend.dsl.generation import gen
from ...frontend.dsl.state import ProgramState
from ...frontend.protocol import ir, wire
from ..harness.report import write_report

TARGETS_US = {"a program of one gen": 30.0, "a text": 10.0, "a gen": 10.0}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags: counts, and the comparison."""
    parser.add_argument("--programs", type=count, default=1000, help="in a batch (%(default)s)")
    parser.add_argument("--ops", type=count, default=1000, help="on one branch (%(default)s)")
    parser.add_argument("--repeats", type=count, default=5, help="runs of each (%(default)s)")
    parser.add_argument("--no-engine", action="store_true", help="only by itself")
    parser.add_argument("--sglang", type=Path, metavar="PATH", help="folder with SGLang's package")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    rows = list(_rows("stemma, no engine", Backend(_AnsweringChannel()), args))
    if not args.no_engine:
        with Engine() as engine:
            rows += _rows("stemma, engine", engine, args)
    if args.sglang is not None:
        rows += _sglang_rows(args)
    write_report("dsl", rows, args)
    return 0


@function
def one_gen(s: ProgramState, question: str) -> None:
    """The program of the batch."""
    s += "Q: " + question + " A:"
    s += gen("answer", max_tokens=1, temperature=0)


@function
def texts(s: ProgramState, num_ops: int) -> None:
    """Only texts."""
    for _ in range(num_ops):
        s += "some words "


@function
def gens(s: ProgramState, num_ops: int) -> None:
    """Many gens on one branch."""
    s += "Q:"
    for index in range(num_ops):
        s += gen(f"x{index}", max_tokens=1, temperature=0)


def _rows(what: str, backend: Backend, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    def batch(num: int) -> None:
        one_gen.run_batch([{"question": str(i)} for i in range(num)], backend=backend)

    def single(fn: Function) -> Callable[[int], object]:
        return lambda num: fn.run(num_ops=num, backend=backend)

    yield _row(what, "a program of one gen", batch, args.programs, args.repeats)
    yield _row(what, "a text", single(texts), args.ops, args.repeats)
    if isinstance(backend.channel, _AnsweringChannel):
        yield _row(what, "a gen", single(gens), args.ops, args.repeats)
    else:  # each is its own message; the embedded model's context has room for no more
        yield _row(what, "a gen behind a gen", single(gens), min(args.ops, 500), args.repeats)


def _row(
    what: str, unit: str, run: Callable[[int], object], num: int, repeats: int
) -> dict[str, Any]:
    run(min(num, 50))  # loads or builds what is needed only once
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run(num)
        times.append((time.process_time() - start) / num * 1e6)
    times.sort()
    return {
        "client": what,
        "unit": unit,
        "number": num,
        "cpu_us_min": times[0],
        "cpu_us_median": times[len(times) // 2],
        "target_us": TARGETS_US.get(unit) if what.startswith("stemma") else None,
    }


class _AnsweringChannel:
    """Completes every op as it is sent, on the sender's thread."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._sinks: dict[int, EventSink] = {}
        self.info: dict[str, Any] = {"model": "none"}

    def open_program(self, sink: EventSink, create: dict[str, object]) -> int:
        program = next(self._ids)
        self._sinks[program] = sink
        return program

    def send_op(self, program: int, op: ir.Op) -> None:
        if isinstance(op, ir.Gen):
            payload = {"value": "x", "text": "x", "meta": {}}
            self._sinks[program].handle_event(op.branch, op.seq, wire.VALUE, payload)

    def flush(self, program: int, *, end: bool = False) -> None:
        if end:
            self._sinks.pop(program).handle_event(0, 0, wire.DONE, None)

    def close_program(self, program: int) -> None:
        self._sinks.pop(program, None)

    def call_soon(self, work: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        pass


def _sglang_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """SGLang's interpreter, without the rest of its package, which needs GPU libraries."""
    package = ModuleType("sglang")
    package.__path__ = [str(args.sglang / "sglang")]
    sys.modules["sglang"] = package
    try:
        from sglang.lang.api import function as sgl_function  # type: ignore[import-not-found]
        from sglang.lang.api import gen as sgl_gen
        from sglang.lang.backend.base_backend import BaseBackend  # type: ignore[import-not-found]
        from sglang.lang.chat_template import get_chat_template  # type: ignore[import-not-found]
    except ImportError as error:
        allowed = f"a folder with SGLang's package, and what that imports installed ({error})"
        raise InvalidRequest.of("sglang", str(args.sglang), allowed) from error

    class Answering(BaseBackend):  # type: ignore[misc]
        def get_chat_template(self) -> Any:
            return get_chat_template("default")

        def generate(self, s: Any, sampling_params: Any) -> tuple[str, dict[str, Any]]:
            return "x", {}

    backend = Answering()

    @sgl_function  # type: ignore[untyped-decorator]
    def program(s: Any, question: str) -> None:
        s += "Q: " + question + " A:"
        s += sgl_gen("answer", max_tokens=1, temperature=0)

    @sgl_function  # type: ignore[untyped-decorator]
    def many(s: Any, num_ops: int, has_gens: bool) -> None:
        for index in range(num_ops):
            s += sgl_gen(f"x{index}", max_tokens=1, temperature=0) if has_gens else "some words "

    def batch(num: int) -> None:
        program.run_batch([{"question": str(i)} for i in range(num)], backend=backend)

    def single(has_gens: bool) -> Callable[[int], object]:
        return lambda num: many.run(num_ops=num, has_gens=has_gens, backend=backend).sync()

    what = "sglang, no engine"
    yield _row(what, "a program of one gen", batch, args.programs, args.repeats)
    yield _row(what, "a text", single(False), args.ops, args.repeats)
    yield _row(what, "a gen", single(True), args.ops, args.repeats)
