"""Responses of llama.cpp's /completion and /infill."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...protocol.failures import failure_of
from ...protocol.pieces import GenerationFailed, Outcome, Piece
from ...protocol.server_sent_events import event

_ANY_SLOT = -1


@dataclass(frozen=True, slots=True)
class Form:
    """What the answers of a request have."""

    model: str
    settings: dict[str, Any]
    prompts: Sequence[str]
    n: int = 1  # answers of each prompt
    is_batch: bool = False
    has_tokens: bool = False
    num_probs: int = 0
    only_computes: bool = False  # nothing of what was generated is told


@dataclass(slots=True)
class _Sent:
    """What a stream has told of a sample."""

    num_tokens: int = 0
    prompt_tokens: int = 0
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class CompletionReply:
    """One answer for each sample; a stream's events have what is new."""

    def __init__(self, form: Form) -> None:
        self.id = f"completion-{secrets.token_hex(12)}"
        self._form = form
        self._sent: dict[int, _Sent] = {}

    def whole(
        self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None
    ) -> dict[str, Any] | list[Any]:
        form = self._form
        answers = []
        for outcome in outcomes:
            text, ids = ("", []) if form.only_computes else _output(outcome)
            logprobs = outcome.meta.get("logprobs") or ()
            answers.append(self._answer(outcome, text, ids if form.has_tokens else [], logprobs))
        return answers if form.is_batch else answers[0]

    def piece(self, piece: Piece) -> bytes:
        if self._form.only_computes:
            return b""
        sent = self._sent.setdefault(piece.index, _Sent())
        if piece.prompt_tokens is not None:
            sent.prompt_tokens = piece.prompt_tokens
        ids = list(piece.token_ids or ())
        sent.num_tokens += len(ids)
        return event(
            {
                "index": piece.index,
                "content": piece.text,
                "tokens": ids,
                "stop": False,
                "id_slot": _ANY_SLOT,
                "tokens_predicted": sent.num_tokens,
                "tokens_evaluated": sent.prompt_tokens,
                **self._probabilities(piece.logprobs or ()),
            }
        )

    def end(self, outcome: Outcome) -> bytes:
        """Its text has been told; ids that had none come with the end."""
        sent = self._sent.pop(outcome.index, _Sent())
        ids = [] if self._form.only_computes else _output(outcome)[1][sent.num_tokens :]
        logprobs = (outcome.meta.get("logprobs") or ())[sent.num_tokens :]
        return event(self._answer(outcome, "", ids, logprobs))

    def close(self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None) -> bytes:
        return b""

    def failed(self, error: GenerationFailed) -> bytes:
        failure = failure_of(error)
        told = {"code": failure.status, "message": failure.message, "type": failure.kind}
        return event({"error": told})

    def _answer(
        self,
        outcome: Outcome,
        text: str,
        ids: Sequence[int],
        logprobs: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        meta, form = outcome.meta, self._form
        return {
            "index": outcome.index,
            "content": text,
            "tokens": list(ids),
            "id_slot": _ANY_SLOT,
            "stop": True,
            "model": form.model,
            "tokens_predicted": 0 if form.only_computes else meta["completion_tokens"],
            "tokens_evaluated": meta["prompt_tokens"],
            "tokens_cached": meta["cached_tokens"],
            "generation_settings": form.settings,
            "prompt": form.prompts[outcome.index // form.n],
            "has_new_line": "\n" in outcome.text,
            "truncated": False,
            "stop_type": _stop_type(meta),
            "stopping_word": meta.get("matched_stop") or "",
            "timings": timings(meta),
            **self._probabilities(logprobs),
        }

    def _probabilities(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if not self._form.num_probs or not entries or self._form.only_computes:
            return {}
        num = self._form.num_probs
        told = [
            {**_token(entry), "top_logprobs": [_token(top) for top in entry["top"][:num]]}
            for entry in entries
        ]
        return {"completion_probabilities": told}


def timings(meta: dict[str, Any]) -> dict[str, float]:
    """llama.cpp's figures of a request, in milliseconds and tokens."""
    num_computed = meta["prompt_tokens"] - meta["cached_tokens"]
    return {
        "cache_n": meta["cached_tokens"],
        **_speed("prompt", num_computed, meta["prefill_s"]),
        **_speed("predicted", meta["completion_tokens"], meta["decode_s"]),
    }


def _speed(name: str, num_tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / max(1, num_tokens),
        f"{name}_per_second": num_tokens / seconds if seconds > 0 else 0.0,
    }


def _output(outcome: Outcome) -> tuple[str, list[int]]:
    return outcome.text, list(outcome.meta["output_ids"])


def _stop_type(meta: dict[str, Any]) -> str:
    if meta["finish_reason"] == "stop":
        return "word" if meta.get("matched_stop") else "eos"
    return "limit" if meta["finish_reason"] == "length" else "none"


def _token(entry: dict[str, Any]) -> dict[str, Any]:
    token: str = entry["token"]
    data = list(token.encode())
    return {
        "id": entry["token_id"], "token": token, "bytes": data, "logprob": entry["logprob"]
    }  # fmt: skip
