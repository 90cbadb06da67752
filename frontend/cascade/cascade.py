"""The cascade itself: models in order of size, asked one after the other until an answer is taken.

    small    answers                    the rule says a bar for it (`acceptance`)
    large    scores that answer         one step, which reads it whole
             keeps its beginning        up to the first token whose probability is below the bar
             goes on behind it          the smaller model's answer is its prediction, so that what
                                        both would say is verified and not generated

With a bar of 0 the large model is not asked; above 1 it answers as if alone, but for the
prediction, which changes no output. Models may have different tokenizers: an answer is passed on as
text, and tokenized by who reads it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...errors import InvalidProgram
from ..client.client import Connection
from ..protocol.ir import GenParams
from .acceptance import TAKEN, Accept, Answer
from .engine_calls import Ask, EngineCall, OnDelta, OnUsed, num_kept

_REFUSED_PARAMS: Mapping[str, tuple[object, ...]] = {
    "n": (None, 1),
    "beam": (None,),
    "logprob_start": (None,),
    "lora_path": (None, ""),
}
_COUNTS_OF_PREDICTION = ("accepted_prediction_tokens", "rejected_prediction_tokens")


@dataclass(frozen=True, slots=True)
class Member:
    """A model of a cascade. `connect`: its engine, which may have to be started again; raises
    EngineError."""

    name: str
    connect: Callable[[], Awaitable[Connection]]


@dataclass(slots=True)
class MemberCounts:
    """What one model of a cascade has done so far."""

    num_answers: int = 0  # gens that it was asked for
    num_taken: int = 0  # answers of its own to which no larger model added a token
    num_escalated: int = 0  # answers of its own that a larger model wrote at least a token of
    num_scored_tokens: int = 0  # of smaller models' answers: read in one step
    num_kept_tokens: int = 0  # of these: kept
    num_prompt_tokens: int = 0  # of all its calls: computed, not found in its cache
    num_generated_tokens: int = 0


@dataclass(slots=True)
class _Call:
    """What one model did for one answer."""

    model: str
    scored_tokens: int = 0
    kept_tokens: int = 0  # of the answer that it was given
    prompt_tokens: int = 0  # computed
    cached_tokens: int = 0
    generated_tokens: int = 0

    def add(self, meta: Mapping[str, Any], num_scored: int = 0) -> None:
        cached = meta.get("cached_tokens", 0)
        self.prompt_tokens += max(0, meta.get("prompt_tokens", 0) - num_scored - cached)
        self.cached_tokens += cached


class Cascade:
    """Two models or more, the smallest first. `counts`: of each model, in the same order."""

    def __init__(self, members: Sequence[Member], accept: Accept) -> None:
        self.members = tuple(members)
        self.accept = accept
        self.counts = [MemberCounts() for _ in self.members]

    @property
    def name(self) -> str:
        """As servers name it: "cascade:small,large"."""
        return "cascade:" + ",".join(member.name for member in self.members)

    def require(self, params: GenParams) -> None:
        """Raises InvalidProgram for what cascades cannot do."""
        for name, harmless in _REFUSED_PARAMS.items():
            value = getattr(params, name)
            if value not in harmless:
                raise InvalidProgram.of(name, value, "left out: one answer is passed on")
        if params.logprobs is not None and self.accept.wants_scores:
            allowed = "left out where st.agree decides: what is kept was not drawn by one model"
            raise InvalidProgram.of("logprobs", params.logprobs, allowed)

    def counters(self) -> dict[str, dict[str, int]]:
        """The counts, by model."""
        return {m.name: asdict(c) for m, c in zip(self.members, self.counts, strict=True)}


@dataclass(slots=True)
class CascadeCall:
    """One answer of a cascade. Lifetime: that of `answer`."""

    cascade: Cascade
    ask: Ask
    on_used: OnUsed | None = None  # called at the end of each program on an engine
    _running: EngineCall | None = None
    _ends_now: bool = False
    _calls: list[_Call] = field(default_factory=list)

    def end_now(self) -> None:
        """End with what there is, finish reason "abort"."""
        self._ends_now = True
        if self._running is not None:
            self._running.end_now()

    async def answer(self, on_delta: OnDelta | None = None) -> dict[str, Any]:
        """A value event's payload; its meta has a `cascade`. A streamed answer comes in one piece
        where it is taken from a smaller model, and token by token from the largest one. Raises
        InvalidProgram, CallFailed, EngineError, and what a function of the author's raises."""
        cascade, ask = self.cascade, self.ask
        cascade.require(ask.params)
        last = len(cascade.members) - 1
        begun: Sequence[int] = ()
        guess: str | None = None
        author = 0
        for place in range(last):
            value = await self._gen(place, guess, begun, None)
            author = self._author(author, place, value, begun)
            if self._ends_now:
                return self._told(author, value, on_delta)
            bar = await cascade.accept.bar(self._answer_of(place, value))
            if bar <= TAKEN:
                self._count(author, num_taken=1)
                return self._told(author, value, on_delta)
            guess = value["text"] + (value["meta"].get("matched_stop") or "")  # all that it said
            self._calls.append(_Call(cascade.members[place + 1].name))
            begun = await self._kept(place + 1, guess, bar)
        value = await self._gen(last, guess, begun, on_delta)
        author = self._author(author, last, value, begun)
        if author < last:
            self._count(author, num_taken=1)
        return self._told(author, value, None)

    def _author(
        self, before: int, place: int, value: Mapping[str, Any], begun: Sequence[int]
    ) -> int:
        """Who has written the end of an answer which `place` has gone on with."""
        if place == before or (begun and len(value["meta"]["output_ids"]) <= len(begun)):
            return before
        self._count(before, num_escalated=1)
        return place

    async def _gen(
        self, place: int, guess: str | None, begun: Sequence[int], on_delta: OnDelta | None
    ) -> dict[str, Any]:
        params, accept = self.ask.params, self.cascade.accept
        is_largest = place == len(self.cascade.members) - 1
        if params.prediction is None and guess:
            params = replace(params, prediction=guess)
        if accept.wants_logprobs and params.logprobs is None and not is_largest:
            params = replace(params, logprobs=0)
        if not self._calls:
            self._calls.append(_Call(self.cascade.members[place].name))
        running = await self._open(place)
        value = await running.gen(self.ask, params, begun, on_delta)
        call, meta = self._calls[-1], value["meta"]
        before = call.prompt_tokens
        call.add(meta)
        call.generated_tokens = max(0, meta["completion_tokens"] - len(begun))
        self._count(
            place,
            num_answers=1,
            num_prompt_tokens=call.prompt_tokens - before,
            num_generated_tokens=call.generated_tokens,
        )
        return value

    async def _kept(self, place: int, text: str, bar: float) -> Sequence[int]:
        """The beginning of a smaller model's answer in which this one gives each token at least
        that probability, as its own ids. An empty answer has none, and no token is as likely as a
        bar above 1 says: neither is read."""
        if not text or bar > 1.0:
            return ()
        scored = await (await self._open(place)).score(self.ask, text)
        num = num_kept(scored.logprobs, math.log(bar))
        call, num_scored = self._calls[-1], len(scored.ids)
        call.scored_tokens, call.kept_tokens = num_scored, num
        call.add(scored.meta, num_scored)
        self._count(
            place,
            num_scored_tokens=num_scored,
            num_kept_tokens=num,
            num_prompt_tokens=call.prompt_tokens,
        )
        return scored.ids[:num]

    async def _open(self, place: int) -> EngineCall:
        connection = await self.cascade.members[place].connect()
        self._running = running = EngineCall(connection, self.on_used)
        if self._ends_now:
            running.end_now()
        return running

    def _answer_of(self, place: int, value: Mapping[str, Any]) -> Answer:
        meta = value["meta"]
        told = [each["logprob"] for each in meta.get("logprobs") or ()]
        mean = sum(told) / len(told) if told else None
        return Answer(
            value["text"],
            self.ask.prompt,
            self.cascade.members[place].name,
            meta["finish_reason"],
            meta["completion_tokens"],
            mean,
        )

    def _count(self, place: int, **added: int) -> None:
        counts = self.cascade.counts[place]
        for name, value in added.items():
            setattr(counts, name, getattr(counts, name) + value)

    def _told(self, place: int, value: dict[str, Any], on_delta: OnDelta | None) -> dict[str, Any]:
        """The payload, with who has answered; `on_delta`: who has heard nothing of it yet."""
        meta, wants_logprobs = value["meta"], self.ask.params.logprobs is not None
        if not wants_logprobs:
            meta.pop("logprobs", None)
        if self.ask.params.prediction is None:
            for name in _COUNTS_OF_PREDICTION:
                meta.pop(name, None)  # of a smaller model's answer: nobody asked
        meta["cascade"] = {
            "model": self.cascade.members[place].name,
            "kept_tokens": self._calls[-1].kept_tokens,
            "calls": [asdict(call) for call in self._calls],
        }
        if on_delta is not None:
            on_delta(self._whole_delta(value["text"], meta))
        return value

    def _whole_delta(self, text: str, meta: Mapping[str, Any]) -> Any:
        delta: dict[str, Any] = {"text": text}
        if self.ask.params.logprobs is not None:
            delta["logprobs"] = meta["logprobs"]
        if self.ask.create.get("token_ids"):
            names = ("id", "prompt_tokens", "cached_tokens")
            delta |= {"token_ids": meta["output_ids"], **{name: meta[name] for name in names}}
        return delta if len(delta) > 1 else text
