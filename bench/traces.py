"""Seeded workloads for the schedule simulator: programs, chats, documents, a flood, a full pool.

A job is a generator: it yields calls that run in parallel and is resumed with their outputs once
all have ended. A trace is jobs with their starting times. Token ids are random 32-bit numbers.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Call:
    """One generation: it asks for `max_tokens` and will generate `num_output` of them."""

    prompt: array[int]
    num_output: int
    max_tokens: int
    client: str
    is_cold: bool = False
    delay_s: float = 0.0  # before it is submitted: a person thinks, a tool runs


Job: TypeAlias = Generator[Sequence[Call], list["array[int]"], None]


@dataclass(frozen=True, slots=True)
class Start:
    """A job and when it starts, in seconds."""

    at_s: float
    job: Job


def programs(seed: int, num_requests: int, rate: float) -> list[Start]:
    """Agent trees: plan, 4 to 8 parallel branches of two calls, a join; 8 agents' instructions."""
    rng = random.Random(seed)
    agents = [_tokens(rng, 1024) for _ in range(8)]
    jobs = (_agent(random.Random(rng.random()), agents) for _ in range(num_requests // 14))
    return _poisson(rng, jobs, rate / 14)


def chats(seed: int, num_requests: int, rate: float) -> list[Start]:
    """Conversations of 2 to 10 turns with a second of thought between; 4 system prompts."""
    rng = random.Random(seed)
    systems = [_tokens(rng, 512) for _ in range(4)]
    jobs = (_chat(random.Random(rng.random()), systems) for _ in range(num_requests // 6))
    return _poisson(rng, jobs, rate / 6)


def flood(seed: int, num_requests: int, rate: float) -> list[Start]:
    """Many short calls on 2 hot prefixes of 2,048 tokens; one call in 200 is cold, with 512."""
    rng = random.Random(seed)
    hot = [_tokens(rng, 2048) for _ in range(2)]
    calls = []
    for _ in range(num_requests):
        if rng.random() < 0.005:
            calls.append(Call(_tokens(rng, 512), 8, 16, "cold", is_cold=True))
        else:
            calls.append(Call(rng.choice(hot) + _tokens(rng, 8), rng.randint(1, 4), 16, "hot"))
    return _poisson(rng, map(single, calls), rate)


def full(seed: int, num_requests: int, rate: float) -> list[Start]:
    """Nothing shared; clients ask for 1,024 tokens and use 10% to 100% of them, some always all."""
    rng = random.Random(seed)
    calls = []
    for _ in range(num_requests):
        is_honest = rng.random() < 0.2
        num_output = 1024 if is_honest else rng.randint(100, 1024)
        client = "honest" if is_honest else "careless"
        calls.append(Call(_tokens(rng, rng.randint(64, 512)), num_output, 1024, client))
    return _poisson(rng, map(single, calls), rate)


def single(call: Call) -> Job:
    """A job of one call."""
    yield [call]


def documents(seed: int, num_requests: int, rate: float) -> list[Start]:
    """Questions on 64 documents of 1,500 tokens, in any order, faster than they are answered."""
    rng = random.Random(seed)
    texts = [_tokens(rng, 1500) for _ in range(64)]
    calls = (
        Call(rng.choice(texts) + _tokens(rng, 32), 16, 32, "reader") for _ in range(num_requests)
    )
    return _poisson(rng, map(single, calls), rate)


TRACES: dict[str, Callable[[int, int, float], list[Start]]] = {
    make.__name__: make for make in (programs, chats, documents, flood, full)
}


def _agent(rng: random.Random, agents: Sequence[array[int]]) -> Job:
    root = rng.choice(agents) + _tokens(rng, rng.randint(32, 256))
    (plan,) = yield [Call(root, rng.randint(16, 64), 256, "agent")]
    root = root + plan
    heads = [root + _tokens(rng, 24) for _ in range(rng.randint(4, 8))]
    first = yield [Call(head, rng.randint(8, 64), 128, "branch") for head in heads]
    heads = [head + out + _tokens(rng, 64) for head, out in zip(heads, first, strict=True)]
    second = yield [Call(head, rng.randint(8, 64), 128, "branch", delay_s=0.2) for head in heads]
    for out in second:
        root = root + out
    yield [Call(root, rng.randint(32, 128), 256, "agent")]


def _chat(rng: random.Random, systems: Sequence[array[int]]) -> Job:
    history = rng.choice(systems)[:]
    for turn in range(rng.randint(2, 10)):
        history = history + _tokens(rng, rng.randint(16, 128))
        delay_s = rng.expovariate(1.0) if turn else 0.0
        num_output = rng.randint(16, 160)
        (out,) = yield [Call(history, num_output, 512, "chat", delay_s=delay_s)]
        history = history + out


def _poisson(
    rng: random.Random, jobs: Generator[Job, None, None] | map[Job], rate: float
) -> list[Start]:
    """Jobs that start independently of each other, `rate` a second on average."""
    at_s = 0.0
    starts = []
    for job in jobs:
        starts.append(Start(at_s, job))
        at_s += rng.expovariate(rate)
    return starts


def _tokens(rng: random.Random, num_tokens: int) -> array[int]:
    return array("i", rng.randbytes(4 * num_tokens))
