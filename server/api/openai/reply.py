"""What the responses of OpenAI's completion endpoints have in common.

A stream's chunk costs its text: the fixed parts are encoded once, when its sample begins.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import orjson

from ...protocol.failures import failure_of
from ...protocol.pieces import GenerationFailed, Outcome, Piece
from ...protocol.server_sent_events import DONE, event

_COUNTS_OF_OUTPUT = ("forced_tokens", "drafted_tokens", "accepted_tokens")
_COUNTS_OF_PREDICTION = ("accepted_prediction_tokens", "rejected_prediction_tokens")
_TIMES = ("queue_s", "prefill_s", "decode_s", "latency_s")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The response options that a client requested."""

    n: int = 1  # choices for each prompt
    num_drawn: int | None = None  # samples of each prompt, of which the n likeliest are returned
    includes_usage: bool = False  # in the last chunk of a stream
    has_running_usage: bool = False  # in every chunk
    has_token_ids: bool = False
    num_logprobs: int | None = None  # of the likeliest tokens at each position
    num_prompt_logprobs: int | None = None  # the same for the prompt: vLLM's field
    has_stop_text: bool = False  # the text includes the stop string
    has_timing: bool = False

    @property
    def needs_token_ids(self) -> bool:
        """Whether a stream needs them."""
        return self.has_token_ids or self.has_running_usage


def usage(
    outcomes: Sequence[Outcome], n: int = 1, *, num_reasoning: int = 0, has_timing: bool = False
) -> dict[str, Any]:
    """Token counts; a prompt counts once, however many samples (`n`) were drawn from it. Those of a
    prediction are there where one was given."""
    completion = sum(outcome.meta["completion_tokens"] for outcome in outcomes)
    prompt = sum(outcome.meta["prompt_tokens"] for outcome in outcomes[::n])
    cached = sum(outcome.meta["cached_tokens"] for outcome in outcomes[::n])
    details = {name: _total(outcomes, name) for name in _COUNTS_OF_OUTPUT}
    if any(_COUNTS_OF_PREDICTION[0] in outcome.meta for outcome in outcomes):
        details |= {name: _total(outcomes, name) for name in _COUNTS_OF_PREDICTION}
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning, **details},
    }
    return {**counts, "timing": timing(outcomes)} if has_timing else counts


def _total(outcomes: Sequence[Outcome], name: str) -> int:
    return sum(outcome.meta.get(name, 0) for outcome in outcomes)


def timing(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """In seconds; of several samples the longest, and the earliest first token."""
    longest = {name: max(outcome.meta[name] for outcome in outcomes) for name in _TIMES}
    soonest = min(outcome.meta["time_to_first_token_s"] for outcome in outcomes)
    return {**longest, "time_to_first_token_s": soonest}


class Sample:
    """What a stream has said of one sample, the tokens that wait to go with its next chunk, and a
    chunk of nothing but text, before and behind that."""

    __slots__ = ("cached_tokens", "head", "index", "logprobs", "num_tokens", "prompt_tokens",
                 "tail", "token_ids")  # fmt: skip

    def __init__(self, index: int, around_text: tuple[bytes, bytes]) -> None:
        self.index = index
        self.head, self.tail = around_text
        self.logprobs: list[dict[str, Any]] = []
        self.token_ids: list[int] = []
        self.num_tokens = self.prompt_tokens = self.cached_tokens = 0

    def hold(self, piece: Piece) -> None:
        """Hold its tokens for the next chunk."""
        if piece.logprobs is not None:
            self.logprobs += piece.logprobs
        if piece.token_ids is not None:
            self.token_ids += piece.token_ids
            self.num_tokens += len(piece.token_ids)
        if piece.prompt_tokens is not None:
            self.prompt_tokens, self.cached_tokens = piece.prompt_tokens, piece.cached_tokens

    def take_logprobs(self) -> list[dict[str, Any]]:
        """Take the held entries."""
        taken, self.logprobs = self.logprobs, []
        return taken

    def take_token_ids(self) -> list[int]:
        """Take the held ids."""
        taken, self.token_ids = self.token_ids, []
        return taken


_S = TypeVar("_S", bound=Sample)


class CompletionReply(Generic[_S]):
    """Id, model and time that all bodies of one answer share."""

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(
        self, model: str, wanted: Wanted | None = None, *, fingerprint: str | None = None
    ) -> None:
        """`fingerprint`: of the model and of the software that runs it."""
        self.wanted = wanted = wanted or Wanted()
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._num_drawn = wanted.num_drawn or wanted.n
        self._chunk_usage = {"usage": None} if wanted.includes_usage else {}
        has_tokens = wanted.needs_token_ids or wanted.num_logprobs is not None
        self._is_plain = not has_tokens
        self._samples: dict[int, _S] = {}

    def whole(self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None) -> dict[str, Any]:
        choices = [self.choice(outcome) for outcome in self._chosen(outcomes)]
        body = {**self._head, "object": self.whole_object, "choices": choices}
        body["usage"] = self._usage(outcomes)
        return body if hints is None else {**body, "kv_hints": hints}

    def close(self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None) -> bytes:
        head = {**self._head, "object": self.chunk_object, "choices": []}
        last = b"" if hints is None else event({**head, **self._chunk_usage, "kv_hints": hints})
        if self.wanted.includes_usage:
            last += event({**head, "usage": self._usage(outcomes)})
        return last + DONE

    def failed(self, error: GenerationFailed) -> bytes:
        return event(failure_of(error).body)

    def choice(self, outcome: Outcome) -> dict[str, Any]:
        """A finished choice."""
        raise NotImplementedError

    def num_reasoning_tokens(self, outcomes: Sequence[Outcome]) -> int:
        """Of all samples; call it after their choices or ends were formatted."""
        return 0

    def _chosen(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The n likeliest samples of each prompt, numbered anew."""
        n, drawn = self.wanted.n, self._num_drawn
        if n == drawn:
            return list(outcomes)
        prompts = [outcomes[first : first + drawn] for first in range(0, len(outcomes), drawn)]
        best = [o for samples in prompts for o in sorted(samples, key=_unlikeliness)[:n]]
        return [replace(outcome, index=index) for index, outcome in enumerate(best)]

    def _usage(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        return usage(
            outcomes,
            self._num_drawn,
            num_reasoning=self.num_reasoning_tokens(outcomes),
            has_timing=self.wanted.has_timing,
        )

    def _with_stop_text(self, outcome: Outcome) -> Outcome:
        """The outcome with the stop string in its text, where that is requested."""
        stop_text = self._stop_text(outcome)
        return replace(outcome, text=outcome.text + stop_text) if stop_text else outcome

    def _stop_text(self, outcome: Outcome) -> str:
        matched: str = outcome.meta.get("matched_stop") or ""
        return matched if self.wanted.has_stop_text else ""

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        head = {**self._head, "object": self.chunk_object, "choices": [choice]}
        return {**head, **self._chunk_usage}

    def _around_text(self, choice: dict[str, Any]) -> tuple[bytes, bytes]:
        """The chunk of this choice before and after TEXT."""
        head, tail = event(self._chunk(choice)).rsplit(orjson.dumps(TEXT), 1)
        return head, tail

    def _chunk_of_tokens(
        self,
        sample: _S,
        choice: dict[str, Any],
        reason: str | None,
        extras: dict[str, Any] | None,
    ) -> bytes:
        """A chunk with the ids that waited, where these are wanted."""
        choice |= {"finish_reason": reason, **(extras or {})}
        if self.wanted.has_token_ids:
            choice["token_ids"] = sample.take_token_ids()
        return self._event(choice)

    def _event(self, choice: dict[str, Any]) -> bytes:
        """A chunk with the usage of all samples so far, where that is wanted."""
        chunk = self._chunk(choice)
        if self.wanted.has_running_usage:
            chunk["usage"] = _running_usage(self._samples.values(), self._num_drawn)
        return event(chunk)


TEXT = "\0text\0"  # placeholder of the text in a chunk that is encoded beforehand


def extras_of(outcome: Outcome) -> dict[str, Any]:
    """Fields that only some choices have: `warnings`, what of a schema was not enforced or not
    fulfilled; `stop_reason` (vLLM's), the stop string that was met; `constraint_cost`, beside
    log-probabilities, what a grammar took from the model."""
    names = {
        "warnings": "warnings",
        "stop_reason": "matched_stop",
        "constraint_cost": "constraint_cost",
    }
    found = {name: outcome.meta.get(source) for name, source in names.items()}
    return {name: value for name, value in found.items() if value}


def prompt_logprobs_of(outcome: Outcome, num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id at each position, null at the first."""

    def told(entry: dict[str, Any], rank: int | None) -> dict[str, Any]:
        return {"logprob": entry["logprob"], "rank": rank, "decoded_token": entry["token"]}

    def place(entry: dict[str, Any]) -> dict[str, Any]:
        tops = {str(t["token_id"]): told(t, i) for i, t in enumerate(entry["top"][:num_top], 1)}
        return {str(entry["token_id"]): told(entry, None), **tops}

    entries = outcome.meta["prompt_logprobs"]
    return [None if entry["logprob"] is None else place(entry) for entry in entries]


def fingerprint_of(info: dict[str, Any]) -> str:
    """`system_fingerprint`: changes with the model, its number format or the kernels."""
    seen = orjson.dumps([info[name] for name in ("model", "dtype", "device", "kernels")])
    return f"fp_{hashlib.blake2b(seen, digest_size=5).hexdigest()}"


def _unlikeliness(outcome: Outcome) -> float:
    """The mean log probability of its tokens, negated."""
    logprobs: list[float] = [entry["logprob"] for entry in outcome.meta["logprobs"]]
    return -sum(logprobs) / max(1, len(logprobs))


def _running_usage(samples: Iterable[Sample], num_drawn: int) -> dict[str, Any]:
    """Counts while a response grows; a prompt counts once."""
    samples = tuple(samples)
    prompts = {sample.index // num_drawn: sample for sample in samples}.values()
    prompt = sum(sample.prompt_tokens for sample in prompts)
    completion = sum(sample.num_tokens for sample in samples)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in prompts)},
    }
