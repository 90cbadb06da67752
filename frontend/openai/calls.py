"""Gens and selects as HTTP calls to one model; knows prompts and parameters, not programs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import DeadlineExceeded, EngineError, InvalidProgram, StemmaError
from ..protocol.choices import ChoiceScore, decide
from ..protocol.constraint import Constraint, schema_text
from ..protocol.ir import GenParams, Hint, Select
from .bodies import gen_body
from .client_transcript import Prompt
from .flavors import Flavor
from .http_client import HttpClient, Timing
from .replies import Answer, Reply, choice_logprobs
from .speculation import MAX_TRIES, Draft, Filled, Slot, matched
from .stops import Stop, Stops

OnDelta = Callable[[str], None]


class PatternMismatch(StemmaError):
    """No answer contained the literal text that the program has between its gens."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call, as in a value event; the branch continues with `text`."""

    value: Any
    text: str
    meta: Any  # a list of dicts where `value` is a list


@dataclass(slots=True)
class TokenUsage:
    """Token counts reported by an endpoint so far, and the number of calls."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_api_calls: int = 0

    def reset(self) -> None:
        """Count from zero."""
        self.prompt_tokens = self.completion_tokens = self.num_api_calls = 0

    def add(self, counts: dict[str, Any], num_calls: int) -> None:
        """Add what one call used."""
        self.prompt_tokens += counts["prompt_tokens"] or 0
        self.completion_tokens += counts["completion_tokens"] or 0
        self.num_api_calls += num_calls


class Caller:
    """Sends requests for one model to one endpoint."""

    def __init__(self, client: HttpClient, flavor: Flavor, model: str, usage: TokenUsage) -> None:
        self.flavor = flavor
        self._client = client
        self._model = model
        self._usage = usage

    def can_continue(self, prompt: Prompt) -> bool:
        """Whether a call can continue a partial assistant message."""
        return not prompt.is_chat or self.flavor.continuation is not None

    async def gen(
        self, prompt: Prompt, params: GenParams, seed: int, on_delta: OnDelta | None = None
    ) -> Outcome:
        """One generation, or `params.n` of them. `on_delta` receives the first one's text as it
        streams. Raises InvalidRequest, EngineError, DeadlineExceeded."""
        body = gen_body(self.flavor, self._model, prompt, params, seed)
        call = _GenCall(self.flavor, prompt, params, on_delta)
        try:
            async with asyncio.timeout(params.deadline_s):
                timing = await self._post(prompt, {**body, **call.stream_fields()}, call.take)
        except TimeoutError as error:
            message = f"no answer within deadline_s={params.deadline_s:g}"
            raise DeadlineExceeded(message) from error
        outcome = call.outcome(timing)
        self._usage.add(call.reply.counts(), timing.num_attempts)
        return outcome

    async def select(self, prompt: Prompt, op: Select) -> Outcome:
        """One of `op.choices`: by their log probabilities where the endpoint reports those of a
        prompt; else greedily under a constraint; else by the model's answer under a JSON schema.

        Raises InvalidProgram for a method that the endpoint does not support.
        """
        if op.method == "unconditional_likelihood_normalized":
            raise InvalidProgram(
                f"choices_method: {op.method} needs log probabilities without context, which no "
                "call over HTTP gives; use another method, or a runtime over ZeroMQ",
                "choices_method",
            )
        if self.flavor.can_score and not prompt.is_chat:
            return await self._select_by_score(prompt, op)
        return await self._select_by_constraint(prompt, op)

    async def draft(
        self, prompt: Prompt, params: GenParams, seed: int, num_tokens: int
    ) -> tuple[Draft, dict[str, Any]]:
        """An answer of `num_tokens` that does not end at a stop string, and its meta."""
        wanted = replace(params, stop=None, max_tokens=num_tokens)
        outcome = await self.gen(prompt, wanted, seed)
        meta: dict[str, Any] = outcome.meta
        return Draft(outcome.text, meta["finish_reason"] == "stop", None), meta

    async def fill(
        self,
        prompt: Prompt,
        terms: Sequence[str | Slot],
        params: GenParams,
        seed: int,
        num_tokens: int,
    ) -> Filling:
        """Ask until an answer matches the pattern. Raises PatternMismatch after MAX_TRIES."""
        draft, counts = Draft("", True, None), {"prompt_tokens": 0, "completion_tokens": 0}
        for number in range(1, MAX_TRIES + 1):
            draft, meta = await self.draft(prompt, params, seed + number - 1, num_tokens)
            counts = {name: counts[name] + (meta[name] or 0) for name in counts}
            filled = matched(terms, draft.text)
            if filled is not None:
                meta |= {**counts, "num_api_calls": number}
                return Filling(filled, draft, meta)
        raise PatternMismatch(
            f"{MAX_TRIES} answers did not have the text between this message's gens; the last one: "
            f"{draft.text[:200]!r}. Show the format in the prompt, or raise num_api_spec_tokens"
        )

    async def hint(self, target: dict[str, str] | None, op: Hint) -> dict[str, Any]:
        """The outcome of an action on the KV of `target`, as the server's /kv_hints reports it;
        never an error. `target` None: there is none yet."""
        action_id = f"{op.branch}.{op.seq}"
        if not self.flavor.takes_hints:
            reason = "an endpoint over HTTP has no KV that a program could act on"
            return _hint_outcome(action_id, "rejected", reason)
        if target is None:
            reason = "the branch has nothing yet that the server could know"
            return _hint_outcome(action_id, "missing", reason)
        given = {"ttl_ms": op.ttl_ms, "priority": op.priority, "tier": op.tier}
        payload = {"target": target, **{k: v for k, v in given.items() if v is not None}}
        action = {"action_id": action_id, "action_type": op.action, "payload": payload}
        answers: list[dict[str, Any]] = []
        try:
            await self._client.post("/kv_hints", {"actions": [action]}, _kept_by(answers))
            return dict(answers[0]["outcomes"][0])
        except (StemmaError, LookupError, TypeError, ValueError) as error:
            return _hint_outcome(action_id, "rejected", f"{type(error).__name__}: {error}")

    async def _post(
        self, prompt: Prompt, body: dict[str, Any], take: Callable[[dict[str, Any]], bool]
    ) -> Timing:
        path = "chat/completions" if prompt.is_chat else "completions"
        return await self._client.post(path, body, take)

    # --- select -----------------------------------------------------------------------------------

    async def _select_by_score(self, prompt: Prompt, op: Select) -> Outcome:
        started = time.monotonic()
        scored = await _all_of([self._score(prompt, choice) for choice in op.choices])
        scores = [ChoiceScore((), logprobs) for logprobs, _ in scored]
        best = decide(op.method, scores)
        meta: dict[str, Any] = {
            "prompt_tokens": sum(reply.counts()["prompt_tokens"] or 0 for _, reply in scored),
            "cached_tokens": sum(reply.counts()["cached_tokens"] or 0 for _, reply in scored),
            "completion_tokens": 0,
            "finish_reason": "stop",
            "latency_s": time.monotonic() - started,
            "num_api_calls": len(scored),
            "choices_method": op.method,
            "choice_logprobs": [score.mean_logprob for score in scores],
            "choice_token_logprobs": [list(score.logprobs) for score in scores],
        }
        return Outcome(op.choices[best], op.choices[best], meta)

    async def _score(self, prompt: Prompt, choice: str) -> tuple[tuple[float, ...], Reply]:
        text = prompt.text + choice
        body = {"model": self._model, "prompt": text, "echo": True, "logprobs": 1}
        body |= {"max_tokens": 1, "temperature": 0}
        reply = Reply(is_chat=False)
        timing = await self._post(prompt, body, lambda payload: bool(reply.add(payload)))
        self._usage.add(reply.counts(), timing.num_attempts)
        return choice_logprobs(reply.answers[0], text, choice), reply

    async def _select_by_constraint(self, prompt: Prompt, op: Select) -> Outcome:
        is_json = "choices" not in self.flavor.constraints
        if is_json:
            constraint = Constraint("json_schema", schema_text(_choice_schema(op.choices)))
        else:
            constraint = Constraint("choices", json.dumps(op.choices, ensure_ascii=False))
        longest = max(len(choice.encode()) for choice in op.choices)
        params = GenParams(max_tokens=longest + 32, temperature=0, constraint=constraint)
        outcome = await self.gen(prompt, params, 0)
        chosen = _choice_of(outcome.text) if is_json else outcome.text
        if chosen not in op.choices:
            raise EngineError(f"the endpoint answered {outcome.text[:200]!r}: none of the choices")
        method = "json_schema" if is_json else "greedy_token_selection"
        return Outcome(chosen, chosen, {**outcome.meta, "choices_method": method})


@dataclass(frozen=True, slots=True)
class Filling:
    """What one answer contained for a pattern's slots."""

    filled: list[Filled]
    draft: Draft
    meta: dict[str, Any]


class _GenCall:
    """One running call: its output so far, where it ends, what was passed on."""

    def __init__(
        self, flavor: Flavor, prompt: Prompt, params: GenParams, on_delta: OnDelta | None
    ) -> None:
        num = params.n or 1
        stop = params.stop or ()
        own = () if flavor.max_stops is None else stop[flavor.max_stops :]
        self._stops = Stops(own, params.stop_regex or ())
        self._on_delta = on_delta
        self._is_single = num == 1
        has_use = on_delta is not None or (bool(self._stops) and self._is_single)
        self._is_streamed = has_use and (params.logprobs is None or flavor.streams_logprobs)
        self._num_sent = 0
        self._started = time.monotonic()
        self._first_s: float | None = None
        self.reply = Reply(is_chat=prompt.is_chat, num_choices=num)

    def stream_fields(self) -> dict[str, Any]:
        if not self._is_streamed:
            return {}
        return {"stream": True, "stream_options": {"include_usage": True}}

    def take(self, payload: dict[str, Any]) -> bool:
        """Accept a body or chunk; False once one of our stops has ended the only answer."""
        if self.reply.add(payload) and self._first_s is None:
            self._first_s = time.monotonic() - self._started
        text = self.reply.answers[0].text
        stop = self._stops.find(text)
        self._send(text[: stop.position] if stop else text[: self._stops.num_sure(text)])
        return stop is None or not self._is_single

    def _send(self, text: str) -> None:
        if self._on_delta is not None and len(text) > self._num_sent:
            self._on_delta(text[self._num_sent :])
            self._num_sent = len(text)

    def outcome(self, timing: Timing) -> Outcome:
        """The value. With several samples, only the first one's meta has the call's counts."""
        ends = [self._cut(answer) for answer in self.reply.answers]
        metas = [
            self._meta(answer, stop, timing, is_first=index == 0)
            for index, (answer, stop) in enumerate(zip(self.reply.answers, ends))
        ]
        texts = [answer.text for answer in self.reply.answers]
        self._send(texts[0])
        if self._is_single:
            return Outcome(texts[0], texts[0], metas[0])
        return Outcome(texts, texts[0], metas)

    def _cut(self, answer: Answer) -> Stop | None:
        stop = self._stops.find(answer.text)
        if stop is None:
            if answer.finish_reason is None:
                raise EngineError("the endpoint's answer has no finish_reason: it was cut off")
            return None
        answer.text = answer.text[: stop.position]
        answer.finish_reason = "stop"
        if answer.logprobs is not None:
            answer.logprobs = _within(answer.logprobs, stop.position)
        return stop

    def _meta(
        self, answer: Answer, stop: Stop | None, timing: Timing, *, is_first: bool
    ) -> dict[str, Any]:
        latency_s = time.monotonic() - self._started
        counts = self.reply.counts()
        meta: dict[str, Any] = {
            "id": self.reply.id,
            **(counts if is_first else dict.fromkeys(counts, 0)),
            "queue_s": timing.queue_s,
            "time_to_first_token_s": latency_s if self._first_s is None else self._first_s,
            "latency_s": latency_s,
            "finish_reason": answer.finish_reason,
            "num_api_calls": int(is_first),
            "num_retries": timing.num_attempts - 1 if is_first else 0,
        }
        if stop is not None:
            meta["matched_stop"] = stop.matched
        if answer.logprobs is not None:
            meta["logprobs"] = answer.logprobs
        if answer.warnings:
            meta["warnings"] = answer.warnings
        if answer.tool_calls:
            meta["tool_calls"] = answer.tool_calls
        return meta


def _within(logprobs: list[dict[str, Any]], num_chars: int) -> list[dict[str, Any]]:
    """The entries of tokens that lie within the first `num_chars`."""
    kept, end = [], 0
    for entry in logprobs:
        end += len(entry["token"])
        if end > num_chars:
            break
        kept.append(entry)
    return kept


def _hint_outcome(action_id: str, outcome: str, reason: str) -> dict[str, Any]:
    return {"action_id": action_id, "outcome": outcome, "reason": reason, "num_tokens": 0}


def _kept_by(answers: list[dict[str, Any]]) -> Callable[[dict[str, Any]], bool]:
    def keep(payload: dict[str, Any]) -> bool:
        answers.append(payload)
        return True

    return keep


def _choice_schema(choices: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"choice": {"type": "string", "enum": list(choices)}},
        "required": ["choice"],
        "additionalProperties": False,
    }


def _choice_of(text: str) -> object:
    try:
        return json.loads(text)["choice"]
    except (KeyError, TypeError, ValueError):
        return None


async def _all_of(works: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of all; the first failure cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
