"""Responses of `/generate`: SGLang's `text`, `output_ids` and `meta_info`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...protocol.failures import failure_of
from ...protocol.pieces import GenerationFailed, Outcome, Piece
from ...protocol.server_sent_events import DONE, event
from ...protocol.task import Task

_SPECULATION = (
    "drafted_tokens", "accepted_tokens",
    "accepted_prediction_tokens", "rejected_prediction_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LogprobForm:
    """Whether log probabilities were requested, and whether with each token's text."""

    is_wanted: bool
    has_text: bool

    def output(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """For generated tokens: [log probability, token id, text or null]."""
        return {
            "output_token_logprobs": [self._triple(entry) for entry in entries],
            "output_top_logprobs": [[self._triple(top) for top in e["top"]] for e in entries],
        }

    def prompt(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """For the prompt's tokens; the very first one has none."""
        return {"input_token_logprobs": [self._triple(entry) for entry in entries]}

    def _triple(self, entry: dict[str, Any]) -> list[Any]:
        return [entry["logprob"], entry["token_id"], entry["token"] if self.has_text else None]


@dataclass(slots=True)
class _Sample:
    """What has been streamed of one sample."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


class GenerateReply:
    """Responses of /generate."""

    def __init__(
        self, id: str, task: Task, form: LogprobForm, *, is_batch: bool, is_incremental: bool
    ) -> None:
        """`is_batch`: the response is a list, and a stream's events have an index."""
        self.id = id
        self._task = task
        self._form = form
        self._is_batch = is_batch
        self._is_incremental = is_incremental
        self._samples: dict[int, _Sample] = {}

    def whole(
        self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None
    ) -> dict[str, Any] | list[Any]:
        answers = [self._answer(outcome) for outcome in outcomes]
        if hints is not None:
            answers[0]["kv_hints"] = hints
        return answers if self._is_batch else answers[0]

    def piece(self, piece: Piece) -> bytes:
        sample = self._sample(piece.index)
        if piece.prompt_tokens is not None:
            sample.counts = {
                "prompt_tokens": piece.prompt_tokens, "cached_tokens": piece.cached_tokens
            }  # fmt: skip
        sample.text += piece.text
        sample.ids += piece.token_ids or ()
        sample.logprobs += piece.logprobs or ()
        is_new = self._is_incremental
        meta: dict[str, Any] = {"id": self.id, "finish_reason": None, **sample.counts}
        meta["completion_tokens"] = len(sample.ids)
        if self._form.is_wanted:
            meta |= self._form.output((piece.logprobs or ()) if is_new else sample.logprobs)
        ids = list(piece.token_ids or ()) if is_new else sample.ids
        text = piece.text if is_new else sample.text
        return event(
            {**self._index(piece.index), "text": text, "output_ids": ids, "meta_info": meta}
        )

    def end(self, outcome: Outcome) -> bytes:
        answer = self._answer(outcome)
        if self._is_incremental:
            sent = self._sample(outcome.index)
            answer["text"] = answer["text"][len(sent.text) :]
            answer["output_ids"] = answer["output_ids"][len(sent.ids) :]
        self._samples.pop(outcome.index, None)
        return event({**self._index(outcome.index), **answer})

    def close(self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None) -> bytes:
        last = b"" if hints is None else event({"kv_hints": hints})
        return last + DONE

    def failed(self, error: GenerationFailed) -> bytes:
        return event(failure_of(error).body) + DONE

    def _sample(self, index: int) -> _Sample:
        return self._samples.setdefault(index, _Sample())

    def _index(self, index: int) -> dict[str, int]:
        return {"index": index} if self._is_batch else {}

    def _answer(self, outcome: Outcome) -> dict[str, Any]:
        if outcome.error is not None:
            return self._failed_answer(outcome.index, outcome.error)
        meta = outcome.meta
        told: dict[str, Any] = {
            "id": self.id,
            "finish_reason": self._finish_reason(outcome),
            "prompt_tokens": meta["prompt_tokens"],
            "completion_tokens": meta["completion_tokens"],
            "cached_tokens": meta["cached_tokens"],
            "e2e_latency": meta["latency_s"],
        }
        told |= {name: meta[name] for name in _SPECULATION if name in meta}
        if "logprobs" in meta:
            told |= self._form.prompt(meta.get("prompt_logprobs", ()))
            told |= self._form.output(meta["logprobs"])
        if meta.get("warnings"):
            told["warnings"] = meta["warnings"]
        return {"text": outcome.text, "output_ids": meta["output_ids"], "meta_info": told}

    def _failed_answer(self, index: int, error: GenerationFailed) -> dict[str, Any]:
        """The entry of one failed sample among others, with what it has streamed."""
        sample, failure = self._sample(index), failure_of(error)
        reason = {"type": "error", "message": failure.message, "status_code": failure.status}
        counts = {**sample.counts, "completion_tokens": len(sample.ids)}
        meta = {"id": self.id, "finish_reason": reason, **counts}
        return {"text": sample.text, "output_ids": sample.ids, "meta_info": meta}

    def _finish_reason(self, outcome: Outcome) -> dict[str, Any]:
        reason = outcome.meta["finish_reason"]
        if reason == "stop":
            return {"type": reason, "matched": outcome.meta.get("matched_stop")}
        if reason == "length":
            return {"type": reason, "length": outcome.meta["completion_tokens"]}
        return {"type": reason}
