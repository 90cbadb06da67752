"""Long prompts beside running streams: on the engine that decodes, or on one of their own.

`apart`: two engines with a core each, one of which computes the long prompts and sends their KV
layer by layer. `together`: one engine with both cores and no limit on how long a prompt may hold up
who decodes. `limited`: the same with the limit that an engine has by default. Streams run all the
time; long prompts come one after the other. `gap` is the time between two pieces of a stream's text
while long prompts are there; `ratio` is the gap's 99th percentile of `together` through that of the
row. `first token` is that of a long prompt on an idle engine: `apart` it is computed elsewhere, and
`a core` is one engine with a core that computes it itself; `first ratio` is the row's through that
of `a core`. `hidden` is the share of the time of sending in which more of the prompt was computed.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from ...errors import EngineError
from ...flags import count
from ...frontend.backend import Engine
from ...frontend.dsl.expr import tokens
from ...frontend.dsl.function import open_program
from ...frontend.dsl.generation import gen
from ..harness.report import percentile, write_report
from ..harness.workloads import BOS, LOW
from .shared_kv import first_token

TARGET_RATIO = 2.0
TARGET_FIRST_RATIO = 1.15
TARGET_HIDDEN = 0.7
PATIENCE_S = 120.0
_WAYS = ("apart", "together", "limited")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench prefill`."""
    add = parser.add_argument
    add("--model", help="checkpoint folder (default: the embedded model)")
    add("--prompt", type=count, default=3968, metavar="TOKENS", help="default: %(default)s")
    add("--streams", type=count, default=8, help="that run all the time (default: %(default)s)")
    add("--prompts", type=count, default=4, help="long ones in a run (default: %(default)s)")
    add("--repeats", type=count, default=3)
    add("--without-limited", action="store_true", help="leave that way out: it takes the longest")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    write_report("prefill", measure(args), args)
    return 0


def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    """A row a way, in milliseconds."""
    ways = [way for way in _WAYS if way != "limited" or not args.without_limited]
    gaps: dict[str, list[float]] = {way: [] for way in ways}
    firsts: dict[str, list[float]] = {"apart": [], "a core": []}
    worst: dict[str, list[float]] = {way: [] for way in ways}
    hidden = 0.0
    rng = random.Random("prefill")
    with ExitStack() as stack:
        engines = _started(stack, args)
        vocab = int(engines["apart"].connection.info["vocab_size"])
        prompts = _prompts(rng, vocab)
        for repeat in range(args.repeats + 1):
            for way in ways:
                found = _run(engines[way], prompts, args)
                if repeat:  # in the first one costs are learnt
                    gaps[way].append(percentile(sorted(found), 99))
                    worst[way].append(max(found))
            for way in firsts:
                seconds, _ = first_token(engines[way], next(prompts)(args.prompt))
                if repeat:
                    firsts[way].append(seconds)
        told = engines["apart"].get_server_info()["coming"]
        if told["transfer_s"]:
            hidden = 1.0 - told["exposed_s"] / told["transfer_s"]
        if told["num_failed"] or not told["num_streams"]:
            raise EngineError(f"prompts were not computed apart: {told}")
    return [_row(way, gaps, worst, firsts, hidden) for way in (*ways, "a core")]


def _row(
    way: str,
    gaps: dict[str, list[float]],
    worst: dict[str, list[float]],
    firsts: dict[str, list[float]],
    hidden: float,
) -> dict[str, object]:
    own, first, is_apart = gaps.get(way, []), firsts.get(way, []), way == "apart"
    slower = [there / here for here, there in zip(own, gaps["together"], strict=False)]
    later = [here / alone for here, alone in zip(first, firsts["a core"], strict=False)]
    return {
        "way": way,
        "gap p99 ms": 1000 * median(own) if own else None,
        "gap max ms": 1000 * median(worst[way]) if own else None,
        "ratio": median(slower) if slower else None,
        "target": TARGET_RATIO if is_apart else None,
        "first token ms": 1000 * median(first) if first else None,
        "first ratio": median(later) if later else None,
        "first target": TARGET_FIRST_RATIO if is_apart else None,
        "hidden": hidden if is_apart else None,
        "hidden target": TARGET_HIDDEN if is_apart else None,
    }


def _started(stack: ExitStack, args: argparse.Namespace) -> dict[str, Engine]:
    """An engine for each way that clients talk to."""
    folder = stack.enter_context(TemporaryDirectory(prefix="stemma-bench-"))
    endpoint = f"ipc://{folder}/kv"
    common = {"max_total_tokens": (args.prompts + 2) * args.prompt + 16_384}

    def start(**options: Any) -> Engine:
        return stack.enter_context(Engine(args.model, **common | options))

    unlimited = {"decode_slowdown": 0, "chunked_prefill_size": args.prompt + 256}
    start(num_threads=1, role="prefill", prefill_endpoint=endpoint)
    engines = {
        "apart": start(num_threads=1, role="decode", prefill_engines=[endpoint]),
        "together": start(num_threads=2, **unlimited),
        "a core": start(num_threads=1),
    }
    if not args.without_limited:
        engines["limited"] = start(num_threads=2)
    until_s = time.monotonic() + PATIENCE_S
    while not engines["apart"].get_server_info()["coming"]["num_able_peers"]:
        if time.monotonic() > until_s:
            raise EngineError("the engines did not find each other")
        time.sleep(0.05)
    return engines


def _run(engine: Engine, prompts: Iterator[Any], args: argparse.Namespace) -> list[float]:
    """Seconds between two pieces of text of the streams, while long prompts were there."""
    engine.flush_cache()
    is_over = threading.Event()
    times: list[list[float]] = [[] for _ in range(args.streams)]
    short = [next(prompts)(16) for _ in range(args.streams)]
    threads = [
        threading.Thread(target=_stream, args=(engine, prompt, own, is_over))
        for prompt, own in zip(short, times, strict=True)
    ]
    for thread in threads:
        thread.start()
    while not all(times):
        time.sleep(0.01)
    began_s = time.perf_counter()
    for _ in range(args.prompts):
        first_token(engine, next(prompts)(args.prompt))
    ended_s = time.perf_counter()
    is_over.set()
    for thread in threads:
        thread.join()
    return [
        later - sooner
        for own in times
        for sooner, later in pairwise(own)
        if later >= began_s and sooner <= ended_s
    ]


def _stream(
    engine: Engine, prompt: tuple[int, ...], times: list[float], is_over: threading.Event
) -> None:
    """One text after the other, as it comes."""
    while not is_over.is_set():
        s = open_program(engine, stream=True)
        s += tokens(prompt)
        s += gen("said", max_tokens=1024, temperature=0, ignore_eos=True)
        for _ in s.text_iter("said"):
            times.append(time.perf_counter())
            if is_over.is_set():
                break
        s.cancel()


def _prompts(rng: random.Random, vocab: int) -> Iterator[Any]:
    """Each makes a prompt of so many tokens that nobody has seen."""
    low = min(LOW, vocab // 2)
    while True:
        yield lambda length: (BOS, *rng.choices(range(low, vocab), k=length - 1))
