"""What an engine of a simulated fleet is: the device that it computes on, and its flags."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..runtime.schedule.plan import StepPlan
from ..runtime.schedule.queue.prompt_limits import DEFAULT_SLOWDOWN
from ..runtime.speculate.drafter import Draft, Subject
from ..runtime.speculate.drafting import Drafting

MAX_DRAFT_TOKENS = 8  # of a row: as --draft-tokens by default


class FleetDevice(Protocol):
    """What an engine computes on."""

    @property
    def num_tokens(self) -> int:
        """Of KV."""

    @property
    def max_running_requests(self) -> int:
        """In a batch."""

    @property
    def prefill_token_ms(self) -> float:
        """About what a prompt's token takes."""

    def step_s(self, plan: StepPlan) -> float:
        """How long a step takes, without copies to and from the host tier."""

    def decode_times_s(self, before: Sequence[int], num_steps: int) -> Sequence[float]:
        """The same of so many steps of rows of one token each, behind so many at first, and each
        step a token further; none where only a plan says it."""

    def copy_s(self, num_tokens: int) -> float:
        """How long copies of so many tokens' KV between device and host take."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """How the engines cut prompts, as the flags of an engine say it."""

    token_budget: int = 2048  # --chunked-prefill-size
    decode_slowdown: float = DEFAULT_SLOWDOWN

    def flags(self) -> list[str]:
        """Those that are not as they are by default."""
        flags = []
        if self.token_budget != DEFAULT_CHUNKING.token_budget:
            flags.append(f"--chunked-prefill-size {self.token_budget}")
        if self.decode_slowdown != DEFAULT_CHUNKING.decode_slowdown:
            flags.append(f"--decode-slowdown {self.decode_slowdown:g}")
        return flags


DEFAULT_CHUNKING = Chunking()


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """One engine. `acceptance`: the chance that a guessed token is right where those before it are,
    in (0, 1); 0: nothing is guessed."""

    device: FleetDevice
    chunking: Chunking = DEFAULT_CHUNKING
    host_tokens: int = 0  # KV of the host tier; 0: none
    acceptance: float = 0.0
    has_leases: bool = True  # for programs that wait for a tool
    pool: str = ""  # for figures: engines of one name are alike

    def drafting(self, output_of: Callable[[Subject], array[int]], seed: int) -> Drafting | None:
        """Its drafters; `output_of`: what a request will generate, from its next token on."""
        if not self.acceptance:
            return None
        guesses = _GuessesByChance(self.acceptance, output_of, random.Random(seed))
        return Drafting((guesses,), MAX_DRAFT_TOKENS)


@dataclass(frozen=True, slots=True)
class _GuessesByChance:
    """A drafter whose guesses are right so often, and which knows it. How much of them is worth
    verifying is the engine's own decision (runtime/speculate/budget.py)."""

    acceptance: float
    output_of: Callable[[Subject], array[int]]
    rng: random.Random

    def open(self, subject: Subject) -> _GuessedText:
        return _GuessedText(self, self.output_of(subject))


class _GuessedText:
    """Follows one request."""

    def __init__(self, drafter: _GuessesByChance, output: array[int]) -> None:
        self._drafter = drafter
        self._output = output
        self._num_seen = 0

    def extend(self, tokens: Sequence[int]) -> None:
        self._num_seen += len(tokens)

    def propose(self, room: int, tail: Sequence[int] = ()) -> Draft:
        first = self._num_seen + len(tail)
        rng, acceptance = self._drafter.rng, self._drafter.acceptance
        tokens = tuple(
            token if rng.random() < acceptance else token ^ 1
            for token in self._output[first : first + room]
        )
        return Draft(tokens, (acceptance,) * len(tokens), "simulated")

    def note(self, draft: Draft, num_accepted: int) -> None:
        """It learns nothing."""

    def close(self) -> None:
        """It keeps nothing."""
