"""Which answers of a smaller model are taken: `mean_logprob`, `agree`, or a function.

Each rule reads an answer and says a *bar*: the least probability that the next larger model must
give to each of its tokens for that to be kept. 0 takes the answer without asking, more than 1 takes
nothing of it. So `a | b` is the lower bar of the two, and `a & b` the higher one.

Confidence and a function of one's own: FrugalGPT (Chen et al. 2023, arXiv:2305.05176). A bar on the
larger model's probabilities, token by token: the deferral rules of speculative cascades
(Narasimhan et al. 2024, arXiv:2405.19261).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...errors import InvalidProgram, InvalidRequest
from ..protocol.numbers import Range, plain

TAKEN = 0.0
REFUSED = 2.0  # no probability is as high
_BARS = Range(0, 1, is_above=True)
_LOGPROBS = Range(-1e9, 0)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a function of the author's is asked about."""

    text: str
    prompt: str | list[dict[str, Any]]  # the text, or the messages as in OpenAI's API
    model: str  # who has said it
    finish_reason: str  # "stop" or "length"
    num_tokens: int
    mean_logprob: float | None  # a token; None where no rule asks for it


Judge: TypeAlias = Callable[[Answer], bool | Awaitable[bool]]


class Accept(ABC):
    """A rule; rules are combined by `|` and `&`, also with plain functions."""

    wants_logprobs: bool = False  # of the answer's tokens
    wants_scores: bool = False  # the larger model's, of the answer's tokens

    @abstractmethod
    async def bar(self, answer: Answer) -> float:
        """The least probability with the larger model of each token that is kept."""

    def __or__(self, other: Accept | Judge) -> Accept:
        return _Either(self, rule_of(other))

    def __ror__(self, other: Judge) -> Accept:
        return _Either(rule_of(other), self)

    def __and__(self, other: Accept | Judge) -> Accept:
        return _Both(self, rule_of(other))

    def __rand__(self, other: Judge) -> Accept:
        return _Both(rule_of(other), self)


def mean_logprob(bar: float) -> Accept:
    """Take an answer whose tokens have at least this log probability on average, with the model
    that has said it: its own confidence. At most 0: -0.1 is a mean probability of 0.9."""
    return _MeanLogprob(float(_LOGPROBS.checked("mean_logprob", bar)))


def agree(bar: float) -> Accept:
    """Keep the beginning of an answer in which the larger model gives each token at least this
    probability, above 0 and at most 1. It reads the whole answer in one step, and goes on behind
    what is kept."""
    return _Agree(float(_BARS.checked("agree", bar)))


def rule_of(given: object) -> Accept:
    """A rule, also of a plain or an async function that returns whether an `Answer` will do. Raises
    InvalidProgram."""
    if isinstance(given, Accept):
        return given
    if callable(given):
        return _Judged(given)
    allowed = "st.mean_logprob(bar), st.agree(bar), a function of an answer, or these with | and &"
    raise InvalidProgram.of("accept", given, allowed)


def rule_named(text: str, field: str = "rule") -> Accept:
    """The rule that this text writes: "mean_logprob(-0.1)", "agree(0.5)", or several of these with
    | between them. Raises InvalidRequest, which names `field`."""
    terms = [_TERM.fullmatch(term.strip()) for term in text.split("|")]
    rules = [_MAKERS[term[1]](float(term[2])) for term in terms if term is not None]
    if len(rules) < len(terms):
        allowed = "mean_logprob(BAR) and agree(BAR), with | between them"
        raise InvalidRequest.of(field, text, allowed)
    return functools.reduce(_Either, rules)


@dataclass(frozen=True, slots=True)
class _MeanLogprob(Accept):
    least: float
    wants_logprobs = True

    async def bar(self, answer: Answer) -> float:
        mean = answer.mean_logprob
        return TAKEN if mean is None or mean >= self.least else REFUSED


@dataclass(frozen=True, slots=True)
class _Agree(Accept):
    least: float
    wants_scores = True

    async def bar(self, answer: Answer) -> float:
        return self.least


@dataclass(frozen=True, slots=True)
class _Judged(Accept):
    judge: Judge

    async def bar(self, answer: Answer) -> float:
        try:
            said = await asyncio.to_thread(_outcome, self.judge, answer)  # it may take its time
            if isinstance(said, _Raised):
                raise said.error
            if inspect.isawaitable(said):
                said = await said
        except BaseException as error:  # also a SystemExit, which would end the loop
            task = asyncio.current_task()
            if isinstance(error, GeneratorExit) or (task is not None and task.cancelling()):
                raise  # the program was given up
            name = getattr(self.judge, "__name__", "the function")
            message = f"accept: {name} raised {type(error).__name__}: {error}"
            raise InvalidProgram(message, "accept") from error
        verdict = plain(said)
        if not isinstance(verdict, bool):
            raise InvalidProgram.of("accept", said, "a function that returns True or False")
        return TAKEN if verdict else REFUSED


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


def _outcome(judge: Judge, answer: Answer) -> object:
    """What it returns or raises: a SystemExit that a thread's future passed on would end the loop,
    and a StopIteration cannot be passed on."""
    try:
        return judge(answer)
    except BaseException as error:
        return _Raised(error)


class _Pair(Accept):
    def __init__(self, first: Accept, second: Accept) -> None:
        self._first, self._second = first, second
        self.wants_logprobs = first.wants_logprobs or second.wants_logprobs
        self.wants_scores = first.wants_scores or second.wants_scores

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._first!r}, {self._second!r})"


class _Either(_Pair):
    async def bar(self, answer: Answer) -> float:
        first = await self._first.bar(answer)
        return first if first == TAKEN else min(first, await self._second.bar(answer))


class _Both(_Pair):
    async def bar(self, answer: Answer) -> float:
        first = await self._first.bar(answer)
        return first if first == REFUSED else max(first, await self._second.bar(answer))


_TERM = re.compile(r"(mean_logprob|agree)\((-?(?:\d+\.?\d*|\.\d+))\)")
_MAKERS = {"mean_logprob": mean_logprob, "agree": agree}
