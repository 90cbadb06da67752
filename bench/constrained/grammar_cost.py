"""What grammars cost an engine: in its steps, until a first token, and to those who decode beside.

The real engine in one process.

- Steps: a batch decodes without grammars, and then each row under one; the two take turns. Forced
  runs and drafts are off, so that all sample one token a row and a step. CPU time of all threads,
  which other processes of the machine change less. `first` is a schema's first batch, in which
  masks are computed for the first time.
- First tokens: a request with a schema that nobody has asked for before, against the same prompt
  without one, alone and in turns. A grammar adds what compilation takes longer than the prompt.
- Neighbours: a few requests decode; fresh schemas arrive among them one after another, or not. Each
  of the neighbours gets a token a step, so the time between tokens is that of a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...constrained.spec import GrammarSpec
from ...flags import count
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ...runtime.config import EngineConfig
from ...runtime.execute.threads import configure_threads, default_num_threads
from ...runtime.schedule.plan import RowResult
from ...runtime.schedule.request import FinishReason, Request
from ...runtime.schedule.sampling_params import SamplingParams
from ..harness.prompts import plain_ids, random_prompt
from ..harness.report import console_progress, write_report
from .masks import percentile
from .schema_shapes import FAMILIES, generated_schema

if TYPE_CHECKING:
    from ...runtime.engine import Engine

_PROMPT_TOKENS = 16  # of a row that decodes
_POLL_S = 0.0002  # where the engine waits for a grammar alone


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench grammar-cost`."""
    add = parser.add_argument
    add("--model", type=Path, default=EMBEDDED_MODEL, help="checkpoint folder")
    add("--batch", type=count, default=32, metavar="N", help="rows of a step (%(default)s)")
    add("--steps", type=count, default=48, metavar="N", help="tokens of a row (%(default)s)")
    add("--prompts", type=count, nargs="+", default=[16, 128, 512], metavar="N",
        help="tokens of prompts whose first token is timed (default: 16 128 512)")  # fmt: skip
    add("--neighbours", type=count, default=8, metavar="N", help="requests that decode beside")
    add("--repeats", type=count, default=9, metavar="N", help="of each kind (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    configure_threads(default_num_threads(args.model), None)
    from ...runtime.loaded_model import LoadedModel

    longest = max(args.prompts) + args.steps
    config = EngineConfig(
        model=args.model,
        max_total_tokens=args.batch * (_PROMPT_TOKENS + args.steps + 16) + 2 * longest,
        max_running_requests=args.batch + 1,
        speculate="off",  # drafts would give some rows several tokens a step
    )
    loaded = LoadedModel(config)
    engine = loaded.engine
    load = _Load(engine, plain_ids(loaded.model_config.vocab_size), random.Random(0))
    try:
        load.first_token(16, next(load.schemas))  # starts the compiling processes
        with console_progress() as progress:
            bar = progress.add_task("steps", total=3)
            steps = _step_row(load, args)
            progress.update(bar, description="first tokens", advance=1)
            first_tokens = [_first_token_row(load, num, args.repeats) for num in args.prompts]
            progress.update(bar, description="neighbours", advance=1)
            neighbours = _neighbour_row(load, args)
            progress.advance(bar)
    finally:
        assert engine.grammars is not None
        engine.grammars.close()
    rows = [*steps, *first_tokens, neighbours]
    write_report("grammar_cost", rows, args)
    return 0


def fresh_schemas() -> Iterator[dict[str, Any]]:
    """Schemas as found in the wild, endless, no two alike."""
    for number in itertools.count():
        for family in FAMILIES:
            if family != "github ultra":  # rare, and compiled for seconds
                yield {**generated_schema(family, number), "title": f"{family} {number}"}


class _Ignore:
    """A listener that ignores everything."""

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        return None

    def on_finish(self, request: Request) -> None:
        pass


class _Load:
    """Owns what is submitted to an engine."""

    def __init__(self, engine: Engine, ids: range, rng: random.Random) -> None:
        self.engine, self._ids, self._rng = engine, ids, rng
        self.schemas = fresh_schemas()

    def submit(
        self, num_tokens: int, max_tokens: int, schema: object = None, *, is_random: bool = False
    ) -> Request:
        """A request, greedy or at temperature 1; under a schema without forced runs."""
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if is_random else 0.0,
            seed=self._rng.randrange(2**31),
            ignore_eos=schema is None,
        )
        prompt = random_prompt(self._rng, num_tokens, self._ids)
        request = Request(self.engine.next_request_id(), prompt, sampling, _Ignore())
        if schema is not None:
            assert self.engine.grammars is not None
            request.grammar = self.engine.grammars.ask(
                GrammarSpec("json_schema", json.dumps(schema))
            )
            request.jump_forward = False
        self.engine.submit(request)
        return request

    def first_token(self, num_tokens: int, schema: object = None) -> float:
        """Seconds until a request has its first token, alone."""
        started = time.perf_counter()
        request = self.submit(num_tokens, 1, schema)
        self._step_until(lambda: request.is_finished)
        return time.perf_counter() - started

    def batch_steps(self, num_rows: int, num_steps: int, schema: object = None) -> list[float]:
        """CPU seconds of the steps in which all rows decode."""
        rows = [
            self.submit(_PROMPT_TOKENS, num_steps, schema, is_random=True) for _ in range(num_rows)
        ]
        self._step_until(lambda: all(row.num_output_tokens for row in rows))
        steps = []
        while not any(row.is_finished for row in rows):
            steps.append(self._timed_step(time.process_time))
        self._step_until(lambda: not self.engine.has_work)
        return steps

    def neighbour_steps(self, num_rows: int, num_steps: int, *, has_schemas: bool) -> list[float]:
        """Seconds of the steps of requests that decode, fresh schemas among them or not."""
        rows = [self.submit(_PROMPT_TOKENS, num_steps) for _ in range(num_rows)]
        self._step_until(lambda: all(row.num_output_tokens for row in rows))
        steps: list[float] = []
        late: Request | None = None
        while not rows[0].is_finished:
            if has_schemas and (late is None or late.is_finished):
                late = self.submit(_PROMPT_TOKENS, 8, next(self.schemas))
            steps.append(self._timed_step(time.perf_counter))
        self._step_until(lambda: not self.engine.has_work)
        return steps

    def _timed_step(self, clock: Callable[[], float]) -> float:
        started = clock()
        self.engine.step()
        return clock() - started

    def _step_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            if self.engine.has_work:
                self.engine.step()
            else:
                time.sleep(_POLL_S)


def _endless_records() -> dict[str, Any]:
    """A schema whose documents last for as many tokens as are asked for."""
    record = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
            "kind": {"enum": ["alpha", "beta", "gamma"]},
        },
        "required": ["name", "count", "kind"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": record, "minItems": 500}


def _step_row(load: _Load, args: argparse.Namespace) -> list[dict[str, Any]]:
    schema = _endless_records()
    load.batch_steps(args.batch, args.steps)  # warm-up
    first = load.batch_steps(args.batch, args.steps, schema)
    free, bound = [], []
    for _ in range(args.repeats):
        free.append(statistics.median(load.batch_steps(args.batch, args.steps)))
        bound.append(statistics.median(load.batch_steps(args.batch, args.steps, schema)))
    base = statistics.median(free)
    name = f"CPU of a step of {args.batch} rows"
    ratio = statistics.median(b / f for f, b in zip(free, bound, strict=True))
    return [
        _row(name, base, statistics.median(bound), ratio),
        _row(f"{name}, first", base, statistics.median(first)),
    ]


def _first_token_row(load: _Load, num_tokens: int, repeats: int) -> dict[str, Any]:
    free, bound = [], []
    for _ in range(repeats):
        free.append(load.first_token(num_tokens))
        bound.append(load.first_token(num_tokens, next(load.schemas)))
    name = f"first token, {num_tokens} prompt tokens"
    worst = percentile(bound, 95)
    return _row(name, statistics.median(free), statistics.median(bound)) | {
        "p95 with, ms": worst and worst * 1e3
    }


def _neighbour_row(load: _Load, args: argparse.Namespace) -> dict[str, Any]:
    steps: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(args.repeats):
        for has_schemas, found in steps.items():
            found += load.neighbour_steps(args.neighbours, args.steps, has_schemas=has_schemas)
    free, bound = (percentile(found, 99) or 0.0 for found in steps.values())
    return _row(f"p99 between tokens of {args.neighbours} neighbours", free, bound)


def _row(name: str, free_s: float, bound_s: float, ratio: float | None = None) -> dict[str, Any]:
    return {
        "measured": name,
        "without, ms": free_s * 1e3,
        "with, ms": bound_s * 1e3,
        "added, ms": (bound_s - free_s) * 1e3,
        "ratio": bound_s / free_s if ratio is None else ratio,
    }
