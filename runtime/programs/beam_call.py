"""A running beam search: its best hypotheses, once it has ended, as the values of one `gen`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from ..schedule.beam_search import Finished
from ..schedule.beams import BeamGroup
from ..schedule.plan import RowResult
from ..schedule.request import FinishReason, Request
from ..schedule.sampling_params import SamplingParams
from ..tokenizer.detokenizer import Detokenizer, StopHit
from ..tokenizer.tokenizer import Tokenizer
from .calls import Report, RequestQueue, meta_of


class BeamCall:
    """One search. Reports its end exactly once, unless aborted; a stream has its text then."""

    def __init__(
        self,
        report: Report,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        num_returned: int | None,
        *,
        is_streaming: bool,
        has_token_ids: bool = False,
    ) -> None:
        """`num_returned` of the best hypotheses make a list; None: the best one is the value."""
        self._report = report
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._num_returned = num_returned
        self._is_streaming = is_streaming
        self._has_token_ids = has_token_ids
        self._is_over = False  # nothing is reported any more
        self._ends_now = False
        self.group: BeamGroup | None = None

    def text(self) -> StopText | None:
        """That of an empty output, where a text can end one."""
        sampling = self._sampling
        if not sampling.stop and not sampling.stop_regex:
            return None
        return StopText(self._detokenizer())

    def abort(self, queue: RequestQueue) -> None:
        self._is_over = True
        self._abort_all(queue)

    def end_now(self, queue: RequestQueue) -> None:
        """End with the best hypotheses so far, reported with the finish reason "abort"."""
        self._ends_now = True
        self._abort_all(queue)

    def _abort_all(self, queue: RequestQueue) -> None:
        if self.group is None:
            return
        for request in (*self.group.requests[1:], self.group.requests[0]):
            queue.abort(request)

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        raise AssertionError("hypotheses grow in their group")

    def on_finish(self, request: Request) -> None:
        group, reason = self.group, request.finish_reason
        assert group is not None
        if self._is_over:
            return
        if reason is FinishReason.ERROR or (request is group.leader and self._has_failed(reason)):
            self._is_over = True
            self._report.failed(request.error or "the call was aborted", request.error_kind)
        elif request is group.leader:
            self._is_over = True
            self._finish(group, is_cut=reason is FinishReason.ABORT)

    def _has_failed(self, reason: FinishReason | None) -> bool:
        return reason is FinishReason.ABORT and not self._ends_now

    def _finish(self, group: BeamGroup, *, is_cut: bool) -> None:
        search, wanted = group.search, self._num_returned or 1
        found = search.best_now() if is_cut or not search.finished else search.finished
        outputs = [self._output(group.leader, each, is_cut) for each in found[:wanted]]
        ids, tail, first = outputs[0]
        if self._is_streaming:
            self._send(group.leader, ids, first["text"])
        if self._num_returned is None:
            return self._report.finished(ids, tail, first)
        payloads = [payload for _, _, payload in outputs]
        whole = {
            "value": [payload["value"] for payload in payloads],
            "text": first["text"],
            "meta": [payload["meta"] for payload in payloads],
        }
        self._report.finished(ids, tail, whole)

    def _output(
        self, leader: Request, found: Finished, is_cut: bool
    ) -> tuple[array[int], str, dict[str, Any]]:
        """Its ids, the text behind them up to a stop string, and the value's event."""
        detokenizer = self._detokenizer()
        hit = _feed(detokenizer, found.token_ids)
        num_kept = len(found.token_ids) if hit is None else hit.num_tokens
        ids = found.token_ids[:num_kept]
        meta = meta_of(leader)
        meta["completion_tokens"] = len(found.token_ids)
        if not is_cut:
            reason = FinishReason.STOP if found.has_stopped else FinishReason.LENGTH
            meta["finish_reason"] = reason.value
        meta["output_ids"] = ids.tolist()
        meta["cumulative_logprob"] = found.logprob
        meta["score"] = found.score
        if hit is not None:
            meta["matched_stop"] = hit.matched
        grammar = leader.grammar
        if grammar is not None and grammar.bound is not None:
            meta["grammar_path"] = grammar.bound.path
            meta["warnings"] = list(grammar.bound.warnings)
        text = detokenizer.text
        return ids, "" if hit is None else hit.tail, {"value": text, "text": text, "meta": meta}

    def _send(self, leader: Request, ids: array[int], text: str) -> None:
        if not self._has_token_ids:
            return self._report.delta(text) if text else None
        counts = {
            "id": leader.id,
            "prompt_tokens": leader.num_prompt_tokens,
            "cached_tokens": leader.num_cached_tokens,
        }
        self._report.delta({"text": text, "token_ids": ids.tolist(), **counts})

    def _detokenizer(self) -> Detokenizer:
        sampling = self._sampling
        return Detokenizer(
            self._tokenizer, sampling.stop, sampling.stop_regex, min_tokens=sampling.min_tokens
        )


class StopText:
    """A hypothesis's text, which ends it at a stop string or pattern."""

    def __init__(self, detokenizer: Detokenizer, *, has_stopped: bool = False) -> None:
        self._detokenizer = detokenizer
        self.has_stopped = has_stopped

    def extended(self, token_id: int) -> StopText:
        detokenizer = self._detokenizer.fork()
        return StopText(detokenizer, has_stopped=detokenizer.append(token_id) is not None)


def _feed(detokenizer: Detokenizer, token_ids: Sequence[int]) -> StopHit | None:
    """Have it read an output up to a stop string, which is cut off."""
    for token_id in token_ids:
        hit = detokenizer.append(token_id)
        if hit is not None:
            detokenizer.cut(hit)
            return hit
    detokenizer.flush()
    return None
