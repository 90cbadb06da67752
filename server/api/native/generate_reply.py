"""Responses of `/generate`: SGLang's `text`, `output_ids` and `meta_info`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....frontend.protocol.native_answer import LogprobForm, StreamedSample, answer_of
from ...protocol.failures import failure_of
from ...protocol.pieces import GenerationFailed, Outcome, Piece
from ...protocol.server_sent_events import DONE, event
from ...protocol.task import Task


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
        self._samples: dict[int, StreamedSample] = {}

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
        meta = sample.meta(self.id)
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

    def _sample(self, index: int) -> StreamedSample:
        return self._samples.setdefault(index, StreamedSample())

    def _index(self, index: int) -> dict[str, int]:
        return {"index": index} if self._is_batch else {}

    def _answer(self, outcome: Outcome) -> dict[str, Any]:
        if outcome.error is not None:
            return self._failed_answer(outcome.index, outcome.error)
        return answer_of(self.id, outcome.text, outcome.meta, self._form)

    def _failed_answer(self, index: int, error: GenerationFailed) -> dict[str, Any]:
        """The entry of one failed sample among others, with what it has streamed."""
        sample, failure = self._sample(index), failure_of(error)
        reason = {"type": "error", "message": failure.message, "status_code": failure.status}
        meta = {**sample.meta(self.id), "finish_reason": reason}
        return {"text": sample.text, "output_ids": sample.ids, "meta_info": meta}
