"""Drafters whose guesses a test decides: they know the outputs, and tell them or something else."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from stemma.runtime.engine import Engine
from stemma.runtime.schedule.speculation import Speculation
from stemma.runtime.speculate.drafter import Draft, Side, Subject
from stemma.runtime.speculate.drafting import Drafting

# From what follows to what is guessed.
Guess = Callable[[Sequence[int]], "Sequence[int] | Draft"]


class ScriptedDrafter:
    """Guesses what an output is known to go on with, changed by `guess`."""

    def __init__(self, outputs: Mapping[tuple[int, ...], Sequence[int]], guess: Guess) -> None:
        """`outputs` by prompt; others get no draft."""
        self._outputs = outputs
        self._guess = guess

    def open(self, subject: Subject) -> ScriptedText | None:
        output = self._outputs.get(tuple(subject.prompt))
        return None if output is None else ScriptedText(output, self._guess)


class ScriptedText:
    def __init__(self, output: Sequence[int], guess: Guess) -> None:
        self._output = output
        self._guess = guess
        self._num_seen = 0
        self.num_closed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        expected = self._output[self._num_seen : self._num_seen + len(tokens)]
        assert list(tokens) == list(expected), "the output is another one"
        self._num_seen += len(tokens)

    def propose(self, room: int, tail: Sequence[int] = ()) -> Draft:
        guessed = self._guess(self._output[self._num_seen + len(tail) :])
        if isinstance(guessed, Draft):
            return guessed if len(guessed.tokens) <= room else guessed.first(room)
        tokens = tuple(guessed)[:room]
        return Draft(tokens, (0.9,) * len(tokens), "scripted")

    def note(self, draft: Draft, num_accepted: int) -> None:
        assert 0 <= num_accepted <= len(draft.tokens)

    def close(self) -> None:
        self.num_closed += 1
        assert self.num_closed == 1


def oracle(follows: Sequence[int]) -> Sequence[int]:
    return follows


def always_wrong(follows: Sequence[int]) -> Sequence[int]:
    return [token_id ^ 2 for token_id in follows]


def sometimes_right(rng: random.Random) -> Guess:
    def guess(follows: Sequence[int]) -> Sequence[int]:
        wanted = follows[: rng.randrange(8)]
        return [t if rng.random() < 0.8 else rng.randrange(256) for t in wanted]

    return guess


def branching(rng: random.Random) -> Guess:
    """Trees of tokens of which at most one path is right, wherever it runs."""

    def guess(follows: Sequence[int]) -> Draft:
        num_own, num_sides = rng.randrange(4), rng.randrange(1, 6)
        nodes: list[tuple[int, int]] = []  # what each is behind, and its token
        right = [-1]  # those that are right, each behind the one before
        for number in range(num_own + num_sides):
            behind = number - 1
            if number >= num_own:
                behind = rng.choice((right[-1], rng.randrange(-1, number)))
            token_id = rng.randrange(256)
            if behind == right[-1] and len(right) <= len(follows) and rng.random() < 0.7:
                token_id = follows[len(right) - 1]
                right.append(number)
            nodes.append((behind, token_id))
        own = tuple([token_id for _, token_id in nodes[:num_own]])
        sides = tuple([Side(*node, 0.5) for node in nodes[num_own:]])
        return Draft(own, (0.9,) * num_own, "scripted", sides=sides)

    return guess


def speculate(engine: Engine, drafter: ScriptedDrafter, max_drafts: int = 6) -> Speculation:
    """Make an engine verify this drafter's guesses, whatever they cost."""
    scheduler = engine.scheduler
    drafting = Drafting((drafter,), max_drafts)
    speculation = Speculation(drafting, scheduler._mask_words, scheduler.stats)
    verify_all(speculation)
    scheduler.speculation = speculation
    return speculation


def verify_all(speculation: Speculation) -> None:
    """Whatever a guess costs, and however unlikely it is."""
    speculation._budget.lengths = (  # type: ignore[method-assign]
        lambda num_tokens, bids, room: _all_within(room, [len(bid.chances) for bid in bids])
    )
    speculation._budget.least_chance = lambda *_: 0.0  # type: ignore[method-assign]


def _all_within(room: int, lengths: Sequence[int]) -> list[int]:
    taken = []
    for length in lengths:
        taken.append(min(length, room))
        room -= taken[-1]
    return taken
