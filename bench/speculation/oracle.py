"""The machine's part of speculation: an oracle whose guesses are right as often as it is told.

One process, the real engine, one output at a time, its kernels and its budget as they are. A bias
on one token makes the output known whatever rounding does; the oracle guesses that token with the
given acceptance, another one else, and says so as its confidence.

`formula` is what a constant cost of a guess would give, (tokens a step) / (1 + K * T_draft /
T_target) with K guesses a step, and for T_draft what the measured curve of step times rises for a
token, on average up to the most guesses allowed. `drafting` is the share of the engine's steps that
planning and applying take more than without guesses.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...flags import count
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ...runtime.config import QUANTIZATIONS, EngineConfig
from ...runtime.execute.threads import configure_threads, default_num_threads
from ...runtime.schedule.plan import PendingStep, RowResult, StepPlan
from ...runtime.schedule.request import FinishReason, Request
from ...runtime.schedule.sampling_params import SamplingParams
from ...runtime.schedule.speculation import Speculation
from ...runtime.speculate.drafter import Draft, Subject
from ...runtime.speculate.drafting import Drafting
from ..harness.prompts import plain_ids, random_prompt
from ..harness.report import write_report

if TYPE_CHECKING:
    from ...runtime.engine import Engine
    from ...runtime.execute.model_runner import ModelRunner


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench oracle`."""
    add = parser.add_argument
    add("--model", type=Path, default=EMBEDDED_MODEL, help="checkpoint folder")
    add("--quantization", default="none", choices=QUANTIZATIONS, help="of the weights")
    add("--acceptance", type=probability, nargs="+", default=[0.5, 0.7, 0.9], metavar="P")
    add("--speculative-num-tokens", type=count, default=8, metavar="N")
    add("--prompt-tokens", type=count, default=256, metavar="N")
    add(
        "--steps",
        type=count,
        default=128,
        metavar="N",
        help="at least, of an output without guesses",
    )
    add("--rounds", type=count, default=7, metavar="N")
    add("--num-threads", type=count, metavar="N")


def probability(text: str) -> float:
    """A flag's value."""
    with contextlib.suppress(ValueError):
        if 0.0 < float(text) <= 1.0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: a number in (0, 1]")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    configure_threads(args.num_threads or default_num_threads(args.model), None)
    from ...runtime.loaded_model import LoadedModel

    config = EngineConfig(
        model=str(args.model),
        quantization=args.quantization,
        speculate="off",
        max_total_tokens=4 * (args.prompt_tokens + args.steps + args.speculative_num_tokens),
    )
    loaded = LoadedModel(config)
    engine, device = loaded.engine, _TimedSteps(loaded.runner)
    scheduler, ids = engine.scheduler, plain_ids(loaded.model_config.vocab_size)
    settings: dict[float, Speculation | None] = {0.0: None}
    for acceptance in args.acceptance:
        drafting = Drafting((Oracle(acceptance, *ids[:2]),), args.speculative_num_tokens)
        settings[acceptance] = Speculation(drafting, 0, scheduler.stats)
    measured = {acceptance: _Measured() for acceptance in settings}
    for number in range(args.rounds + 1):
        for acceptance, speculation in settings.items():
            scheduler.speculation = speculation
            found = _Measured() if number == 0 else measured[acceptance]  # the first: to warm up
            _measure(engine, ids, device, number, args, found)
    rows = [
        _row(acceptance, measured[acceptance], measured[0.0], settings[acceptance], args)
        for acceptance in settings
    ]
    shown = [{key: row[key] for key in row if key != "step_ms"} for row in rows]
    write_report("oracle", rows, args, shown=shown, model=args.model.resolve().name)
    return 0


@dataclass(slots=True)
class Oracle:
    """A drafter; its texts are all alike."""

    acceptance: float
    always: int  # the token that is right
    never: int
    _rng: random.Random = field(default_factory=lambda: random.Random(0))

    def open(self, subject: Subject) -> Oracle:
        return self

    def extend(self, tokens: Sequence[int]) -> None:
        pass

    def propose(self, room: int, tail: Sequence[int] = ()) -> Draft:
        is_right = [self._rng.random() < self.acceptance for _ in range(room)]
        tokens = tuple(self.always if right else self.never for right in is_right)
        return Draft(tokens, (self.acceptance,) * room, "oracle")

    def note(self, draft: Draft, num_accepted: int) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(slots=True)
class _Measured:
    """Decoding with one setting, over the rounds."""

    token_s: list[float] = field(default_factory=list)  # a round's mean
    num_steps: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    host_s: list[float] = field(default_factory=list)  # a round's mean step without the device
    step_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Listener:
    always: int

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        assert result.token_id == self.always, "the bias decides"
        return None

    def on_finish(self, request: Request) -> None:
        assert request.finish_reason is FinishReason.LENGTH, request.error


class _TimedSteps:
    """Seconds that the device half has taken."""

    def __init__(self, runner: ModelRunner) -> None:
        self.seconds = 0.0
        self._submit, runner.submit = runner.submit, self.submit  # type: ignore[method-assign]

    def submit(self, plan: StepPlan) -> PendingStep:
        started = time.perf_counter()
        pending = self._submit(plan)
        self.seconds += time.perf_counter() - started
        return pending


def _measure(
    engine: Engine,
    ids: range,
    device: _TimedSteps,
    number: int,
    args: argparse.Namespace,
    found: _Measured,
) -> None:
    """One output, from its second step on: the first one computes the prompt. The first of `ids`
    is the output, the second is never right, the others are the prompt's."""
    rng = random.Random(number)
    prompt = random_prompt(rng, args.prompt_tokens, ids[2:])
    num_first = 1 + args.speculative_num_tokens  # that the prefill step may bring
    sampling = SamplingParams(
        max_tokens=num_first + args.steps, temperature=0.0, logit_bias=((ids[0], 100.0),)
    )
    request = Request(engine.next_request_id(), prompt, sampling, _Listener(ids[0]))
    engine.flush_cache()
    engine.submit(request)
    while not request.num_output_tokens:
        engine.step()
    stats, first = engine.scheduler.stats, request.num_output_tokens
    before, device.seconds = replace(stats), 0.0
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    duration_s = time.perf_counter() - started
    num_steps = stats.num_steps - before.num_steps
    found.num_steps += num_steps
    found.num_tokens += request.num_output_tokens - first
    found.num_drafted += stats.num_draft_tokens - before.num_draft_tokens
    found.token_s.append(duration_s / (request.num_output_tokens - first))
    found.step_s.append(duration_s / num_steps)
    found.host_s.append((duration_s - device.seconds) / num_steps)


def _row(
    acceptance: float,
    found: _Measured,
    off: _Measured,
    speculation: Speculation | None,
    args: argparse.Namespace,
) -> dict[str, Any]:
    median = statistics.median
    tokens_a_step = found.num_tokens / found.num_steps
    row = {
        "acceptance": acceptance,
        "guesses a step": found.num_drafted / found.num_steps,
        "tokens a step": tokens_a_step,
        "step, ms": 1000 * median(found.step_s),
        "speed-up": median(a / b for a, b in zip(off.token_s, found.token_s, strict=True)),
        "formula": 1.0,
        "drafting": (median(found.host_s) - median(off.host_s)) / median(found.step_s),
        "step_ms": {},
    }
    if speculation is not None:
        most, curve = args.speculative_num_tokens, speculation.times.curve
        rise = (curve[1 + most] / curve[1] - 1) / most
        row["formula"] = tokens_a_step / (1 + row["guesses a step"] * rise)
        row["step_ms"] = speculation.times.describe()
    return row
