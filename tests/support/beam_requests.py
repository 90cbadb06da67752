"""Beam searches without a program: submitted to an engine, and computed by the rules alone."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from fakes import VOCAB_SIZE, ScriptedGrammar, best_of, chain_of

from stemma.constrained.serving.grammar_state import PendingGrammar
from stemma.runtime.engine import Engine
from stemma.runtime.schedule.beam_search import BeamParams, BeamSearch, Finished
from stemma.runtime.schedule.beams import BeamGroup, HypothesisText
from stemma.runtime.schedule.plan import RowResult
from stemma.runtime.schedule.request import FinishReason, Request
from stemma.runtime.schedule.sampling_params import SamplingParams


@dataclass
class BeamListener:
    """Of all requests of a search: what its leader has ended with."""

    ended: list[Request] = field(default_factory=list)
    group: BeamGroup | None = None
    on_end: Callable[[Request], None] = lambda request: None

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        raise AssertionError("hypotheses grow in their group")

    def on_finish(self, request: Request) -> None:
        assert request not in self.ended, "ended twice"
        self.ended.append(request)
        self.on_end(request)

    @property
    def leader(self) -> Request:
        assert self.group is not None
        return self.group.leader

    @property
    def outputs(self) -> list[tuple[list[int], float, bool]]:
        """(token ids, score, whether it has stopped), best first."""
        assert self.group is not None
        return plain(self.group.search.finished)


def plain(finished: Sequence[Finished]) -> list[tuple[list[int], float, bool]]:
    return [(f.token_ids.tolist(), f.score, f.has_stopped) for f in finished]


def submit_beam(
    engine: Engine,
    prompt: Sequence[int],
    params: BeamParams,
    sampling: SamplingParams,
    *,
    stop_ids: frozenset[int] = frozenset(),
    grammar: PendingGrammar | None = None,
    text: HypothesisText | None = None,
    on_new: Callable[[Request], None] = lambda request: None,
) -> BeamListener:
    """`on_new` hears of each request when it is made. What one ends badly ends them all."""
    listener = BeamListener()
    sampling = replace(sampling, temperature=0.0)

    def new_request() -> Request:
        request = Request(
            engine.next_request_id(),
            array("i", prompt),
            sampling,
            listener,
            stop_ids=stop_ids,
            grammar=grammar,
            jump_forward=False,
            beam=listener.group,
        )
        if listener.group is not None:
            request.max_output_tokens = listener.leader.max_output_tokens
        on_new(request)
        return request

    def end_all(request: Request) -> None:
        group = listener.group
        assert group is not None
        is_internal = request is not group.leader and request.finish_reason is FinishReason.ABORT
        if request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR) and not is_internal:
            for other in group.requests:
                engine.abort(other)

    listener.on_end = end_all
    leader = new_request()
    leader.beam = listener.group = BeamGroup(params, leader, new_request, text)
    engine.submit(leader)
    return listener


def scripted_search(
    prompt: Sequence[int],
    params: BeamParams,
    max_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    grammar: ScriptedGrammar | None = None,
) -> list[tuple[list[int], float, bool]]:
    """What a search over the scripted model finds when nothing else exists."""
    search = BeamSearch(params, num_stop_ids=len(stop_ids), max_tokens=max_tokens)
    while not search.is_done:
        best = []
        for hypothesis in search.live:
            chain = chain_of([*prompt, *hypothesis.token_ids])
            allowed = _allowed(grammar, hypothesis.token_ids, stop_ids)
            best.append(best_of(chain, sorted(allowed))[: search.num_candidates])
        candidates = search.candidates(best)
        ends = [
            c.token_id in stop_ids
            or _is_over(grammar, [*search.live[c.parent].token_ids, c.token_id])
            for c in candidates
        ]
        search.advance(candidates, ends, stop_ids)
    return plain(search.finished)


def _state(grammar: ScriptedGrammar, token_ids: Sequence[int]) -> int:
    state = 0
    for token_id in token_ids:
        state = grammar.moves[state][token_id]
    return state


def _allowed(
    grammar: ScriptedGrammar | None, token_ids: Sequence[int], stop_ids: frozenset[int]
) -> set[int]:
    if grammar is None:
        return set(range(VOCAB_SIZE))
    state = _state(grammar, token_ids)
    return set(grammar.moves[state]) | (stop_ids if state in grammar.accepting else set())


def _is_over(grammar: ScriptedGrammar | None, token_ids: Sequence[int]) -> bool:
    return grammar is not None and grammar.is_finished(_state(grammar, token_ids))
