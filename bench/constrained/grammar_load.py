"""Latency of ordinary requests with and without adversarial grammars among them, on a real engine.

One engine process, the public client. Ordinary requests arrive at random at a given rate, half of
them free, half under one of the flat schemas of `bench masks`; their latency runs from the time at
which they were due. Phases without and with 100 adversarial grammars, spread evenly, take turns;
no grammar comes twice, so that none is found in a cache. Each must be refused or carried out for
itself alone: `worst_s` is the longest that one of them took.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import StemmaError
from ...flags import count
from ...frontend.backend import Engine
from ...frontend.client.backend import Backend
from ...frontend.dsl.expr import tokens
from ...frontend.dsl.function import function
from ...frontend.dsl.generation import gen
from ...frontend.dsl.state import ProgramState
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ..harness.process_meter import peak_rss_bytes
from ..harness.report import console_progress, write_report
from .conformance import normalised
from .grammars import FLAT, grammar_cases
from .masks import percentile

NUM_THREADS = 128
PROMPT_TOKENS, MAX_TOKENS = 32, 48
VOCAB = (300, 4000)  # ids of prompts: no special tokens, no single bytes


@dataclass(slots=True)
class Phase:
    """The outcomes of the requests of one kind of phase."""

    latencies_s: list[float] = field(default_factory=list)
    num_failed: int = 0  # ordinary requests that failed: there must be none
    attacks_s: list[float] = field(default_factory=list)
    num_refused: int = 0  # adversarial requests that ended with an error
    errors: Counter[str] = field(default_factory=Counter)  # of both, normalised


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench grammar-load`."""
    add = parser.add_argument
    add("--model", type=Path, default=EMBEDDED_MODEL, help="checkpoint folder")
    add("--rate", type=float, default=10.0, help="ordinary requests a second")
    add("--seconds", type=float, default=20.0, help="of a phase (default: %(default)s)")
    add("--repeats", type=count, default=3, help="phases of each kind (default: %(default)s)")
    add("--attacks", type=int, default=100, help="adversarial grammars of a phase")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    phases = {"without": Phase(), "with": Phase()}
    attacks = adversarial_grammars()
    with Engine(args.model) as engine, console_progress() as progress:
        bar = progress.add_task("warm-up", total=2 * args.repeats)
        _run_phase(engine, Phase(), random.Random(-1), args.rate, args.seconds, [])
        before_mb = peak_rss_bytes(engine.pid) / 2**20
        for repeat in range(args.repeats):
            for name, phase in phases.items():
                progress.update(bar, description=name)
                some = [next(attacks) for _ in range(args.attacks)] if name == "with" else []
                rng = random.Random(f"{name} {repeat}")
                _run_phase(engine, phase, rng, args.rate, args.seconds, some)
                progress.advance(bar)
        after_mb = peak_rss_bytes(engine.pid) / 2**20
    base = percentile(phases["without"].latencies_s, 99)
    rows = [_row(name, phase, base) for name, phase in phases.items()]
    errors = {name: phase.errors for name, phase in phases.items()}
    peaks = {"before": before_mb, "after": after_mb}
    write_report("grammar_load", rows, args, errors=errors, peak_rss_mb=peaks)
    return 0


def adversarial_grammars() -> Iterator[dict[str, Any]]:
    """Arguments of `gen`, endless and all different."""
    number = 0
    while True:
        yield from ({name: source} for name, source in _round_of_attacks(number))
        number += 1


def _round_of_attacks(i: int) -> list[tuple[str, Any]]:
    """One of each kind; `i` makes them differ from another round's."""
    own = f"field_{i}"
    deep: dict[str, Any] = {"type": "integer", "minimum": i}
    for _ in range(100):
        deep = {"type": "array", "items": deep}
    cyclic = {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    }
    return [
        ("regex", f"(a{{{1000 + i}}}){{100}}"),
        ("regex", f"a{{{100_000 + i}}}"),
        ("regex", f"(a|b)*a(a|b){{20}}{own}"),
        ("regex", f"({own}"),
        ("regex", f"{own}[^\\x00-\\U0010ffff]"),
        ("json_schema", deep),
        ("json_schema", {"enum": [f"value {i} {n}" for n in range(5_000)]}),
        ("json_schema", {**cyclic, "title": own}),
        ("json_schema", {"$ref": f"http://example.invalid/{own}.json"}),
        ("json_schema", {"const": f"{own}\0"}),
        ("json_schema", json.dumps({"const": f"{own}\ud800"})),
        ("json_schema", {"type": "nonsense", "title": own}),
        ("json_schema", {"not": {}, "title": own}),
        ("ebnf", f'start: start "{own}" | "{own}"'),
    ]


# --- a phase -------------------------------------------------------------------------------------


@function
def _request(s: ProgramState, prompt: Sequence[int], options: dict[str, Any]) -> None:
    s += tokens(prompt)
    s += gen("out", max_tokens=MAX_TOKENS, temperature=0, **options)


def _run_phase(
    backend: Backend,
    phase: Phase,
    rng: random.Random,
    rate: float,
    seconds: float,
    attacks: Sequence[dict[str, Any]],
) -> None:
    """Send everything when it is due and wait for all results."""
    schemas = [case.schema for case in grammar_cases() if case.group == FLAT]
    lock = threading.Lock()

    def carry_out(options: dict[str, Any], prompt: list[int], due: float, is_attack: bool) -> None:
        message = None
        try:
            _request.run(prompt=prompt, options=options, backend=backend)
        except StemmaError as error:
            message = str(error)
        took_s = time.perf_counter() - due
        with lock:
            _note(phase, took_s, message, is_attack=is_attack)

    due_list: list[tuple[float, bool, dict[str, Any]]] = [
        ((i + 0.5) * seconds / len(attacks), True, options) for i, options in enumerate(attacks)
    ]
    at = rng.expovariate(rate)
    while at < seconds:
        is_free = rng.random() < 0.5
        options = {"ignore_eos": True} if is_free else {"json_schema": rng.choice(schemas)}
        due_list.append((at, False, options))
        at += rng.expovariate(rate)
    _send(sorted(due_list, key=lambda one: one[0]), rng, carry_out)


def _send(
    due_list: Sequence[tuple[float, bool, dict[str, Any]]],
    rng: random.Random,
    carry_out: Callable[[dict[str, Any], list[int], float, bool], None],
) -> None:
    started = time.perf_counter()
    futures: list[Future[None]] = []
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for at, is_attack, options in due_list:
            time.sleep(max(0.0, started + at - time.perf_counter()))
            prompt = [rng.randrange(*VOCAB) for _ in range(PROMPT_TOKENS)]
            futures.append(pool.submit(carry_out, options, prompt, started + at, is_attack))
    for future in futures:
        future.result()


def _note(phase: Phase, took_s: float, message: str | None, *, is_attack: bool) -> None:
    if message is not None:
        phase.errors[normalised(message)] += 1
    if is_attack:
        phase.attacks_s.append(took_s)
        phase.num_refused += message is not None
    else:
        phase.latencies_s.append(took_s)
        phase.num_failed += message is not None


def _row(name: str, phase: Phase, base_s: float | None) -> dict[str, Any]:
    p50, p99 = (percentile(phase.latencies_s, percent) for percent in (50, 99))
    return {
        "attacks": name,
        "requests": len(phase.latencies_s),
        "failed": phase.num_failed,
        "p50_ms": p50 and p50 * 1e3,
        "p99_ms": p99 and p99 * 1e3,
        "p99_ratio": p99 and base_s and p99 / base_s,
        "adversarial": len(phase.attacks_s),
        "refused": phase.num_refused,
        "worst_s": max(phase.attacks_s, default=None),
    }
