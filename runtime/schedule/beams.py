"""Beam searches as requests: each live hypothesis is one, and computes one token a step.

    step t      what they report                 step t + 1
    A  ... the  A: cat -0.5, dog -1.2            A  ... the cat
    B  ... a    B: cow -2.3, cat -3.0            B  ... the dog   reads what A has computed

Once all live hypotheses have reported, the best candidates go on: the best one of each hypothesis
in its request, the others in requests whose hypotheses were dropped, or in new ones. These read
what their parent has computed through the radix tree, so that hypotheses are nodes of it. Whoever
has reported waits, with its row and pages, for those that were preempted or had no room in the
step; if it is preempted meanwhile, it queues again only with its next token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...constrained.serving.follower import Follower
from .beam_search import BeamParams, BeamSearch, Candidate
from .cache.kv_cache import KVCacheManager
from .plan import TokenLogprob
from .queue.admission import NewTokenEstimate
from .request import FinishReason, Request, RequestState
from .stats import SchedulerStats


class HypothesisText(Protocol):
    """The text of a hypothesis, where it may end with that."""

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string ends it."""

    def extended(self, token_id: int) -> HypothesisText:
        """The text with one more token; this one stays as it is."""


class Seats(Protocol):
    """What the searches need of the scheduler."""

    def join(self, request: Request) -> None:
        """A request for one more hypothesis: it belongs to the scheduler, and does not run yet."""

    def queue_first(self, request: Request) -> None:
        """A request that does not run is to run before all others that wait."""

    def vacate(self, request: Request, *, keep: bool) -> None:
        """A request gives up its row and pages, and is in no queue; with `keep` what it has
        computed stays cached."""

    def finish(self, request: Request, reason: FinishReason) -> None:
        """A request ends."""


@dataclass(frozen=True, slots=True)
class Child:
    """A candidate, and where its grammar and its text stand behind its token."""

    candidate: Candidate
    parent: Request
    is_stop: bool  # a stop token
    follower: Follower | None = None
    text: HypothesisText | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it is known where its grammar stands."""
        return self.follower is None or self.follower.is_ready

    @property
    def error(self) -> str | None:
        """Why its grammar cannot be followed any further."""
        return None if self.follower is None else self.follower.error

    @property
    def has_ended(self) -> bool:
        """Whether its token is its last one."""
        if self.is_stop or (self.text is not None and self.text.has_stopped):
            return True
        return self.follower is not None and self.follower.is_finished

    def close(self) -> None:
        """It does not go on."""
        if self.follower is not None:
            self.follower.close()


class BeamGroup:
    """One search and its requests. `live[i]` computes `search.live[i]`; those that are `idle` have
    no hypothesis, and are in no queue. The leader stands for the call, whatever it computes.

    Invariant: a live request that has reported has computed all of its tokens, or was preempted
    since.
    """

    search: BeamSearch  # once the leader has been queued

    def __init__(
        self,
        params: BeamParams,
        leader: Request,
        new_request: Callable[[], Request],
        text: HypothesisText | None = None,
    ) -> None:
        """`new_request`: makes one like the leader, for a further hypothesis. `text`: of the empty
        output; None: no text ends an output."""
        self._leader = leader
        self.new_request = new_request
        self.live = [leader]
        self.idle: list[Request] = []
        self._params = params
        self._texts = [text]
        self._reports: dict[Request, tuple[TokenLogprob, ...]] = {}
        self._children: list[Child] | None = None

    @property
    def leader(self) -> Request:
        return self._leader

    @property
    def num_best(self) -> int:
        return self.search.num_candidates

    def begin(self) -> None:
        """The leader has been queued: its limits are known."""
        leader = self.leader
        self.search = BeamSearch(
            self._params, num_stop_ids=len(leader.stop_ids), max_tokens=leader.max_output_tokens
        )

    @property
    def requests(self) -> Sequence[Request]:
        """All of them."""
        return (*self.live, *self.idle)

    def report(self, request: Request, best: tuple[TokenLogprob, ...]) -> None:
        self._reports[request] = best

    def has_reported(self, request: Request) -> bool:
        return request in self._reports

    def forget(self, request: Request) -> None:
        self._reports.pop(request, None)
        self.close()

    @property
    def awaits_grammar(self) -> bool:
        """Whether all have reported, and grammars are followed elsewhere to the candidates."""
        return self._children is not None and not self.is_ready

    @property
    def is_ready(self) -> bool:
        """Whether `advance` may be called."""
        if len(self._reports) < len(self.live):
            return False
        if self._children is None:
            self._children = list(self._make_children())
        return all(child.is_ready for child in self._children)

    def advance(self) -> tuple[list[Child], list[Child]]:
        """The candidates that go on, in the order of `search.live`, and those that have ended; the
        requests are to follow (`settle`)."""
        assert self._children is not None, "not all have reported"
        possible = [child for child in self._children if child.error is None]
        if not possible:
            errors = [child.error for child in self._children]
            self.leader.error = f"the grammar cannot be followed: {[*errors, 'no token'][0]}"
        ends = [child.has_ended for child in possible]
        candidates = [child.candidate for child in possible]
        going_on = self.search.advance(candidates, ends, self.leader.stop_ids)
        survivors = [possible[index] for index in going_on]
        for child in self._children:
            if child not in survivors:
                child.close()
        self._children = None
        self._reports.clear()
        return survivors, [child for child, has_ended in zip(possible, ends) if has_ended]

    def settle(self, live: Sequence[Request], children: Sequence[Child]) -> None:
        """These requests compute these children from now on."""
        everyone = dict.fromkeys((*self.requests, *live))
        self.live, self._texts = list(live), [child.text for child in children]
        self.idle = [request for request in everyone if request not in live]

    def close(self) -> None:
        """Drop the candidates."""
        for child in self._children or ():
            child.close()
        self._children = None

    def _make_children(self) -> Iterator[Child]:
        for candidate in self.search.candidates([self._reports[r] for r in self.live]):
            parent, token_id = self.live[candidate.parent], candidate.token_id
            if token_id in parent.stop_ids:
                yield Child(candidate, parent, is_stop=True)
                continue
            follower = None if parent.follower is None else parent.follower.fork()
            if follower is not None and not follower.consume(token_id):
                follower.close()  # it has failed: its mask allowed this
                continue
            text = self._texts[candidate.parent]
            if text is not None:
                text = text.extended(token_id)
            yield Child(candidate, parent, False, follower, text)


class Beams:
    """Owns the searches that have not ended, and moves their requests.

    NOTE: no plan in flight names a request that has reported, so all may be moved at once.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        new_tokens: NewTokenEstimate,
        stats: SchedulerStats,
        seats: Seats,
    ) -> None:
        self._kv_cache = kv_cache
        self._new_tokens = new_tokens
        self._stats = stats
        self._seats = seats
        self._groups: dict[BeamGroup, None] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def has_ready(self) -> bool:
        """Whether `advance` would do anything."""
        return any(group.is_ready for group in self._groups)

    @property
    def awaits_grammar(self) -> bool:
        """Whether a search waits for another process."""
        return any(group.awaits_grammar for group in self._groups)

    def add(self, leader: Request) -> None:
        """A search begins: its leader has been queued."""
        group = leader.beam
        assert isinstance(group, BeamGroup)
        group.begin()
        self._groups[group] = None

    def end(self, request: Request) -> None:
        """One of a search's requests has ended, and so does the search."""
        group = request.beam
        if isinstance(group, BeamGroup) and group in self._groups:
            del self._groups[group]
            group.close()

    def advance(self) -> None:
        """Take the next step of all searches that are ready for it."""
        for group in [group for group in self._groups if group.is_ready]:
            if group in self._groups:  # the end of one may abort others
                self._advance(group)

    def _advance(self, group: BeamGroup) -> None:
        group.leader.note_first_token()
        survivors, ended = group.advance()
        self._stats.num_generated_tokens += len(survivors)
        for child in ended:  # whoever goes on from there finds it
            if child.parent.state is RequestState.RUNNING:
                self._kv_cache.publish_computed(child.parent)
        if group.search.is_done:
            for child in survivors:
                child.close()
            self._end(group)
        else:
            self._move(group, survivors)

    def _move(self, group: BeamGroup, children: Sequence[Child]) -> None:
        """Give each child a request: its parent's, or another that then reads the parent's KV."""
        staying: dict[Request, Child] = {}
        for child in children:
            staying.setdefault(child.parent, child)
        free = [*group.idle, *(r for r in group.live if r not in staying)]
        live: list[Request] = []
        for child in children:
            is_staying = staying[child.parent] is child
            request = child.parent if is_staying else self._spare(group, free)
            live.append(request)
            if not is_staying:
                self._fork(request, child)
        for child in staying.values():
            self._extend(child.parent, child)
        for request in free:
            self._seats.vacate(request, keep=False)
        group.settle(live, children)

    def _spare(self, group: BeamGroup, free: list[Request]) -> Request:
        if free:
            return free.pop()
        request = group.new_request()
        self._seats.join(request)
        return request

    def _fork(self, request: Request, child: Child) -> None:
        """Let a request compute a child of a hypothesis that stays with another."""
        parent = child.parent
        is_shared = request.state is parent.state is RequestState.RUNNING
        is_shared = is_shared and self._kv_cache.can_adopt(parent)
        if not is_shared:
            self._seats.vacate(request, keep=False)
        self._put_tokens(request, child)
        if parent.state is RequestState.RUNNING:
            self._kv_cache.publish_computed(parent)
        if is_shared:
            self._kv_cache.adopt(request, parent)
        else:
            if parent.state is RequestState.RUNNING and self._kv_cache.states is not None:
                self._kv_cache.states.keep_live(parent)
            self._seats.queue_first(request)

    def _extend(self, request: Request, child: Child) -> None:
        """Let a request go on with a child of its own hypothesis."""
        self._put_tokens(request, child)
        if request.state is not RequestState.RUNNING:
            self._seats.queue_first(request)

    def _put_tokens(self, request: Request, child: Child) -> None:
        if request.follower is not None:
            request.follower.close()
        request.follower = child.follower
        num_new_tokens = request.num_new_tokens
        request.token_ids = child.parent.token_ids[:]
        request.append_token(child.candidate.token_id)
        if request.state is RequestState.RUNNING:
            self._new_tokens.num_running += request.num_new_tokens - num_new_tokens

    def _end(self, group: BeamGroup) -> None:
        """All requests end; the leader, with the best hypothesis, is the last one."""
        leader, finished = group.leader, group.search.finished
        for request in group.requests:
            if request is not leader:
                self._seats.finish(request, FinishReason.ABORT)
        if not finished:
            return self._seats.finish(leader, FinishReason.ERROR)
        self._seats.vacate(leader, keep=True)
        best = finished[0]
        leader.token_ids = leader.prompt + best.token_ids
        self._seats.finish(leader, FinishReason.STOP if best.has_stopped else FinishReason.LENGTH)
