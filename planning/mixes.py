"""Mixes of requests for the simulated fleet: what they ask of prefill and of decode differs most.

Each makes jobs (traces.py) that start independently of each other; `rate` counts calls a second.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .traces import Call, Job, Start, single

_CLIENT = "client"
_CHAT_TURNS = (2, 6)


@dataclass(frozen=True, slots=True)
class Mix:
    """Jobs of one kind, and how many calls one has on average."""

    name: str
    text: str
    jobs: Callable[[random.Random], Callable[[random.Random], Job]]  # what all have in common first
    num_calls: float = 1.0

    def starts(self, seed: int, rate: float, duration_s: float) -> list[Start]:
        """Of so many seconds."""
        rng = random.Random(f"{self.name} {seed}")
        make, starts, at_s = self.jobs(rng), [], 0.0
        while (at_s := at_s + rng.expovariate(rate / self.num_calls)) < duration_s:
            starts.append(Start(at_s, make(random.Random(rng.random()))))
        return starts


def workload(prompt_tokens: int, shared_tokens: int, output_tokens: int) -> Mix:
    """Calls that are all alike."""

    def jobs(rng: random.Random) -> Callable[[random.Random], Job]:
        shared = _tokens(rng, shared_tokens)
        own = prompt_tokens - shared_tokens
        return lambda rng: _one(shared + _tokens(rng, own), output_tokens)

    return Mix("workload", f"{prompt_tokens} of prompt, {output_tokens} of output", jobs)


def _chat(rng: random.Random) -> Callable[[random.Random], Job]:
    systems = [_tokens(rng, 512) for _ in range(4)]

    def job(rng: random.Random) -> Job:
        history = rng.choice(systems)[:]
        for turn in range(rng.randint(*_CHAT_TURNS)):
            history = history + _tokens(rng, rng.randint(32, 224))
            delay_s = rng.expovariate(1.0) if turn else 0.0
            (out,) = yield [_call(history, rng.randint(150, 450), delay_s)]
            history = history + out

    return job


def _rag(rng: random.Random) -> Callable[[random.Random], Job]:
    common = _tokens(rng, 64)
    return lambda rng: _one(common + _tokens(rng, rng.randint(4096, 8192)), rng.randint(32, 128))


def _code(rng: random.Random) -> Callable[[random.Random], Job]:
    projects = [_tokens(rng, 1536) for _ in range(16)]

    def job(rng: random.Random) -> Job:
        prompt = rng.choice(projects) + _tokens(rng, rng.randint(256, 768))
        return _one(prompt, rng.randint(64, 256))

    return job


MIXES: Sequence[Mix] = (
    Mix(
        "chat",
        "2 to 6 turns of 32 to 224 tokens after 512 common ones, answers of 150 to 450",
        _chat,
        sum(_CHAT_TURNS) / 2,
    ),
    Mix("rag", "prompts of 4k to 8k tokens that nobody shares, answers of 32 to 128", _rag),
    Mix("code", "prompts of 2k, 1.5k of them one of 16 projects', answers of 64 to 256", _code),
)


def _one(prompt: array[int], num_output: int) -> Job:
    return single(_call(prompt, num_output, 0.0))


def _call(prompt: array[int], num_output: int, delay_s: float) -> Call:
    return Call(prompt, num_output, num_output, _CLIENT, delay_s=delay_s)


def _tokens(rng: random.Random, num_tokens: int) -> array[int]:
    return array("i", rng.randbytes(4 * num_tokens))
