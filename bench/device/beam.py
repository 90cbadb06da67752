"""What beam search costs: k hypotheses against one output, and against submitting each anew.

One process, the real engine, one search at a time; each round measures all of them in turn, and the
medians over the rounds are told. `resubmit` is how a server's client, or a server above its own
engine, searches: each hypothesis is a new request of one token with its whole text as the prompt,
whose KV is found in the cache, with the log probabilities of the 2k likeliest tokens. Its rows are
others than the search's; `other outputs` counts the rounds in which rounding decided.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...flags import count
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ...runtime.config import EngineConfig
from ...runtime.engine import Engine
from ...runtime.execute.threads import configure_threads, default_num_threads
from ...runtime.loaded_model import LoadedModel
from ...runtime.models.model_config import read_model_config
from ...runtime.schedule.beam_search import BeamParams, BeamSearch
from ...runtime.schedule.beams import BeamGroup
from ...runtime.schedule.plan import RowResult, TokenLogprob
from ...runtime.schedule.request import FinishReason, Request
from ...runtime.schedule.sampling_params import SamplingParams
from ..harness.prompts import plain_ids, random_prompt
from ..harness.report import write_report


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench beam`."""
    add = parser.add_argument
    add("--model", type=Path, default=EMBEDDED_MODEL, help="checkpoint folder")
    add("--beams", type=count, nargs="+", default=[4], metavar="K")
    add("--prompt-tokens", type=count, default=256, metavar="N")
    add("--output-tokens", type=count, default=64, metavar="N")
    add("--rounds", type=count, default=5)
    add("--page-size", type=count, metavar="N", help="tokens a KV page (default: the engine's)")
    add("--num-threads", type=count, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    configure_threads(args.num_threads or default_num_threads(args.model), None)
    engine, ids = _engine(args), plain_ids(read_model_config(args.model).vocab_size)
    ways: dict[str, Callable[[list[int]], object]] = {
        "one output": partial(_one_output, engine, args.output_tokens)
    }
    for width in args.beams:
        params = BeamParams(width, early_stopping="never")
        for name, search in (("beam", _search), ("resubmit", _resubmit)):
            ways[f"{name}, k = {width}"] = partial(search, engine, args.output_tokens, params)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    outputs: dict[str, list[object]] = {name: [] for name in ways}
    rng = random.Random(0)
    for number in range(args.rounds + 1):
        prompt = random_prompt(rng, args.prompt_tokens, ids).tolist()
        for name, way in ways.items():
            engine.flush_cache()
            started = time.perf_counter()
            found = way(prompt)
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
                outputs[name].append(found)
    alone_s = statistics.median(seconds["one output"])
    rows = []
    for name, times in seconds.items():
        same = outputs[name.replace("resubmit", "beam")]
        num_other = sum(a != b for a, b in zip(outputs[name], same, strict=True))
        rows.append(_row(name, times, alone_s, args) | {"other outputs": num_other})
    write_report("beam", rows, args)
    return 0


def _row(name: str, times: list[float], alone_s: float, args: argparse.Namespace) -> dict[str, Any]:
    median_s = statistics.median(times)
    return {
        "way": name,
        "time, s": median_s,
        "output tokens/s": args.output_tokens / median_s,
        "of one output's time": median_s / alone_s,
    }


def _engine(args: argparse.Namespace) -> Engine:
    width = max(args.beams)
    config = EngineConfig(
        model=args.model,
        page_size=args.page_size,
        speculate="off",  # nothing is guessed in a search
        max_running_requests=width,
        chunked_prefill_size=args.prompt_tokens + width,
    )
    of_branch = args.output_tokens + config.tokens_a_page
    tokens = args.prompt_tokens + (width + 1) * of_branch
    return LoadedModel(replace(config, max_total_tokens=4 * tokens)).engine


@dataclass
class _Listener:
    """What a request's last token came with."""

    tops: tuple[TokenLogprob, ...] = ()

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        self.tops = result.top_logprobs
        return None

    def on_finish(self, request: Request) -> None:
        assert request.finish_reason is not FinishReason.ERROR, request.error


def _run(engine: Engine, *requests: Request) -> None:
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()


def _one_output(engine: Engine, num_tokens: int, prompt: list[int]) -> None:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    _run(engine, Request(engine.next_request_id(), array("i", prompt), sampling, _Listener()))


def _search(engine: Engine, num_tokens: int, params: BeamParams, prompt: list[int]) -> object:
    """The outputs found."""
    sampling, listener = SamplingParams(max_tokens=num_tokens, temperature=0.0), _Listener()
    groups: list[BeamGroup] = []

    def new_request() -> Request:
        request = Request(engine.next_request_id(), array("i", prompt), sampling, listener)
        request.max_output_tokens = num_tokens
        request.beam = groups[0] if groups else None
        return request

    leader = new_request()
    groups.append(BeamGroup(params, leader, new_request))
    leader.beam = groups[0]
    _run(engine, leader)
    return _outputs(groups[0].search)


def _resubmit(engine: Engine, num_tokens: int, params: BeamParams, prompt: list[int]) -> object:
    """The same outputs, a request for each token of each hypothesis."""
    search = BeamSearch(params, num_stop_ids=0, max_tokens=num_tokens)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=search.num_candidates)
    while not search.is_done:
        listeners = [_Listener() for _ in search.live]
        _run(
            engine,
            *(
                Request(
                    engine.next_request_id(),
                    array("i", prompt) + hypothesis.token_ids,
                    sampling,
                    listener,
                )
                for hypothesis, listener in zip(search.live, listeners)
            ),
        )
        candidates = search.candidates([listener.tops for listener in listeners])
        search.advance(candidates, [False] * len(candidates), frozenset())
    return _outputs(search)


def _outputs(search: BeamSearch) -> list[list[int]]:
    return [[*found.token_ids] for found in search.finished]
