"""How long decoding stalls while a long prompt is computed beside it, for several token budgets.

The real engine in one process. Requests decode; after some steps a prompt arrives among them. Each
of them gets a token a step, so the time of a step is their inter-token latency. Its p99 while the
prompt is computed, and over the whole run, is held against the p99 without the prompt.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InvalidRequest
from ...flags import count
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ...runtime.config import EngineConfig
from ...runtime.execute.threads import configure_threads, default_num_threads
from ...runtime.schedule.request import Request
from ...runtime.schedule.sampling_params import SamplingParams
from ..device.step import Ignore
from ..harness.prompts import plain_ids, random_prompt
from ..harness.report import write_report

if TYPE_CHECKING:
    from ...runtime.engine import Engine

_STEPS_BEFORE = 32  # the prompt; or the steps of half the decoders' tokens
_DECODER_PROMPT_TOKENS = 16


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench stall`."""
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL, help="checkpoint folder")
    parser.add_argument("--decoders", type=count, default=16, metavar="N")
    parser.add_argument("--prompt-tokens", type=count, default=1536, metavar="N")
    parser.add_argument("--steps", type=count, default=256, metavar="N", help="tokens of a decoder")
    parser.add_argument(
        "--budgets", type=count, nargs="+", default=[2048], metavar="N",
        help="token budgets of a step, with and without the limit for long prompts",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    configure_threads(default_num_threads(args.model), None)
    from ...runtime.loaded_model import LoadedModel

    unlimited = args.prompt_tokens + args.decoders * _DECODER_PROMPT_TOKENS
    config = EngineConfig(
        model=args.model,
        max_total_tokens=args.decoders * (args.steps + 64) + args.prompt_tokens + 64,
        max_running_requests=args.decoders + 1,
    )
    loaded = LoadedModel(config)
    engine, ids = loaded.engine, plain_ids(loaded.model_config.vocab_size)
    _steps(engine, ids, args, has_prompt=True)  # warm-up
    rows = []
    scheduler, slowdown = engine.scheduler, config.decode_slowdown
    settings = [("off", unlimited, 0.0)]
    for budget in args.budgets:
        settings.append((f"{budget} tokens", budget, 0.0))
        settings.append((f"{budget} tokens, slowdown {slowdown:g}", budget, slowdown))
    for name, scheduler.token_budget, scheduler.limits.slowdown in settings:
        alone, _ = _steps(engine, ids, args, has_prompt=False)
        steps, during = _steps(engine, ids, args, has_prompt=True)
        rows.append(_row(name, alone, steps, during))
    write_report("stall", rows, args)
    return 0


def _steps(
    engine: Engine, ids: range, args: argparse.Namespace, has_prompt: bool
) -> tuple[list[float], list[float]]:
    """Seconds of every decode step, and of those in which the prompt was computed. Raises
    InvalidRequest where decoders end before it comes."""
    engine.flush_cache()
    rng = random.Random(0)

    def submit(num_tokens: int, max_tokens: int) -> Request:
        prompt = random_prompt(rng, num_tokens, ids)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = Request(engine.next_request_id(), prompt, sampling, Ignore())
        engine.submit(request)
        return request

    decoders = [submit(_DECODER_PROMPT_TOKENS, args.steps) for _ in range(args.decoders)]
    while any(request.num_output_tokens < 1 for request in decoders):
        engine.step()
    steps: list[float] = []
    during: list[float] = []
    late: Request | None = None
    while not decoders[0].is_finished:
        is_half = decoders[0].num_output_tokens >= args.steps // 2  # a step may give several
        if has_prompt and late is None and (is_half or len(steps) == _STEPS_BEFORE):
            late = submit(args.prompt_tokens, 1)
        is_during = late is not None and not late.is_finished
        started = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - started)
        if is_during:
            during.append(steps[-1])
    while engine.has_work:
        engine.step()
    if not steps or (has_prompt and not during):
        raise InvalidRequest.of("steps", args.steps, "enough to outlast a prompt's start")
    return steps, during


def _row(
    chunking: str, alone: list[float], steps: list[float], during: list[float]
) -> dict[str, Any]:
    base = _p99(alone)
    return {
        "chunking": chunking,
        "alone p99, ms": base * 1e3,
        "during p99, ms": _p99(during) * 1e3,
        "during ratio": _p99(during) / base,
        "whole run ratio": _p99(steps) / base,
        "prompt computed in, s": sum(during),
    }


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]
