"""Seeded workloads for the schedule simulator: programs, chats, documents, a flood, a full pool;
ReAct agents, short programs among long ones, fork and join.

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
    """One generation: requests `max_tokens` and will generate `num_output` of them."""

    prompt: array[int]
    num_output: int
    max_tokens: int
    client: str
    is_cold: bool = False
    delay_s: float = 0.0  # before it is submitted: a user thinks, a tool runs
    num_calls_left: int = 0  # in sequence from here on, including this one; 0: not known


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
    """Conversations of 2 to 10 turns with one second of think time between; 4 system prompts."""
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
    """Questions on 64 documents of 1,500 tokens, in random order, faster than they are answered."""
    rng = random.Random(seed)
    texts = [_tokens(rng, 1500) for _ in range(64)]
    calls = (
        Call(rng.choice(texts) + _tokens(rng, 32), 16, 32, "reader") for _ in range(num_requests)
    )
    return _poisson(rng, map(single, calls), rate)


def react(seed: int, num_requests: int, rate: float) -> list[Start]:
    """ReAct agents of 6 turns that start at `rate` a second: 384 common tokens, 256 of their own,
    24 generated and 96 observed a turn, tools that take 0.2 to 3 seconds."""
    rng = random.Random(seed)
    common = _tokens(rng, 384)
    jobs = (_react(random.Random(rng.random()), common) for _ in range(num_requests // 6))
    return _poisson(rng, jobs, rate)


def long_agents(seed: int, num_requests: int, rate: float) -> list[Start]:
    """Agents that start at `rate` a second, most with a few turns and a few with up to 60 (Pareto,
    exponent 1): 384 common tokens, 256 of their own, 24 generated and 96 observed a turn, tools
    that take 0.2 to 3 seconds."""
    rng = random.Random(seed)
    common = _tokens(rng, 384)
    turns = [min(60, int(3 * rng.paretovariate(1.0))) for _ in range(num_requests)]
    jobs = (_react(random.Random(rng.random()), common, num_turns) for num_turns in turns)
    return _poisson(rng, jobs, rate)


def mixed(seed: int, num_requests: int, rate: float) -> list[Start]:
    """One program in 9 is long, with 20 calls; the others have a call or two."""
    rng = random.Random(seed)
    common = _tokens(rng, 128)
    num_long = max(1, num_requests // 32)  # 20 calls, and 8 programs of 1.5
    kinds = [_long] * num_long + [_short] * (8 * num_long)
    rng.shuffle(kinds)
    jobs = (kind(random.Random(rng.random()), common) for kind in kinds)
    return _poisson(rng, jobs, rate)


def forks(seed: int, num_requests: int, rate: float) -> list[Start]:
    """Programs whose graph is known: 4 branches of 1 to 4 calls each, then a join."""
    rng = random.Random(seed)
    common = _tokens(rng, 256)
    jobs = (_fork_and_join(random.Random(rng.random()), common) for _ in range(num_requests // 12))
    return _poisson(rng, jobs, rate)


TRACES: dict[str, Callable[[int, int, float], list[Start]]] = {
    make.__name__: make
    for make in (programs, chats, documents, flood, full, react, long_agents, mixed, forks)
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


def _react(rng: random.Random, common: array[int], num_turns: int = 6) -> Job:
    context = common + _tokens(rng, 256)
    for turn in range(num_turns):
        delay_s = rng.uniform(0.2, 3.0) if turn else 0.0
        (out,) = yield [Call(context, 24, 48, "react", delay_s=delay_s)]
        context = context + out + _tokens(rng, 96)


def _short(rng: random.Random, common: array[int]) -> Job:
    context = common + _tokens(rng, 128)
    for _ in range(rng.randint(1, 2)):
        (out,) = yield [Call(context, 24, 48, "short")]
        context = context + out + _tokens(rng, 128)


def _long(rng: random.Random, common: array[int]) -> Job:
    """A plan, then rounds of 4 parallel calls on a passage each, which no later call continues."""
    plan = common + _tokens(rng, 256)
    (out,) = yield [Call(plan, 48, 96, "long")]
    plan = plan + out
    for _ in range(5):
        yield [Call(plan + _tokens(rng, 768), 48, 96, "long") for _ in range(4)]


def _fork_and_join(rng: random.Random, common: array[int]) -> Job:
    """The branches of a turn run in parallel; those with the most turns delay the join."""
    root = common + _tokens(rng, 192)
    lengths = [1, 2, 3, 4]
    (plan,) = yield [Call(root, 32, 64, "root", num_calls_left=6)]
    root = root + plan
    branches = {length: root + _tokens(rng, 32) for length in lengths}
    while branches:
        outs = yield [
            Call(branch, rng.randint(16, 48), 64, "branch", num_calls_left=1 + length)
            for length, branch in branches.items()
        ]
        branches = {
            length: branch + out + _tokens(rng, 64)
            for (length, branch), out in zip(branches.items(), outs, strict=True)
        }
        branches = {length - 1: branch for length, branch in branches.items() if length > 1}
    yield [Call(root + _tokens(rng, 192), 64, 128, "root", num_calls_left=1)]


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
