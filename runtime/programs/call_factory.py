"""From a `Gen`, `Select` or `Embed` op to its call and requests, all values checked."""

from __future__ import annotations

import time
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ...constrained.serving.grammar_state import PendingGrammar
from ...constrained.spec import GrammarSpec
from ...errors import InvalidProgram, InvalidRequest, StemmaError
from ...frontend.protocol import ir
from ...frontend.protocol.constraint import Constraint
from ...frontend.protocol.ir import seed_of_sample
from ...frontend.protocol.kv_policy import KVPolicy
from ...frontend.protocol.numbers import RANGES
from ..checkpoint.config.embedding_config import DECODER_POOLINGS
from ..checkpoint.lora.adapter import Adapter
from ..images.image import ImageSpan, spans_of
from ..schedule.beam_search import BeamParams
from ..schedule.beams import BeamGroup
from ..schedule.compression import Recompression
from ..schedule.plan import Encoding
from ..schedule.program_record import ProgramRecord
from ..schedule.request import HiddenSum, Request, Scoring
from ..schedule.sampling_params import SamplingParams
from .beam_call import BeamCall
from .branch_kv import Shown, refuse_images
from .calls import Call, GenCall, PromptScores, Report, SamplesCall, SelectCall, Validate
from .context import ProgramContext
from .embed_call import EmbedCall
from .embedded_text import EmbeddedText
from .engine_branch import EngineBranch

# Of the next tokens of each hypothesis: one for each beam and stop token, and one for each beam.
# The engine's loop reads them all, in each step.
MAX_BEAM_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class CallFactory:
    """Makes the calls of one program and queues their requests."""

    context: ProgramContext
    record: ProgramRecord
    seed: int
    instance: int
    is_streaming: bool
    has_token_ids: bool = False  # of what streams
    namespace: str = ""
    adapter: Adapter | None = None  # of the calls that name none
    account: Hashable = ""  # whose the texts of its calls are
    history: str = ""  # its client's name for the texts that belong together
    op_key: str | None = None  # of gens without a line of source

    def gen(
        self,
        branch: EngineBranch,
        op: ir.Gen,
        report: Report,
        prediction: array[int],
        begun: array[int],
    ) -> Call:
        """Start a generation; `prediction`: ids of the output that is expected; `begun`: those with
        which it begins, whatever is drawn. Raises InvalidRequest or InvalidProgram; nothing is
        queued then."""
        self._require_generation()
        samplings = self._samplings(branch, op)
        beam = _beam_params(op.params)
        if beam is not None:
            return self._beam(branch, op, report, samplings[0], beam)
        jump_forward = self._jump_forward(op.params)
        priority, deadline_s = _priority(op.params), _deadline_s(op.params)
        adapter = self._adapter(op.params.lora_path)
        prompt = self._prompt(branch)
        shown = self._shown(branch, prompt, op.params.kv_policy)
        scores = _prompt_scores(op.params, prompt)
        call: GenCall | SamplesCall
        if len(samplings) == 1:
            call = self._gen_call(report, samplings[0], scores)
            samples = [call]
        else:
            call = SamplesCall(
                report,
                [
                    lambda part, sampling=sampling, index=index: self._gen_call(  # type: ignore[misc]
                        part, sampling, None if index else scores, is_silent=index > 0
                    )
                    for index, sampling in enumerate(samplings)
                ],
            )
            samples = call.samples
        grammar = self._grammar(op.params.constraint) if samplings[0].max_tokens else None
        requests = []
        if scores is not None:
            whole = Shown(scores.prompt)
            scores.request = self._request(branch, whole, SamplingParams(), scores, adapter)
            scores.request.scoring = scores.scoring
            requests.append(scores.request)
        for sample, sampling in zip(samples, samplings, strict=True):
            request = self._request(branch, shown, sampling, sample, adapter)
            request.priority, request.deadline_s = priority, deadline_s
            request.stop_ids = self.context.defaults.stop_ids(sampling)
            if not sampling.max_tokens:
                request.scoring = Scoring(request.num_prompt_tokens - 1, ())
            request.grammar, request.jump_forward = grammar, jump_forward
            request.prediction = prediction
            request.recompression = self._recompression(op.params.kv_policy, shown)
            if len(samples) > 1:
                request.shared_ends += (request.num_prompt_tokens - 1,)
            if sample is samples[0]:
                request.begun = begun
            request.op_key = self.key_of(op)
            sample.request = request
            requests.append(request)
        self._submit(call, requests)
        foreteller = self.context.foreteller if op.params.foretell else None
        can_tell = samplings[0].max_tokens and not samplings[0].stop_regex
        if foreteller is not None and can_tell and isinstance(call, GenCall):
            call.foretell(foreteller)
        return call

    def key_of(self, op: ir.Op) -> Hashable:
        """What calls of the same op of a function have in common; None: nothing is known."""
        return self.op_key if op.source is None else (op.source, getattr(op, "name", ""))

    def texts_key(self, namespace: Hashable) -> Hashable:
        """Whose texts say something of those of this program's calls whose KV is there.

        NOTE: whatever a client names, no text of another adapter, namespace or account.
        """
        return (namespace, self.account, self.history)

    def _beam(
        self,
        branch: EngineBranch,
        op: ir.Gen,
        report: Report,
        sampling: SamplingParams,
        params: BeamParams,
    ) -> Call:
        """Start a beam search. Raises as `gen`."""
        priority, deadline_s = _priority(op.params), _deadline_s(op.params)
        adapter = self._adapter(op.params.lora_path)
        shown = self._shown(branch, self._prompt(branch), op.params.kv_policy)
        sampling = replace(sampling, temperature=0.0)  # nothing is drawn
        call = BeamCall(
            report,
            sampling,
            self.context.tokenizer,
            None if op.params.n in (None, 1) else op.params.n,
            is_streaming=self.is_streaming,
            has_token_ids=self.has_token_ids,
        )
        stop_ids = self._beam_stop_ids(sampling, params.width)
        grammar = self._grammar(op.params.constraint)

        def new_request() -> Request:
            request = self._request(branch, shown, sampling, call, adapter)
            request.priority = priority
            request.stop_ids = stop_ids
            request.grammar, request.jump_forward = grammar, False  # what is forced counts, too
            request.beam = call.group
            if call.group is not None:
                request.max_output_tokens = call.group.leader.max_output_tokens
            return request

        leader = new_request()
        leader.deadline_s = deadline_s
        call.group = leader.beam = BeamGroup(params, leader, new_request, call.text())
        self._submit(call, [leader])
        return call

    def _beam_stop_ids(self, sampling: SamplingParams, width: int) -> frozenset[int]:
        """Raises InvalidRequest for more than a search may have candidates for."""
        stop_ids = self.context.defaults.stop_ids(sampling)
        most = MAX_BEAM_CANDIDATES // width - 1
        if len(stop_ids) > most:
            allowed = f"at most {most} with beam={width}, the model's own stop tokens among them"
            raise InvalidRequest.of("stop_token_ids", f"{len(stop_ids)} ids", allowed)
        return stop_ids

    def select(
        self,
        branch: EngineBranch,
        op: ir.Select,
        report: Report,
        choices: Sequence[tuple[str, list[int]]],
    ) -> Call:
        """Start a choice, each with its ids. Raises InvalidProgram; nothing is queued then."""
        self._require_generation()
        adapter = self._adapter(op.lora_path)
        shown = self._shown(branch, self._prompt(branch), None)
        texts, choice_ids = zip(*choices, strict=True)
        call = SelectCall(report, texts, op.method, choice_ids)
        for context, targets in call.wanted_scores(shown.ids, self._empty_context()):
            tokens = context + array("i", targets[:-1])
            scored = shown._replace(ids=tokens) if context is shown.ids else Shown(tokens)
            request = self._request(branch, scored, SamplingParams(), call, adapter)
            request.scoring = Scoring(len(context) - 1, tuple(targets))
            call.requests.append(request)
        self._submit(call, call.requests)
        return call

    def embed(
        self, branch: EngineBranch, op: ir.Embed, report: Report, embedded: EmbeddedText
    ) -> Call:
        """Start an embedding, or scores. Raises InvalidRequest and InvalidProgram; nothing is
        queued then."""
        encoder = self.context.encoder
        has_scores = encoder is not None and encoder.has_scores
        if op.has_scores != has_scores:
            allowed = f"{has_scores}: what this model was trained for"
            raise InvalidRequest.of("has_scores", op.has_scores, allowed)
        head = None if encoder is None else encoder.score_head
        call = EmbedCall(report, op.normalize, head)
        whole = Shown(embedded.ids)
        request = self._request(branch, whole, SamplingParams(), call, self.adapter)
        if encoder is not None and not encoder.is_causal:
            request.encoding = Encoding(op.pooling, op.has_scores, embedded.num_first)
        elif op.pooling not in DECODER_POOLINGS:
            allowed = f"one of {list(DECODER_POOLINGS)}: this model computes texts in chunks"
            raise InvalidRequest.of("pooling", op.pooling, allowed)
        else:
            request.hidden = HiddenSum(is_mean=op.pooling == "mean")
        call.request = request
        self._submit(call, [request])
        return call

    def _require_generation(self) -> None:
        """Raises InvalidRequest where the model generates nothing."""
        if self.context.encoder is not None:
            self.context.encoder.require_generation()

    def _adapter(self, name: str | None) -> Adapter | None:
        """Of a call; None: it uses the model as it is. Raises InvalidRequest."""
        return self.adapter if name is None else self.context.adapter(name)

    def _request(
        self,
        branch: EngineBranch,
        prompt: Shown,
        sampling: SamplingParams,
        listener: GenCall | SelectCall | PromptScores | EmbedCall | BeamCall,
        adapter: Adapter | None,
    ) -> Request:
        images = () if prompt.compressed is not None else self._images(prompt.ids)
        namespace = self.namespace if adapter is None else adapter.namespace(self.namespace)
        branch.namespace = namespace
        return Request(
            id=self.context.next_request_id(),
            prompt=prompt.ids,
            sampling=sampling,
            listener=listener,
            namespace=namespace,
            history=self.texts_key(namespace),
            adapter=adapter,
            client=self.record.tenant,
            program=self.record,
            num_calls_after=branch.num_calls_ahead() - 1,
            shared_ends=() if prompt.compressed is not None else (branch.fork_length,),
            images=images,
            compressed=prompt.compressed,
            text_ids=prompt.text,
        )

    def _shown(self, branch: EngineBranch, prompt: array[int], policy: KVPolicy | None) -> Shown:
        """A prompt as its KV is kept. Raises InvalidRequest."""
        policy = policy or self.context.policy_of(branch.kv.shown(prompt))
        return refuse_images(branch.kv.with_policy(prompt, policy, self.context.compressed))

    def _recompression(self, policy: KVPolicy | None, shown: Shown) -> Recompression | None:
        """What a stream keeps while it is generated."""
        policy = policy or self.context.policy_of(shown)
        if policy is None or not policy.is_stream:
            return None
        return Recompression(self.context.compressed, policy)

    def _images(self, prompt: array[int]) -> tuple[ImageSpan, ...]:
        """Raises InvalidRequest for more than a prompt may have."""
        registry = self.context.images
        if registry is None:
            return ()
        spans, most = spans_of(prompt, registry.by_id), registry.limits.max_images
        if len(spans) > most:
            allowed = f"at most {most} in a prompt (max_images)"
            raise InvalidRequest.of("image", f"{len(spans)} images", allowed)
        return spans

    def _gen_call(
        self,
        report: Report,
        sampling: SamplingParams,
        scores: PromptScores | None,
        *,
        is_silent: bool = False,
    ) -> GenCall:
        return GenCall(
            report,
            sampling,
            self.context.tokenizer,
            is_streaming=self.is_streaming and not is_silent,
            has_token_ids=self.has_token_ids,
            validate=self._validate(),
            prompt_scores=scores,
        )

    def _submit(self, call: Call, requests: Sequence[Request]) -> None:
        """Queue a call's requests, all or none."""
        try:
            for request in requests:
                self.context.queue.submit(request)
        except StemmaError:
            call.abort(self.context.queue)
            raise

    def _grammar(self, constraint: Constraint | None) -> PendingGrammar | None:
        if constraint is None:
            return None
        if self.context.grammars is None:
            raise InvalidRequest(f"{constraint.kind}: this runtime has no grammars", "constraint")
        spec = GrammarSpec(
            constraint.kind,
            constraint.source,
            constraint.whitespace,
            constraint.property_order,
            constraint.is_lenient,
            constraint.formats,
        )
        return self.context.grammars.ask(spec, self.namespace, self.record.tenant)

    def _validate(self) -> Validate | None:
        grammars = self.context.grammars
        return None if grammars is None else partial(grammars.validate, tenant=self.record.tenant)

    def _jump_forward(self, params: ir.GenParams) -> bool:
        """Off where each token's log probability is asked for: a forced one has none."""
        wanted = self.context.jump_forward if params.jump_forward is None else params.jump_forward
        if not isinstance(wanted, bool):
            raise InvalidRequest.of("jump_forward", wanted, "true or false")
        return wanted and params.logprobs is None

    def _samplings(self, branch: EngineBranch, op: ir.Gen) -> list[SamplingParams]:
        """Of each sample. Raises InvalidRequest naming the field at fault."""
        given, vocab_size = op.params, self.context.vocab_size
        num_samples = 1 if given.n is None else given.n
        RANGES["n"].require("n", num_samples)
        first = self.context.defaults.sampling(given, branch.seed_of(op, self.seed, self.instance))
        largest = max((token_id for token_id, _ in first.logit_bias), default=0)
        if largest >= vocab_size:
            allowed = f"token ids in [0, {vocab_size - 1}]"
            raise InvalidRequest.of("logit_bias", largest, allowed)
        return [replace(first, seed=seed_of_sample(first.seed, i)) for i in range(num_samples)]

    def _prompt(self, branch: EngineBranch) -> array[int]:
        transcript = branch.begun
        transcript.require_content()
        if not transcript.ids:
            transcript.append_ids((), "")  # BOS, where the model has one
        if not transcript.ids:
            raise InvalidProgram("nothing to generate from: the prompt is empty")
        return transcript.ids[:]

    def _empty_context(self) -> array[int]:
        tokenizer, eos = self.context.tokenizer, self.context.defaults.eos_token_ids
        return array("i", tokenizer.bos_ids[:1] or eos[:1] or [0])


def _beam_params(params: ir.GenParams) -> BeamParams | None:
    """None: tokens are drawn. Raises InvalidRequest naming what a beam search cannot do."""
    width, penalty, early = params.beam, params.length_penalty, params.early_stopping
    if width is None:
        for name in ("length_penalty", "early_stopping"):
            if getattr(params, name) is not None:
                raise InvalidRequest.of(name, getattr(params, name), "only together with beam")
        return None
    RANGES["beam"].require("beam", width)
    if params.max_tokens == 0:
        raise InvalidRequest.of("max_tokens", 0, "at least 1 with beam")
    RANGES["length_penalty"].require("length_penalty", 1.0 if penalty is None else penalty)
    if not (early is None or isinstance(early, bool) or early == "never"):
        raise InvalidRequest.of("early_stopping", early, 'true, false or "never"')
    if params.n is not None and params.n > width:
        raise InvalidRequest.of("n", params.n, f"at most beam, {width}")
    for name, harmless in _WITH_BEAM.items():
        value = getattr(params, name)
        if value is not None and value not in harmless:
            allowed = " or ".join(map(str, harmless)) or "left out"
            raise InvalidRequest.of(name, value, f"{allowed}: a beam search draws nothing")
    for name in ("logprobs", "logprob_start"):
        if getattr(params, name) is not None:
            raise InvalidRequest.of(name, getattr(params, name), "not together with beam")
    if params.constraint is not None and params.constraint.is_lenient:
        raise InvalidRequest.of("lenient", True, "not together with beam")
    return BeamParams(
        width,
        1.0 if penalty is None else penalty,
        "never" if early == "never" else bool(early),
    )


# Values that leave the model's own distribution as it is, or take its best token.
_WITH_BEAM = {"temperature": (0, 1), "top_p": (1,), "top_k": (), "min_p": (0,)}


def _prompt_scores(params: ir.GenParams, prompt: array[int]) -> PromptScores | None:
    """Raises InvalidRequest."""
    start = params.logprob_start
    if start is None:
        return None
    if params.logprobs is None:
        raise InvalidRequest.of("logprob_start", start, "only together with logprobs")
    is_int = isinstance(start, int) and not isinstance(start, bool)
    if not is_int or not 0 <= start <= len(prompt):
        allowed = f"an integer in [0, {len(prompt)}], the prompt's length"
        raise InvalidRequest.of("logprob_start", start, allowed)
    images = [place for place in range(start, len(prompt)) if prompt[place] < 0]
    if images:
        allowed = f"at least {images[-1] + 1}: an image's tokens have no log probabilities"
        raise InvalidRequest.of("logprob_start", start, allowed)
    return PromptScores(prompt, start, params.logprobs)


def _deadline_s(params: ir.GenParams) -> float | None:
    """By time.perf_counter(). Raises InvalidRequest."""
    seconds = params.deadline_s
    if seconds is None:
        return None
    RANGES["deadline_s"].require("deadline", seconds)
    return time.perf_counter() + seconds


def _priority(params: ir.GenParams) -> int:
    """Raises InvalidRequest."""
    priority = 0 if params.priority is None else params.priority
    RANGES["priority"].require("priority", priority)
    return priority
