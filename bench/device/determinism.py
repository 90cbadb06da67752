"""What --deterministic costs, and what answers differ by without it.

Two engines in one process, with and without, take turns; medians, and the ratio of both. Steps:
prompts, decoding, and decoding after a prefix that all share, whose attention is computed once
without the flag. Answers: each prompt alone on an empty cache, then all together.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...flags import count
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ...runtime.config import EngineConfig
from ...runtime.execute.threads import configure_threads, default_num_threads
from ...runtime.loaded_model import LoadedModel
from ...runtime.schedule.plan import RowResult
from ...runtime.schedule.request import FinishReason, Request
from ...runtime.schedule.sampling_params import SamplingParams
from ..harness.prompts import plain_ids, random_prompt
from ..harness.report import print_table, write_report

Prompts = Sequence[Sequence[int]]
MODES = ("ordinary", "deterministic")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench determinism`."""
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL, help="checkpoint folder")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batches", type=count, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--prompt-tokens", type=count, default=256, metavar="N")
    parser.add_argument("--shared-tokens", type=count, default=1024, metavar="N")
    parser.add_argument("--steps", type=count, default=32, help="decode steps (%(default)s)")
    parser.add_argument("--repeats", type=count, default=5, metavar="N")
    parser.add_argument("--answers", type=count, default=40, metavar="N", help="prompts to compare")
    parser.add_argument("--num-threads", type=count, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    configure_threads(args.num_threads or default_num_threads(args.model), None)
    engines = [_load(args, mode == "deterministic") for mode in MODES]
    ids = plain_ids(engines[0].model_config.vocab_size)
    rows: list[dict[str, Any]] = []
    for batch in args.batches:
        own = _prompts(ids, batch, 0, args.prompt_tokens)
        rows += _costs(engines, f"{batch} x {args.prompt_tokens} tokens", own, args)
        if batch > 1:
            shared = _prompts(ids, batch, args.shared_tokens, 16)
            name = f"{batch} that share {args.shared_tokens} tokens"
            rows.append(_costs(engines, name, shared, args)[1])
    answers = [
        {"answers": mode, **_differences(loaded, args.answers, args.steps)}
        for mode, loaded in zip(MODES, engines, strict=True)
    ]
    write_report("determinism", rows, args, answers=answers)
    if not args.json:
        print_table("answers, alone and together", answers)
    return 0


class Recorder:
    """A listener that keeps what a request said."""

    def __init__(self) -> None:
        self.said: list[tuple[int | None, float]] = []

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        self.said.append((result.token_id, result.logprob or 0.0))
        return None

    def on_finish(self, request: Request) -> None:
        pass


def _load(args: argparse.Namespace, is_deterministic: bool) -> LoadedModel:
    batch = max(args.batches)
    per_row = args.prompt_tokens + args.steps + 32
    return LoadedModel(
        EngineConfig(
            model=args.model,
            dtype=args.dtype,
            deterministic=is_deterministic,
            speculate="off",  # a step is one token of each row
            max_total_tokens=max(batch * per_row + args.shared_tokens, 16_384),
            max_running_requests=max(batch, args.answers),
            chunked_prefill_size=max(batch * args.prompt_tokens, 2048),
        )
    )


def _prompts(ids: range, count: int, shared_tokens: int, own_tokens: int) -> list[list[int]]:
    rng = random.Random(count)
    shared = random_prompt(rng, shared_tokens, ids)
    return [(shared + random_prompt(rng, own_tokens, ids)).tolist() for _ in range(count)]


def _costs(
    engines: Sequence[LoadedModel], name: str, prompts: Prompts, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Of the first step, and of a decode step."""
    prefill: list[list[float]] = [[], []]
    decode: list[list[float]] = [[], []]
    for repeat in range(args.repeats + 1):
        for place, loaded in enumerate(engines):
            loaded.engine.flush_cache()
            steps = _step_times_ms(loaded, prompts, 1 + args.steps)
            if repeat:  # the first is a warm-up
                prefill[place].append(steps[0])
                decode[place].append(statistics.median(steps[1:]))
    return [_row(f"prefill, {name}", prefill), _row(f"decode, {name}", decode)]


def _row(name: str, times_ms: Sequence[Sequence[float]]) -> dict[str, Any]:
    ordinary, fixed = (statistics.median(times) for times in times_ms)
    columns = {f"{mode}, ms": ms for mode, ms in zip(MODES, (ordinary, fixed), strict=True)}
    return {"step": name, **columns, "ratio": fixed / ordinary}


def _step_times_ms(loaded: LoadedModel, prompts: Prompts, max_tokens: int) -> list[float]:
    _submit(loaded, prompts, max_tokens)
    times = []
    while loaded.engine.has_work:
        started = time.perf_counter()
        loaded.engine.step()
        times.append((time.perf_counter() - started) * 1e3)
    return times


def _submit(loaded: LoadedModel, prompts: Prompts, max_tokens: int) -> list[Recorder]:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=1)
    recorders = [Recorder() for _ in prompts]
    for prompt, recorder in zip(prompts, recorders, strict=True):
        request_id = loaded.engine.next_request_id()
        loaded.engine.submit(Request(request_id, array("i", prompt), sampling, recorder))
    return recorders


def _differences(loaded: LoadedModel, count: int, max_tokens: int) -> dict[str, Any]:
    """Of answers alone and together: texts that differ, and log-probabilities of equal tokens
    after equal ones."""
    rng = random.Random(count)
    ids = plain_ids(loaded.model_config.vocab_size)
    text = _prompts(ids, 1, 0, 400)[0]
    prompts = [
        text[: rng.choice((0, 50, 130, 200, 400))]
        + random_prompt(rng, rng.choice((1, 20, 77, 150)), ids).tolist()
        for _ in range(count)
    ]
    alone = []
    for prompt in prompts:
        loaded.engine.flush_cache()
        alone.append(_said(loaded, [prompt], max_tokens)[0])
    together = _said(loaded, prompts, max_tokens)
    num_other, largest = 0, 0.0
    for one, other in zip(alone, together, strict=True):
        num_other += [token for token, _ in one] != [token for token, _ in other]
        for (token, logprob), (other_token, other_logprob) in zip(one, other, strict=True):
            if token != other_token:
                break
            largest = max(largest, abs(logprob - other_logprob))
    return {"texts that differ": f"{num_other} of {count}", "largest difference": largest}


def _said(
    loaded: LoadedModel, prompts: Prompts, max_tokens: int
) -> list[list[tuple[int | None, float]]]:
    recorders = _submit(loaded, prompts, max_tokens)
    while loaded.engine.has_work:
        loaded.engine.step()
    return [recorder.said for recorder in recorders]
