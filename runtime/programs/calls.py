"""Running calls of a program: a `Gen` with its request, a `Select` with several.

A call listens to its requests: it turns tokens into text, finds stop strings, and reports once all
its requests have ended. It knows nothing of branches.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from operator import attrgetter
from typing import Any, Protocol

from ...frontend.protocol.choices import ChoiceScore, decide
from ..schedule.plan import RowResult, TokenLogprob
from ..schedule.program_record import ProgramRecord
from ..schedule.request import FinishReason, Request, Scoring
from ..schedule.sampling_params import SamplingParams
from ..tokenizer.detokenizer import Detokenizer, StopHit
from ..tokenizer.tokenizer import Tokenizer
from .foretelling import Foreteller, Foretelling


class RequestQueue(Protocol):
    """The engine's interface to programs."""

    def submit(self, request: Request) -> None:
        """Check and queue a request. Raises InvalidRequest."""

    def abort(self, request: Request) -> None:
        """End a request now; does nothing if it has ended."""

    def end_program(self, program: ProgramRecord) -> None:
        """Note that a program will submit no more requests."""


Validate = Callable[[str, str, Callable[[tuple[str, ...]], None]], None]
"""(schema, text, on_done): see `context.GrammarSource.validate`."""


Delta = str | dict[str, Any]
"""New text; if its tokens are wanted too, an object: see `wire.DELTA`."""


class Report(Protocol):
    """Receives a call's outcome: any number of deltas, then exactly one of the others."""

    def delta(self, delta: Delta) -> None:
        """New text of the stream."""

    def likely(self, text: str, chance: float) -> None:
        """This will probably be the output."""

    def finished(self, ids: array[int], tail: str, payload: dict[str, Any]) -> None:
        """The output's ids, the text after them up to a stop string, and the value event."""

    def failed(self, message: str, kind: str) -> None:
        """No output; `kind` is the name of an error class."""


class Call(Protocol):
    """A running call."""

    def abort(self, queue: RequestQueue) -> None:
        """End its requests; nothing more is reported."""


class GenCall:
    """One generation. Reports its end exactly once, unless aborted."""

    def __init__(
        self,
        report: Report,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        *,
        is_streaming: bool,
        has_token_ids: bool = False,
        validate: Validate | None = None,
        prompt_scores: PromptScores | None = None,
    ) -> None:
        """`has_token_ids`: a stream includes the ids. `validate`: for outputs whose grammar covers
        only part of the schema. `prompt_scores`: reported together with the output."""
        self._report = report
        self._is_streaming = is_streaming
        self._has_token_ids = has_token_ids
        self._num_sent_tokens: int | None = None
        self._validate = validate
        self._prompt_scores = prompt_scores
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._detokenizer = Detokenizer(
            tokenizer, sampling.stop, sampling.stop_regex, min_tokens=sampling.min_tokens
        )
        self._hit: StopHit | None = None
        self._logprobs: list[dict[str, Any]] = []
        self._is_aborted = False
        self._ends_now = False
        self._foretelling: Foretelling | None = None
        self.request: Request | None = None

    def foretell(self, foreteller: Foreteller) -> None:
        """Report what the output probably will be, once it can be guessed; the request is
        queued."""
        assert self.request is not None
        report = self._report
        self._foretelling = foreteller.open(
            self.request, self._detokenizer, self._tokenizer, self._sampling.stop, report.likely
        )

    def end_now(self, queue: RequestQueue) -> None:
        """End with the output so far, reported with the finish reason "abort"."""
        self._ends_now = True
        if self.request is not None:
            queue.abort(self.request)

    def abort(self, queue: RequestQueue) -> None:
        self._is_aborted = True
        if self.request is not None:
            queue.abort(self.request)
        if self._prompt_scores is not None:
            self._prompt_scores.abort(queue)

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        assert result.token_id is not None
        self._hit = self._detokenizer.append(result.token_id)
        if self._sampling.logprobs is not None:
            self._logprobs.append(self._logprob_of(result))
        if self._hit is not None:
            self._detokenizer.cut(self._hit)
        if self._foretelling is not None:
            self._foretelling.extend(result.token_id)
        if self._hit is not None:
            return FinishReason.STOP
        if self._is_streaming:
            self._send_delta(request)
        return None

    def on_finish(self, request: Request) -> None:
        reason = request.finish_reason
        if self._foretelling is not None:
            is_whole = reason in (FinishReason.STOP, FinishReason.LENGTH)
            self._foretelling.end(self._detokenizer.text if is_whole else None)
            self._foretelling = None
        if self._is_aborted:
            return
        if reason is FinishReason.ERROR or (reason is FinishReason.ABORT and not self._ends_now):
            message = request.error or "the call was aborted"
            self._report.failed(message, request.error_kind)
            return
        if self._hit is None:
            self._detokenizer.flush()
        num_kept = request.num_output_tokens if self._hit is None else self._hit.num_tokens
        if self._is_streaming:
            self._send_delta(request, num_kept)
        ids = array("i", request.output_ids[:num_kept])
        tail = "" if self._hit is None else self._hit.tail
        payload = self._payload(request, ids)
        schema = None if request.grammar is None else request.grammar.schema
        if schema is None or self._validate is None or reason is FinishReason.ABORT:
            return self._finish(ids, tail, payload)

        def finish(errors: tuple[str, ...]) -> None:
            payload["meta"]["warnings"] += errors
            if not self._is_aborted:
                self._finish(ids, tail, payload)

        self._validate(schema, payload["text"], finish)

    def _finish(self, ids: array[int], tail: str, payload: dict[str, Any]) -> None:
        """Report, once the prompt's scores are known too."""
        scores = self._prompt_scores
        if scores is None:
            return self._report.finished(ids, tail, payload)

        def finish(error: str | None) -> None:
            if self._is_aborted:
                return
            if error is not None:
                return self._report.failed(error, "EngineError")
            payload["meta"]["prompt_logprobs"] = scores.rows(self._tokenizer)
            self._report.finished(ids, tail, payload)

        scores.when_done(finish)

    def _send_delta(self, request: Request, num_kept: int | None = None) -> None:
        """Send the text that is final; `num_kept`: tokens kept of an output that has ended."""
        text = self._detokenizer.take_delta(is_final=num_kept is not None)
        if not self._has_token_ids and self._sampling.logprobs is None:
            if text:
                self._report.delta(text)
            return
        until = self._detokenizer.num_settled() if num_kept is None else num_kept
        if text or until > (self._num_sent_tokens or 0):
            self._report.delta(self._with_tokens(request, text, until))

    def _with_tokens(self, request: Request, text: str, until: int) -> dict[str, Any]:
        """A delta with the tokens up to `until` that were not sent before."""
        delta: dict[str, Any] = {"text": text}
        first = self._num_sent_tokens or 0
        if self._has_token_ids:
            delta["token_ids"] = request.output_ids[first:until].tolist()
            if self._num_sent_tokens is None:
                delta["id"] = request.id
                delta["prompt_tokens"] = request.num_text_tokens
                delta["cached_tokens"] = request.num_cached_tokens
        if self._sampling.logprobs is not None:
            delta["logprobs"] = self._logprobs[first:until]
        self._num_sent_tokens = until
        return delta

    def _payload(self, request: Request, ids: array[int]) -> dict[str, Any]:
        text = self._detokenizer.text
        meta = meta_of(request)
        meta["output_ids"] = ids.tolist()
        if not self._sampling.max_tokens and request.finish_reason is FinishReason.STOP:
            meta["finish_reason"] = FinishReason.LENGTH.value  # all that was asked for
        if self._hit is not None:
            meta["matched_stop"] = self._hit.matched
        if self._sampling.logprobs is not None:
            meta["logprobs"] = self._logprobs[: len(ids)]
            if (cost := constraint_cost(meta["logprobs"])) is not None:
                meta["constraint_cost"] = cost
        if request.grammar is not None and request.grammar.bound is not None:
            meta["grammar_path"] = request.grammar.bound.path
            meta["warnings"] = list(request.grammar.bound.warnings)
        return {"value": text, "text": text, "meta": meta}

    def _logprob_of(self, result: RowResult) -> dict[str, Any]:
        text = self._tokenizer.token_text
        entry = {
            "token_id": result.token_id,
            "token": text(result.token_id or 0),
            "logprob": result.logprob,
            "top": _told(result.top_logprobs, self._tokenizer),
        }
        if result.allowed_logprob is not None:
            entry["allowed_logprob"] = result.allowed_logprob
            entry["is_redirected"] = result.is_redirected
        return entry


def constraint_cost(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What a grammar took from the model, of an output's entries in `logprobs`: the log-probability
    lost by masking, in nats, and at how many tokens another was the model's likeliest. None without
    a grammar."""
    lost = [-entry["allowed_logprob"] for entry in entries if "allowed_logprob" in entry]
    if not lost:
        return None
    return {
        "logprob_lost": sum(lost),
        "mean_logprob_lost": sum(lost) / len(lost),
        "num_redirected": sum(entry.get("is_redirected", False) for entry in entries),
        "num_tokens": len(lost),
    }


def _told(tokens: Sequence[TokenLogprob], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    return [
        {"token_id": t.token_id, "token": tokenizer.token_text(t.token_id), "logprob": t.logprob}
        for t in tokens
    ]


class SamplesCall:
    """Several samples of one prompt: a `GenCall` each. The value is the list of their texts; the
    branch continues with the first one, which is also the one streamed."""

    def __init__(self, report: Report, samples: Sequence[Callable[[Report], GenCall]]) -> None:
        """`samples`: each creates a call that reports to its argument."""
        self._report = report
        self._endings: dict[int, _Ending] = {}
        self.samples = [make(_SampleReport(self, i)) for i, make in enumerate(samples)]

    def abort(self, queue: RequestQueue) -> None:
        for sample in self.samples:
            sample.abort(queue)

    def end_now(self, queue: RequestQueue) -> None:
        """End all samples with their output so far."""
        for sample in self.samples:
            sample.end_now(queue)

    def delta_of_first(self, delta: Delta) -> None:
        self._report.delta(delta)

    def finished_one(self, index: int, ending: _Ending) -> None:
        self._endings[index] = ending
        if len(self._endings) < len(self.samples):
            return
        payloads = [self._endings[i].payload for i in range(len(self.samples))]
        first = self._endings[0]
        whole = {
            "value": [payload["value"] for payload in payloads],
            "text": first.payload["text"],
            "meta": [payload["meta"] for payload in payloads],
        }
        self._report.finished(first.ids, first.tail, whole)

    def failed_one(self, message: str, kind: str) -> None:
        """Fail; the report's receiver aborts the other samples, so that they report nothing."""
        self._report.failed(message, kind)


@dataclass(frozen=True, slots=True)
class _Ending:
    """What a sample reported when it finished."""

    ids: array[int]
    tail: str
    payload: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _SampleReport:
    """Passes a sample's report to the call of all samples."""

    call: SamplesCall
    index: int

    def delta(self, delta: Delta) -> None:
        self.call.delta_of_first(delta)

    def likely(self, text: str, chance: float) -> None:
        raise AssertionError("what several samples will be is not told")

    def finished(self, ids: array[int], tail: str, payload: dict[str, Any]) -> None:
        self.call.finished_one(self.index, _Ending(ids, tail, payload))

    def failed(self, message: str, kind: str) -> None:
        self.call.failed_one(message, kind)


class PromptScores:
    """Log probabilities of a prompt's own tokens from position `start` on, requested with a gen.

    A separate request scores them; its matching stops before the first target, so that a cached
    prefix hides no token. Position 0 has no log probability: nothing comes before it.
    """

    def __init__(self, prompt: array[int], start: int, num_top: int = 0) -> None:
        """`start` in [0, len(prompt)]; `num_top`: top tokens to report at each position."""
        first = max(start, 1)
        self.prompt = prompt[: max(first, len(prompt) - 1)]
        self.scoring = Scoring(first - 1, tuple(prompt[first:]), num_top)
        self.request: Request | None = None
        self._unscored = prompt[start:first]
        self._on_done: Callable[[str | None], None] | None = None

    def when_done(self, on_done: Callable[[str | None], None]) -> None:
        """Call `on_done` with the error or None, now or once the request has ended."""
        self._on_done = on_done
        if self.request is not None and self.request.is_finished:
            self.on_finish(self.request)

    def rows(self, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        """One for each token."""
        assert self.request is not None
        request = self.request
        ids = [*self._unscored, *self.scoring.targets]
        logprobs = [*(None for _ in self._unscored), *request.scores]
        tops = [*(() for _ in self._unscored), *request.score_tops]
        return [
            {
                "token_id": token_id,
                "token": tokenizer.token_text(token_id),
                "logprob": logprob,
                "top": _told(top or (), tokenizer),
            }
            for token_id, logprob, top in zip_longest(ids, logprobs, tops)
        ]

    def abort(self, queue: RequestQueue) -> None:
        """End its request; nothing more is reported."""
        self._on_done = None
        if self.request is not None:
            queue.abort(self.request)

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        raise AssertionError("nothing is sampled to score a prompt")

    def on_finish(self, request: Request) -> None:
        if self._on_done is not None:
            is_fine = request.finish_reason is FinishReason.STOP
            self._on_done(None if is_fine else request.error or "the call was aborted")


class SelectCall:
    """One choice among texts: scores each, with the branch's prefix shared by all."""

    def __init__(
        self, report: Report, choices: Sequence[str], method: str, choice_ids: Sequence[list[int]]
    ) -> None:
        """`choices` with their ids, one to one."""
        self._report = report
        self._choices = choices
        self._method = method
        self._choice_ids = choice_ids
        self._num_open = 0
        self._is_aborted = False
        self.requests: list[Request] = []

    def wanted_scores(
        self, prompt: array[int], empty: array[int]
    ) -> Iterator[tuple[array[int], Sequence[int]]]:
        """(context, targets) of each request: every choice here, then, for some methods, without
        context."""
        contexts = [prompt]
        if self._method == "unconditional_likelihood_normalized":
            contexts.append(empty)
        self._num_open = len(contexts) * len(self._choice_ids)
        for context in contexts:
            for ids in self._choice_ids:
                yield context, ids

    def abort(self, queue: RequestQueue) -> None:
        self._is_aborted = True
        for request in self.requests:
            queue.abort(request)

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        raise AssertionError("nothing is sampled for a select")

    def on_finish(self, request: Request) -> None:
        if self._is_aborted:
            return
        if request.finish_reason is not FinishReason.STOP:
            self._is_aborted = True
            reason = request.error or "the call was aborted"
            self._report.failed(reason, "EngineError")
            return
        self._num_open -= 1
        if self._num_open == 0:
            self._decide()

    def _decide(self) -> None:
        num = len(self._choice_ids)
        unconditional = self.requests[num:]
        scores = [
            ChoiceScore(
                tuple(ids),
                tuple(self.requests[i].scores),
                tuple(unconditional[i].scores) if unconditional else (),
            )
            for i, ids in enumerate(self._choice_ids)
        ]
        best = decide(self._method, scores)
        text = self._choices[best]
        meta = meta_of(self.requests[best])
        meta["prompt_tokens"] = sum(r.num_text_tokens for r in self.requests)
        meta["cached_tokens"] = sum(r.num_cached_tokens for r in self.requests)
        meta["disk_tokens"] = sum(r.num_disk_tokens for r in self.requests)
        meta.update(_times_of(self.requests))
        meta["output_ids"] = self._choice_ids[best]
        meta["choice_logprobs"] = [score.mean_logprob for score in scores]
        meta["choice_token_logprobs"] = [list(score.logprobs) for score in scores]
        meta["choice_token_ids"] = [list(score.token_ids) for score in scores]
        if unconditional:
            meta["choice_unconditional_logprobs"] = [list(s.unconditional) for s in scores]
        payload = {"value": text, "text": text, "meta": meta}
        self._report.finished(array("i", self._choice_ids[best]), "", payload)


def _times_of(requests: Sequence[Request]) -> dict[str, float]:
    """Times of a call of several requests: from the first one's start to the last one's end."""
    first = min(requests, key=attrgetter("created_s"))
    finished = max(request.finished_s or 0.0 for request in requests)
    admitted = min(request.admitted_s or finished for request in requests)
    began = first.created_s if first.program is None else first.program.created_s
    return {
        "start_s": first.created_s - began,
        "queue_s": admitted - first.created_s,
        "prefill_s": finished - admitted,
        "decode_s": 0.0,
        "time_to_first_token_s": finished - first.created_s,
        "latency_s": finished - first.created_s,
    }


def meta_of(request: Request) -> dict[str, Any]:
    """Counts, times in seconds (`start_s`: since its program began) and the finish reason of a
    finished request; `evicted` if it displaced anything, and what became of a prediction."""
    assert request.finish_reason is not None and request.finished_s is not None
    admitted = request.admitted_s or request.finished_s
    first = request.first_token_s or request.finished_s
    began = request.created_s if request.program is None else request.program.created_s
    meta: dict[str, Any] = {
        "id": request.id,
        "prompt_tokens": request.num_text_tokens,
        "cached_tokens": request.num_cached_tokens,
        "host_tokens": request.num_host_tokens,
        "disk_tokens": request.num_disk_tokens,
        "completion_tokens": request.num_output_tokens,
        "forced_tokens": request.num_forced_tokens,
        "drafted_tokens": request.num_drafted_tokens,
        "accepted_tokens": request.num_accepted_tokens,
        "preemptions": request.num_preemptions,
        "start_s": request.created_s - began,
        "queue_s": admitted - request.created_s,
        "prefill_s": max(0.0, first - admitted),  # what is known to begin it comes before
        "decode_s": request.finished_s - first,
        "time_to_first_token_s": first - request.created_s,
        "latency_s": request.finished_s - request.created_s,
        "finish_reason": request.finish_reason.value,
    }
    if request.compressed is not None:
        meta["dropped_tokens"] = request.num_dropped
    if request.prediction:
        meta["accepted_prediction_tokens"] = request.num_accepted_prediction
        meta["rejected_prediction_tokens"] = request.num_rejected_prediction
    if request.evicted:
        meta["evicted"] = dict(request.evicted)
    return meta
