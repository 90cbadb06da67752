"""Short chats beside long prompts, which another engine computes or the same.

Chats and long prompts arrive at random, at the same times in each way; all answers are streamed.
`apart`: two engines with a core each, one of which computes the long prompts and sends their KV
layer by layer. `together`: one engine with both cores and no limit on how long a prompt may hold up
who decodes. `limited`: the same with the limit that an engine has by default. `TPOT` is a chat's
mean time between two tokens, `gap` the time between two pieces of its text; `ratio` is the TPOT's
99th percentile, over the chats of all repeats, of `together` through that of the row. `long first`
is the median of the long prompts' first tokens among all that.

Between two runs an engine is idle: `idle first` is a long prompt's first token then; `apart` it is
computed elsewhere, and `a core` is one engine with a core that computes it itself. `first ratio` is
the row's through that of `a core` with the transfer of one layer, `layer`, added. `hidden` is the
share of the time of sending in which more of the prompt was computed.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

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
_CHAT_PROMPT = (32, 128)  # tokens
_LONG_ANSWER = 16


@dataclass(slots=True)
class _Seen:
    """Of one way, over all repeats. Seconds."""

    tpots: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)  # of long prompts, in the mix
    idle: list[float] = field(default_factory=list)  # and on an idle engine


class _Arrival(NamedTuple):
    """A request of the mix."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    is_long: bool


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench prefill`."""
    add = parser.add_argument
    add("--model", help="checkpoint folder (default: the embedded model)")
    add("--prompt", type=count, default=3968, metavar="TOKENS", help="default: %(default)s")
    add("--chats", type=count, default=40, help="short ones of a run (default: %(default)s)")
    add("--answer", type=count, default=48, metavar="TOKENS", help="of a chat (%(default)s)")
    add("--prompts", type=count, default=4, help="long ones of a run (default: %(default)s)")
    add("--seconds", type=float, default=40.0, help="in which they arrive (default: %(default)s)")
    add("--repeats", type=count, default=3)
    add("--without-limited", action="store_true", help="leave that way out: it takes the longest")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    write_report("prefill", measure(args), args)
    return 0


def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    """A row a way, in milliseconds."""
    ways = [way for way in _WAYS if way != "limited" or not args.without_limited]
    seen = {way: _Seen() for way in (*ways, "a core")}
    layers_s: list[float] = []
    rng = random.Random("prefill")
    with ExitStack() as stack:
        engines = _started(stack, args)
        vocab = int(engines["apart"].connection.info["vocab_size"])
        make = partial(_prompt, rng, min(LOW, vocab // 2), vocab)
        for way in ways:  # costs are learnt
            _run(engines[way], _arrivals(rng, args, args.seconds / 4), make, _Seen())
        for _ in range(args.repeats):
            arrivals = _arrivals(rng, args, args.seconds)
            for way in ways:
                _run(engines[way], arrivals, make, seen[way])
            before = _coming(engines["apart"])
            for way in ("a core", "apart"):
                seconds, _ = first_token(engines[way], make(args.prompt))
                seen[way].idle.append(seconds)
            after = _coming(engines["apart"])
            if after["num_streams"] == before["num_streams"]:
                raise EngineError("a prompt on an idle engine was not computed apart: longer ones")
            layers_s.append(after["exposed_s"] - before["exposed_s"])
        told = _coming(engines["apart"])
        if told["num_failed"] or not told["num_streams"]:
            raise EngineError(f"prompts were not computed apart: {told}")
    hidden = 1.0 - told["exposed_s"] / told["transfer_s"] if told["transfer_s"] else 0.0
    return [_row(way, seen, median(layers_s), hidden) for way in seen]


def _coming(engine: Engine) -> dict[str, Any]:
    return dict(engine.get_server_info()["coming"])


def _row(way: str, seen: dict[str, _Seen], layer_s: float, hidden: float) -> dict[str, object]:
    own, is_apart = seen[way], way == "apart"
    tpots, gaps = sorted(own.tpots), sorted(own.gaps)
    together = percentile(sorted(seen["together"].tpots), 99)
    alone = [seconds + layer_s for seconds in seen["a core"].idle]
    later = [here / there for here, there in zip(own.idle, alone, strict=False)]
    return {
        "way": way,
        "chats": len(tpots),
        "TPOT p50 ms": 1000 * percentile(tpots, 50) if tpots else None,
        "TPOT p99 ms": 1000 * percentile(tpots, 99) if tpots else None,
        "ratio": together / percentile(tpots, 99) if tpots else None,
        "target": TARGET_RATIO if is_apart else None,
        "gap p99 ms": 1000 * percentile(gaps, 99) if gaps else None,
        "long first ms": 1000 * median(own.firsts) if own.firsts else None,
        "idle first ms": 1000 * median(own.idle) if own.idle else None,
        "layer ms": 1000 * layer_s if is_apart else None,
        "first ratio": median(later) if later else None,
        "first target": TARGET_FIRST_RATIO if is_apart else None,
        "hidden": hidden if is_apart else None,
        "hidden target": TARGET_HIDDEN if is_apart else None,
    }


def _started(stack: ExitStack, args: argparse.Namespace) -> dict[str, Engine]:
    """An engine for each way that clients talk to."""
    folder = stack.enter_context(TemporaryDirectory(prefix="stemma-bench-"))
    endpoint = f"ipc://{folder}/kv"
    long = args.prompts * (args.prompt + _LONG_ANSWER)
    chats = args.chats * (_CHAT_PROMPT[1] + args.answer)
    common = {"max_total_tokens": long + args.prompt + chats}

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
    while not _coming(engines["apart"])["num_able_peers"]:
        if time.monotonic() > until_s:
            raise EngineError("the engines did not find each other")
        time.sleep(0.05)
    return engines


def _arrivals(rng: random.Random, args: argparse.Namespace, seconds: float) -> list[_Arrival]:
    """A mix of so many seconds, at the rate of `--seconds`."""
    share = seconds / args.seconds
    chats = [
        _Arrival(rng.uniform(0, seconds), rng.randint(*_CHAT_PROMPT), args.answer, False)
        for _ in range(max(1, round(share * args.chats)))
    ]
    long = [
        _Arrival(rng.uniform(0, seconds), args.prompt, _LONG_ANSWER, True)
        for _ in range(max(1, round(share * args.prompts)))
    ]
    return sorted(chats + long)


def _run(
    engine: Engine,
    arrivals: Sequence[_Arrival],
    make: Callable[[int], tuple[int, ...]],
    seen: _Seen,
) -> None:
    """Send each when its time has come, and wait for all."""
    engine.flush_cache()
    began_s = time.perf_counter()
    with ThreadPoolExecutor(len(arrivals)) as threads:
        streams = []
        for arrival in arrivals:
            time.sleep(max(0.0, began_s + arrival.at_s - time.perf_counter()))
            prompt = make(arrival.prompt_tokens)
            streams.append(threads.submit(_stream, engine, arrival, prompt, seen))
        for stream in streams:
            stream.result()


def _stream(engine: Engine, arrival: _Arrival, prompt: tuple[int, ...], seen: _Seen) -> None:
    """One request, whose text is read as it comes."""
    times = [time.perf_counter()]
    s = open_program(engine, stream=True)
    s += tokens(prompt)
    s += gen("said", max_tokens=arrival.output_tokens, temperature=0, ignore_eos=True)
    for _ in s.text_iter("said"):
        times.append(time.perf_counter())
    s.end()
    asked_s, *pieces = times
    if arrival.is_long:
        seen.firsts.append(pieces[0] - asked_s)
        return
    seen.tpots.append((pieces[-1] - pieces[0]) / (arrival.output_tokens - 1))
    seen.gaps.extend(later - sooner for sooner, later in pairwise(pieces))


def _prompt(rng: random.Random, low: int, vocab: int, length: int) -> tuple[int, ...]:
    """So many tokens that nobody has seen."""
    return (BOS, *rng.choices(range(low, vocab), k=length - 1))
