"""Drafts of a step: who guesses what follows a request's text, and how much of it is verified.

    a row's inputs    | last token |  draft 0  | forced | forced |  draft 1  |
    it samples after        0                                3         4
    what counts        always       if draw 0 is draft 0 ...  if draw 1 is draft 1

Drafters guess (`speculate/`), the request's grammar cuts a guess where it forbids the next token
and splices in what it forces, and a budget decides how many tokens of whose guesses the step
computes. What is drawn decides which of them were right (`outputs.py`): no output depends on any of
this. A draft model's guess may be a tree, whose likeliest tokens are verified (`draft_tree.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...constrained.matcher import Mask
from ...constrained.serving.follower import Follower
from ..speculate import prediction
from ..speculate.budget import DraftBudget
from ..speculate.drafter import NO_DRAFT, Draft, DraftText
from ..speculate.drafting import Drafting
from ..speculate.guesses import NO_WORTH, Candidate, ModelText, Worth
from ..speculate.step_times import StepTimes
from .draft_tree import num_same
from .guess import Guess, SideToken, Verified, VerifiedBranch, branches_of
from .plan import MAX_BRANCH_TOKENS, RowResult, StepPlan, StepResult
from .program_record import ProgramRecord
from .request import Request
from .stats import SchedulerStats

# Beside a chance below this a guess is not worth the time of making it.
_LEAST_CHANCE = 0.02
# A grammar's process computes a mask for each token that is expected, be it right or not.
_LEAST_EXPECTED = 0.2
# A request whose text was so often in a row not foreseen is asked in every second step only, then
# in every third, and so on up to MAX_REST: where nothing can be guessed, asking is what it costs.
_PATIENCE = 4
_MAX_REST = 12


class Speculation:
    """Owns the texts that drafters follow, by request, and what a step costs.

    A text is followed from the first draft on, or is read when the request ends, so that later ones
    may learn from it.
    """

    def __init__(self, drafting: Drafting, num_mask_words: int, stats: SchedulerStats) -> None:
        self._drafting = drafting
        self.times = StepTimes()
        self._budget = DraftBudget(self.times)
        self._num_mask_words = num_mask_words
        self._stats = stats
        self._by_source: dict[str, list[int]] = {}  # drafted and accepted tokens
        self._texts: dict[Request, _Texts] = {}
        self._verified: dict[Request, Verified] = {}  # by the plan in flight
        self._began_s = 0.0  # when planning the step began
        # Requests of which nothing is to be asked in so many steps, while they are alone in them.
        self._resting: Sequence[Request] = ()
        self._rest = 0

    def choose(
        self, requests: Sequence[Request], num_tokens: int, room: int
    ) -> Iterator[tuple[int, Verified]]:
        """The guesses to verify, by the index of their request, in a step with `num_tokens` tokens
        and room for so many more."""
        if self._rest and requests == self._resting:
            self._rest -= 1
            return
        least = self._budget.least_chance(num_tokens, len(requests))
        if least >= 1.0 or room <= 0:
            return
        least = max(least, _LEAST_CHANCE)
        guesses = [self._guess(request, least) for request in requests]
        if not any(guess.tokens for guess in guesses):
            self._rest_with(requests)
            return
        bids = [
            guess.bid(least, weight)
            for guess, weight in zip(guesses, _weights(requests), strict=True)
        ]
        num_left = MAX_BRANCH_TOKENS
        for index, length in enumerate(self._budget.lengths(num_tokens, bids, room)):
            self._note_use(guesses[index], length)
            if length:
                request = requests[index]
                verified = self._verifiable(request, guesses[index], length)
                if verified.num_branch_tokens > num_left:
                    verified = replace(verified, branches=())
                num_left -= verified.num_branch_tokens
                self._verified[request] = verified
                yield index, verified

    def _rest_with(self, requests: Sequence[Request]) -> None:
        """None of these has a guess: ask none before the first of them is to be asked again."""
        texts = [self._texts[request] for request in requests if request in self._texts]
        are_local = all(each.follower is None or each.follower.is_local for each in requests)
        self._resting = requests
        self._rest = min([text.rest for text in texts], default=_MAX_REST) if are_local else 0
        for text in texts:
            text.rest -= self._rest

    def _note_use(self, guess: Guess, length: int) -> None:
        """So much of a guess is to be verified."""
        model = self._drafting.model
        if model is not None and guess.sides:
            _, sides = guess.first(length)
            model.note_beside(bool(sides))

    @property
    def has_model(self) -> bool:
        """Whether the executor guesses, too."""
        return self._drafting.model is not None

    def num_beside(self) -> int:
        """How many more candidates the executor is to name for each token ahead."""
        model = self._drafting.model
        return 0 if model is None else model.num_beside()

    def follows(self, request: Request) -> bool:
        """Whether the draft model is to compute a request's tokens, too; decided when it is
        admitted."""
        model = self._drafting.model
        if model is None or request.stream is not None or request.is_ahead:
            return True  # another engine guesses, or a later request
        is_drafted = request.samples and request.beam is None
        return model.follows(request.op_key, is_drafted, self.times.curve)

    def num_ahead(self, requests: Sequence[Request]) -> list[int]:
        """How many tokens the executor is to guess of each behind the step that is planned. One of
        whose op they turned out not to be worth it is not followed from here on."""
        model = self._drafting.model
        if model is None or model.rests():
            return [0] * len(requests)
        rooms = [self._room_of(request) for request in requests]
        texts = [self._model_text(request) for request in requests]
        room = max(rooms, default=0)
        if model.most is not None:
            room = min(room, model.most)
        if not room:
            return [0] * len(requests)
        curve = self.times.curve
        wanted = model.num_ahead(texts, curve, room, self.times.is_known)
        if any(wanted):
            self._rest = 0
        elif model.has_kv:
            for request, text in zip(requests, texts, strict=True):
                request.is_followed = text.is_worth_following(curve)
        return [min(num, room) for num, room in zip(wanted, rooms, strict=True)]

    def offer(self, request: Request, result: RowResult) -> None:
        """The executor guesses what follows the tokens that it has computed and drawn."""
        text, guess = self._model_text(request), result.ahead
        sides = [Candidate(*each) for each in result.beside]
        text.offer([each.token_id for each in guess], [each.logprob for each in guess], sides)
        forced = request.token_ids[request.num_computed_tokens + 1 :]
        text.skip(forced)

    def _model_text(self, request: Request) -> ModelText:
        text = self._texts_of(request).model
        assert text is not None, "there is no draft model"
        return text

    def drop(self, request: Request) -> None:
        """There is no room for what was chosen for it."""
        del self._verified[request]

    def note(self, request: Request, follows: Sequence[int], num_right: int, is_over: bool) -> None:
        """Of the request's row a path of so many guessed tokens was right: the first of `follows`,
        the text behind what was known; `is_over`: the request has ended with them, which says
        nothing of the next one."""
        verified = self._verified.pop(request)
        if num_right:
            self._texts[request].wake()
        self._stats.num_drafts += 1
        guess = verified.guess
        num_own = num_same(verified.tokens, follows[:num_right])
        num_tokens = num_own if is_over and num_own == num_right else len(verified.tokens)
        ends = [first for _, _, first in guess.parts[1:]] + [num_tokens]
        for (text, draft, first), end in zip(guess.parts, ends, strict=True):
            num_guessed = guess.num_guessed(first, min(end, num_tokens))
            if not num_guessed:
                break
            num_accepted = guess.num_guessed(first, min(end, num_own))
            self._count(request, draft.source, num_guessed, num_accepted)
            text.note(draft.first(num_guessed), num_accepted)
            if num_accepted < num_guessed:
                break
        if guess.sides:
            self._note_sides(request, verified, follows, num_right, is_over)

    def _note_sides(
        self,
        request: Request,
        verified: Verified,
        follows: Sequence[int],
        num_right: int,
        is_over: bool,
    ) -> None:
        """Whether a token was right in another's place is known where all before it was, be it
        verified or not."""
        model = self._texts_of(request).model
        for side in verified.guess.sides:
            *before, token_id = side.path
            place = len(before)
            is_known = place <= min(num_right, len(follows) - 1) and before == [*follows[:place]]
            if model is not None and is_known:
                model.note_side(side.cell, token_id == follows[place])
        for branch in verified.branches:
            num_before = len(branch.path) - len(branch.sides)
            num_accepted = max(0, num_same(branch.path, follows[:num_right]) - num_before)
            num_guessed = num_accepted if is_over else len(branch.sides)
            self._count(request, branch.sides[0].source, num_guessed, num_accepted)

    def _count(self, request: Request, source: str, num_guessed: int, num_accepted: int) -> None:
        request.num_drafted_tokens += num_guessed
        request.num_accepted_tokens += num_accepted
        self._stats.num_draft_tokens += num_guessed
        self._stats.num_accepted_tokens += num_accepted
        counts = self._by_source.setdefault(source, [0, 0])
        counts[0] += num_guessed
        counts[1] += num_accepted
        if source == prediction.NAME:
            request.num_accepted_prediction += num_accepted
            request.num_rejected_prediction += num_guessed - num_accepted

    def expect(self, request: Request) -> None:
        """Its grammar's process is about to be asked where it stands: guess what follows, so that
        it can say ahead what it allows of that."""
        follower, room = request.follower, self._room_of(request)
        if follower is None or room <= 0:
            return
        texts = self._texts_of(request)
        if not texts.rests():
            _, draft = texts.best(room, (), _LEAST_EXPECTED)
            num_likely = sum(chance >= _LEAST_EXPECTED for chance in draft.chances)
            follower.expect(draft.tokens[:num_likely])

    def describe(self) -> dict[str, Any]:
        """Counts by who guessed, what steps take by their tokens, and what a pass of the draft
        model takes (None: there was none), as plain data."""
        counts = {
            source: {"drafted_tokens": drafted, "accepted_tokens": accepted}
            for source, (drafted, accepted) in self._by_source.items()
        }
        step_ms = {str(size): ms for size, ms in self.times.describe().items()}
        model = self._drafting.model
        pass_ms = None if model is None or model.pass_s is None else 1000 * model.pass_s
        return {"sources": counts, "step_ms": step_ms, "pass_ms": pass_ms}

    def begin_step(self) -> None:
        """A step is about to be planned."""
        self._began_s = time.perf_counter()

    def end_step(self, plan: StepPlan, result: StepResult) -> None:
        """The step has been applied; the executor may know how long it took."""
        duration_s, guessing = result.duration_s, result.guessing
        if duration_s is not None:
            host_s = time.perf_counter() - self._began_s - duration_s
            self.times.note(plan.num_tokens, duration_s - guessing.seconds, max(0.0, host_s))
        if (model := self._drafting.model) is not None:
            model.note_step(duration_s or 0.0, guessing.seconds)
            if guessing.num_passes and all(row.is_output for row in plan.rows):
                model.note_passes(guessing.seconds, guessing.num_passes)

    def end(self, request: Request) -> None:
        """A request has ended."""
        self._verified.pop(request, None)
        if request.num_output_tokens or request in self._texts:
            self._texts_of(request).close()
            del self._texts[request]

    def _texts_of(self, request: Request) -> _Texts:
        texts = self._texts.get(request)
        if texts is None:
            opened = [drafter.open(request) for drafter in self._drafting.drafters]
            texts = self._texts[request] = _Texts([text for text in opened if text is not None])
        texts.follow(request)
        return texts

    def _room_of(self, request: Request) -> int:
        """How many tokens may be guessed of it at most."""
        if request.follower is not None and not self._drafting.under_grammars:
            return 0
        return min(self._drafting.max_tokens, request.num_new_tokens - 1)

    def _guess(self, request: Request, least: float) -> Guess:
        guess = Guess()
        room = self._room_of(request)
        if room <= 0:
            return guess
        texts = self._texts_of(request)
        is_local = request.follower is None or request.follower.is_local
        if is_local and not texts.has_guess and texts.rests():
            return guess  # of the others `expect` has asked
        if request.follower is None:
            self._draft_freely(guess, texts, request, room, least)
            return guess
        return self._draft_under_grammar(guess, texts, request, request.follower, room, least)

    def _draft_under_grammar(
        self,
        guess: Guess,
        texts: _Texts,
        request: Request,
        follower: Follower,
        room: int,
        least: float,
    ) -> Guess:
        ahead = follower.look_ahead()
        if ahead is not None:
            try:
                while self._draft_along(ahead, guess, texts, request, room, least):
                    pass
            finally:
                ahead.close()
        guess.add_sides(request.stop_ids)
        if guess.sides:
            self._keep_allowed(guess, follower, room, least)
        return guess

    def _keep_allowed(self, guess: Guess, follower: Follower, room: int, least: float) -> None:
        """Drop the sides that the grammar forbids, behind which it forces something, or whose
        parents are dropped. One that is not local has not been asked about them."""
        kept: dict[SideToken | None, None] = {None: None}
        for side in guess.sides if follower.is_local else ():
            if side.parent in kept and side.chance >= least and len(side.path) <= room:
                ahead = follower.look_ahead()
                assert ahead is not None, "it is local"
                try:
                    is_allowed = all(map(ahead.consume, side.path))
                    if is_allowed and not ahead.is_finished and not ahead.forced_run():
                        kept[side] = None
                finally:
                    ahead.close()
        guess.sides = [side for side in guess.sides if side in kept]

    def _draft_freely(
        self, guess: Guess, texts: _Texts, request: Request, room: int, least: float
    ) -> None:
        """Append a draft, up to where it is too unlikely or would end the output."""
        text, draft = texts.best(room, (), least)
        if text is None:
            return
        guess.parts.append((text, draft, 0))
        chances = draft.chances
        end = next((i for i, chance in enumerate(chances) if chance < least), len(chances))
        if not request.stop_ids.isdisjoint(draft.tokens[:end]):
            end = next(i for i, token_id in enumerate(draft.tokens) if token_id in request.stop_ids)
        guess.extend(draft.tokens[:end], chances[:end])
        guess.add_sides(request.stop_ids)

    def _draft_along(
        self,
        ahead: Follower,
        guess: Guess,
        texts: _Texts,
        request: Request,
        room: int,
        least: float,
    ) -> bool:
        """Append one more draft that the grammar allows; whether another may follow it, behind what
        the grammar forces."""
        num_before = len(guess.tokens)
        text, draft = texts.best(room - num_before, guess.tokens, least)
        if text is None:
            return False
        guess.parts.append((text, draft, num_before))
        chance = guess.chances[-1] if guess.chances else 1.0
        for token_id, confidence in zip(draft.tokens, draft.confidences):
            chance *= confidence
            if chance < least or token_id in request.stop_ids or not ahead.consume(token_id):
                return False
            run = ahead.forced_run()[: room - len(guess.tokens) - 1]
            if not all(map(ahead.consume, run)) or ahead.is_finished:
                return False  # behind the last token nothing is drawn: its KV is of no use
            guess.append(token_id, chance, run)
            if run:
                return len(guess.tokens) < room
        return False

    def _verifiable(self, request: Request, guess: Guess, length: int) -> Verified:
        """The `length` likeliest tokens of a guess, with where to sample."""
        num_own, sides = guess.first(length)
        follower = request.follower
        if follower is None:
            own, everywhere = tuple(guess.tokens[:num_own]), tuple(range(num_own + 1))
            return Verified(guess, own, everywhere, (), branches_of(sides, num_own))
        tokens = guess.tokens[:num_own]
        ahead = follower.look_ahead()
        assert ahead is not None, "it could say something a moment ago"
        draws: tuple[int, ...] = (0,)
        masks: tuple[Mask, ...] = ()
        try:
            for place, token_id in enumerate(tokens, 1):
                if not ahead.consume(token_id):
                    tokens = tokens[: place - 1]
                    break
                is_inside = place < len(guess.tokens) and guess.is_forced[place]
                if is_inside or ahead.is_finished or ahead.forced_run():
                    continue
                draws += (place,)
                masks += (self._mask(ahead),)
        finally:
            ahead.close()
        branches = branches_of(
            [side for side in sides if side.leaves_at < len(tokens)], len(tokens)
        )
        branches = tuple([self._masked(branch, follower) for branch in branches])
        return Verified(guess, tuple(tokens), draws, masks, branches)

    def _masked(self, branch: VerifiedBranch, follower: Follower) -> VerifiedBranch:
        ahead = follower.look_ahead()
        assert ahead is not None, "its sides were allowed a moment ago"
        masks = []
        try:
            for place, token_id in enumerate(branch.path, len(branch.sides) - len(branch.path)):
                is_allowed = ahead.consume(token_id)
                assert is_allowed, "its sides were allowed a moment ago"
                if place >= 0:
                    masks.append(self._mask(ahead))
        finally:
            ahead.close()
        return replace(branch, masks=tuple(masks))

    def _mask(self, ahead: Follower) -> Mask:
        mask = np.zeros(self._num_mask_words, np.uint32)
        ahead.mask(mask)
        return mask


class _Texts:
    """One request's text, as each drafter follows it."""

    def __init__(self, texts: Sequence[DraftText]) -> None:
        self._texts = texts
        models = [text for text in texts if isinstance(text, ModelText)]
        self.model = models[0] if models else None
        self._num_seen = 0  # output tokens
        self._num_vain = 0  # times that it was asked since it was right last
        self.rest = 0  # steps in which it is not to be asked

    @property
    def has_guess(self) -> bool:
        """Whether the executor has guessed what follows."""
        return self.model is not None and self.model.has_guess

    def rests(self) -> bool:
        """Whether it is not to be asked in this step."""
        if self.rest:
            self.rest -= 1
            return True
        self._num_vain += 1
        self.rest = min(max(0, self._num_vain - _PATIENCE), _MAX_REST)
        return False

    def wake(self) -> None:
        """A guess was right."""
        self._num_vain = self.rest = 0

    def follow(self, request: Request) -> None:
        """Tell what was generated since the last time."""
        if self._num_seen < request.num_output_tokens:
            new = request.output_ids[self._num_seen :]
            self._num_seen += len(new)
            for text in self._texts:
                text.extend(new)

    def best(self, room: int, tail: Sequence[int], least: float) -> tuple[DraftText | None, Draft]:
        """The draft of which most is expected to be right; less likely tokens than `least` are of
        no use."""
        drafts = [(text, _before_image(text.propose(room, tail))) for text in self._texts]
        found = [(text, draft) for text, draft in drafts if draft.tokens]
        best = max(found, key=_num_expected, default=(None, NO_DRAFT))
        if self.model is not None and not tail:
            others = [_worth(draft, least) for text, draft in found if text is not self.model]
            self.model.note_choice(best[0] is self.model, max(others, default=NO_WORTH))
        return best

    def close(self) -> None:
        for text in self._texts:
            text.close()


def _before_image(draft: Draft) -> Draft:
    """What a model can say of a draft: it may be from a prompt, where an image followed."""
    end = next((i for i, token_id in enumerate(draft.tokens) if token_id < 0), None)
    return draft if end is None else draft.first(end)


def _num_expected(found: tuple[DraftText, Draft]) -> float:
    """Tokens of a draft that are expected to be right."""
    return sum(found[1].chances)


def _worth(draft: Draft, least: float) -> Worth:
    useful = [chance for chance in draft.chances if chance >= least]
    return Worth(sum(useful), len(useful))


def _weights(requests: Sequence[Request]) -> list[float]:
    """Of each request's tokens against those of others in its step: twice as much where it is
    urgent, half as much where its program waits longer for another of its own, as a join does for
    the branch with the most left to say."""
    longest: dict[ProgramRecord, int] = {}
    for request in requests:
        if (program := request.program) is not None:
            longest[program] = max(longest.get(program, 0), request.num_new_tokens)
    return [_weight_of(request, longest) for request in requests]


def _weight_of(request: Request, longest: Mapping[ProgramRecord, int]) -> float:
    is_urgent = request.priority > 0 or request.deadline_s is not None
    program = request.program
    is_critical = program is None or request.num_new_tokens >= longest[program]
    return (2.0 if is_urgent else 1.0) * (1.0 if is_critical else 0.5)
