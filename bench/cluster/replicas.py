"""Two engines on this machine, a core each: what placing programs brings in wall time.

A real router before real engines, and loads that find most of their prompts cached where they were
before: agents that wait for tools, chats, questions on shared documents, wide forks. Each way of
placing has its own server, all stay up, and take turns; caches are emptied before each run. "A
call" is a client that knows no programs: each call is one of its own, with all of the text so far.
`ratio` is the wall time of round robin, a call, through that of the row, repeat by repeat: the
median. `one engine` has all cores, and as much KV as the others together.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...flags import count
from ...frontend.backend import Engine, Runtime
from ...frontend.client.backend import Backend
from ...frontend.client.engine_process import EngineProcess
from ...frontend.dsl.function import function
from ...frontend.dsl.generation import gen
from ...frontend.dsl.state import ProgramState
from ..harness.report import write_report

START_S = 600.0
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is said: texts, behind each of which so many tokens are generated, and the pauses in
    seconds before all but the first. Where it `is_forked`, all behind the first text are branches
    of it, and conversations follow one another."""

    texts: tuple[str, ...]
    pauses_s: tuple[float, ...]
    max_tokens: int
    is_forked: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """`placement`: of the router, None: one engine; `by_call`: each call is a program."""

    name: str
    placement: str | None
    by_call: bool = False


WAYS = (
    Way("round robin, a call", "round_robin", by_call=True),
    Way("prefix, a call", "prefix", by_call=True),
    Way("round robin, a program", "round_robin"),
    Way("prefix, a program", "prefix"),
    Way("program", "program"),
    Way("one engine", None),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run."""

    wall_s: float
    prompt_tokens: int
    cached_tokens: int


@function
def converse(s: ProgramState, said: Conversation) -> None:
    """All of a conversation as one program."""
    for turn, text in enumerate(said.texts):
        if turn:
            with s.pause(expected_s=said.pauses_s[turn - 1], label="tool"):
                s[f"t{turn - 1}"]
                time.sleep(said.pauses_s[turn - 1])
        s += text + gen(f"t{turn}", max_tokens=said.max_tokens, **GREEDY)


@function
def fork(s: ProgramState, said: Conversation) -> list[tuple[int, int]]:
    """A first text and its branches as one program; returns what each has used."""
    first, *own = said.texts
    s += first
    branches = s.fork(len(own))
    for branch, text in zip(branches, own, strict=True):
        branch += text + gen("t0", max_tokens=said.max_tokens, **GREEDY)
    branches.join()
    return [_use(branch, "t0") for branch in branches]


@function
def answer(s: ProgramState, text: str, max_tokens: int) -> None:
    """One call, with all that was said before."""
    s += text + gen("t0", max_tokens=max_tokens, **GREEDY)


def agents(rng: random.Random, number: int) -> list[Conversation]:
    """4 turns behind 1 kB of common text and 400 bytes of their own; tools take 0.2 to 0.8 s."""
    common = _text(rng, 1000)
    return [
        Conversation(
            (common + _text(rng, 400), *(_text(rng, 250) for _ in range(3))),
            tuple(rng.uniform(0.2, 0.8) for _ in range(3)),
            16,
        )
        for _ in range(number)
    ]


def chats(rng: random.Random, number: int) -> list[Conversation]:
    """3 turns behind one of 4 system messages of 1 kB; users think for 0.2 to 0.8 s."""
    systems = [_text(rng, 1000) for _ in range(4)]
    return [
        Conversation(
            (rng.choice(systems) + _text(rng, 200), *(_text(rng, 200) for _ in range(2))),
            tuple(rng.uniform(0.2, 0.8) for _ in range(2)),
            24,
        )
        for _ in range(number)
    ]


def documents(rng: random.Random, number: int) -> list[Conversation]:
    """Four questions on each document of 2 kB, in random order; each is a program of its own."""
    texts = [_text(rng, 2000) for _ in range(max(1, number // 4))]
    asked = [Conversation((texts[n % len(texts)] + _text(rng, 60),), (), 8) for n in range(number)]
    rng.shuffle(asked)
    return asked


def forks(rng: random.Random, number: int) -> list[Conversation]:
    """48 branches of 32 tokens behind 2 kB, as in a search for answers; a quarter as many."""
    return [
        Conversation((_text(rng, 2000), *(_text(rng, 40) for _ in range(48))), (), 32, True)
        for _ in range(max(1, number // 4))
    ]


LOADS: dict[str, Callable[[random.Random, int], list[Conversation]]] = {
    make.__name__: make for make in (agents, chats, documents, forks)
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench replicas`."""
    add = parser.add_argument
    add("--model", help="checkpoint folder (default: the embedded model)")
    add("--replicas", type=count, default=2, metavar="N")
    add("--load", choices=[*LOADS], action="append", help="default: all")
    add("--way", choices=[way.name for way in WAYS], action="append", help="default: all")
    add("--conversations", type=count, default=24, metavar="N", help="a load (%(default)s)")
    add("--tokens", type=count, default=8192, help="KV of each replica (default: %(default)s)")
    add("--repeats", type=count, default=3)


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    ways = [way for way in WAYS if args.way is None or way.name in args.way]
    found: dict[tuple[str, str], list[Outcome]] = {}
    with contextlib.ExitStack() as stack:
        backends = {
            placement: stack.enter_context(served(placement, args))
            for placement in dict.fromkeys(way.placement for way in ways)
        }
        for repeat in range(args.repeats):
            for load in args.load or LOADS:
                said = LOADS[load](random.Random(repeat), args.conversations)
                for way in ways:
                    outcome = measured(said, way, backends[way.placement])
                    found.setdefault((load, way.name), []).append(outcome)
    write_report("replicas", _rows(ways, found), args)
    return 0


def _rows(
    ways: Sequence[Way], found: dict[tuple[str, str], list[Outcome]]
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for (load, way), outcomes in sorted(found.items(), key=lambda each: each[0][0]):
        first = found[load, ways[0].name]
        walls = [each.wall_s for each in outcomes]
        prompt_tokens = sum(each.prompt_tokens for each in outcomes)
        rows.append(
            {
                "load": load,
                "way": way,
                "wall s": statistics.median(walls),
                "least": min(walls),
                "ratio": statistics.median(a.wall_s / b for a, b in zip(first, walls)),
                "hit rate": sum(each.cached_tokens for each in outcomes) / prompt_tokens,
                "prompt tokens": prompt_tokens // len(outcomes),
            }
        )
    return rows


@contextlib.contextmanager
def served(placement: str | None, args: argparse.Namespace) -> Iterator[Backend]:
    """A router before engines of an equal part of the cores, or one engine with all of them."""
    cores = len(os.sched_getaffinity(0))
    if placement is None:
        num_tokens = args.tokens * args.replicas
        with Engine(args.model, num_threads=cores, max_total_tokens=num_tokens) as engine:
            yield engine
        return
    options: dict[str, object] = {
        "replicas": args.replicas, "placement": placement, "max_total_tokens": args.tokens,
        "num_threads": max(1, cores // args.replicas),
    }  # fmt: skip
    with served_with(args.model, options) as runtime:
        yield runtime


@contextlib.contextmanager
def served_with(model: str | None, options: dict[str, object]) -> Iterator[Backend]:
    """A router's process and a client of it; `options`: the router's and its engines'."""
    router = EngineProcess(model, options=options, module="stemma.cluster")
    try:
        with Runtime(str(router.endpoint), timeout_s=START_S) as runtime:
            yield runtime
    finally:
        router.stop()


def measured(said: Sequence[Conversation], way: Way, backend: Backend) -> Outcome:
    """All conversations at once, or forks one after the other, from an empty cache."""
    backend.flush_cache()
    hold = by_calls if way.by_call else by_program
    began_s = time.perf_counter()
    with ThreadPoolExecutor(1 if said[0].is_forked else len(said)) as users:
        uses = list(users.map(lambda each: hold(each, backend), said))
    wall_s = time.perf_counter() - began_s
    return Outcome(wall_s, sum(prompt for prompt, _ in uses), sum(cached for _, cached in uses))


def by_program(said: Conversation, backend: Backend) -> tuple[int, int]:
    """Tokens of all prompts, and those of them that were cached."""
    if said.is_forked:
        return _total(fork.run(said=said, backend=backend).ret_value)
    state = converse.run(said=said, backend=backend)
    return _total(_use(state, f"t{turn}") for turn in range(len(said.texts)))


def by_calls(said: Conversation, backend: Backend) -> tuple[int, int]:
    """The same without a program."""
    if said.is_forked:
        first, *own = said.texts
        asked = partial(answer.run, max_tokens=said.max_tokens, backend=backend)
        with ThreadPoolExecutor(len(own)) as users:
            states = list(users.map(lambda text: asked(text=first + text), own))
        return _total(_use(state, "t0") for state in states)
    so_far, prompt_tokens, cached_tokens = "", 0, 0
    for turn, text in enumerate(said.texts):
        if turn:
            time.sleep(said.pauses_s[turn - 1])
        so_far += text
        state = answer.run(text=so_far, max_tokens=said.max_tokens, backend=backend)
        so_far += state["t0"]
        prompt, cached = _use(state, "t0")
        prompt_tokens, cached_tokens = prompt_tokens + prompt, cached_tokens + cached
    return prompt_tokens, cached_tokens


def _total(uses: Iterable[tuple[int, int]]) -> tuple[int, int]:
    prompts, cached = zip(*uses, strict=True)
    return sum(prompts), sum(cached)


def _use(state: ProgramState, name: str) -> tuple[int, int]:
    meta = state.get_meta_info(name)
    return int(meta["prompt_tokens"]), int(meta["cached_tokens"])


def _text(rng: random.Random, num_bytes: int) -> str:
    """Words in an order that nobody else has said."""
    return " ".join(rng.choices(_WORDS, k=num_bytes // 5))


_WORDS = (
    "this", "that", "with", "from", "have", "will", "name", "line", "file", "read", "call", "list",
    "text", "time", "user", "data", "next", "open", "test", "true", "none", "self", "type", "over",
)  # fmt: skip
