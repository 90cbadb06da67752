"""Drafts from a draft model: what the executor has guessed behind a step for the next one.

A guess is offered with the draft model's own probability of each token; how often such a guess is
what is drawn is learnt, by that probability and the place in the draft. How many tokens are to be
guessed ahead follows from how often they were right and from what they cost (`num_ahead`): with
n rows whose guesses are right with a probability r each, the K for which

    (n + sum over rows of r + r^2 + ... + r^K) / (time of a step of n (1 + K) tokens + K * a pass)

is largest (the formula of Leviathan et al. 2023, arXiv:2211.17192, 3.5, with measured times). It is
compared with what the others' guesses bring without any pass: where they find much, a draft model
has to bring more than they do, not more than nothing.

To guess, a draft model with KV of its own must have followed the text from its beginning, which
costs time, too. So it follows the requests of an op whose guesses would pay if they were alone in
a step (`follows`); of others some, as long as what that takes is a small share of all time, so that
an op whose guesses are worth more by now, or a machine that has got faster, is found out.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, count
from operator import mul
from typing import NamedTuple

from .budget import MIN_GAIN, PROMISE
from .drafter import NO_DRAFT, Draft, Side, Subject
from .step_times import MAX_TOKENS, typical

NAME = "model"
_NUM_BINS = 16  # of probabilities
_NUM_PLACES = 4  # in a draft; the last one stands for all behind it
_NUM_RANKS = 3  # of candidates for a place; the last one stands for all behind it
_LEAST_SHARE = 0.05  # of guesses some of whose sides were verified, to ask for more in each step
_VAIN_BESIDE = 16  # steps, in one of which they are asked for below that
_MAX_CROSSED = 16  # sides of a draft whose places are independent
_PRIOR_WEIGHT = 3.0
_MEMORY = 256.0  # tokens of a cell, before older ones count for less
_PRIOR_RATE = 0.7  # guess, until an op's first outputs
_OWN_WEIGHT = 6.0  # tokens of its op's that an output's own rate begins with
_MAX_OPS = 1024
_LEAST_WORTH = 0.1  # of a guess ahead
_FIRST_AHEAD = 3  # while nothing is known of times
# Steps without guesses, behind which some are tried again; each time in vain twice as many.
_VAIN = 48
_MOST_VAIN = 16 * _VAIN
_PASSES = 9  # whose times are kept
# Of all time, what may go into following requests whose op's guesses do not pay, and guessing of
# them; so many tokens of each.
_TRIAL_SHARE = 0.005
_TRIAL_TOKENS = 8
_IN_USE = 256  # steps behind one in which guesses paid
_OTHERS_SHARE = 0.05  # of one more step in such a mean, at least
_LONGEST_WORTH = 4  # tokens ahead, of which one number pays or none does
_REST = 8  # steps between two looks at whether guesses pay by now; new texts are looked at at once


class Worth(NamedTuple):
    """Of a draft: how many of its tokens are expected to be right, of how many that a step would
    compute."""

    right: float
    size: float

    def towards(self, other: Worth, num_before: int) -> Worth:
        """The mean of so many, older ones counting for less, with one more."""
        share = max(_OTHERS_SHARE, 1 / (num_before + 1))
        return Worth(
            self.right + share * (other.right - self.right),
            self.size + share * (other.size - self.size),
        )


NO_WORTH = Worth(0.0, 0.0)


@dataclass(slots=True)
class _OpRate:
    """Of an op's guesses: how many were right of those seen, older ones counting for less; how many
    were preferred to those of others; and what the others' are worth, on average and where they
    were not preferred."""

    right: float
    seen: float
    share: float = 1.0
    others: Worth = NO_WORTH
    displaced: Worth = NO_WORTH
    num_others: int = 0  # steps that `others` is the mean of, and `displaced`
    num_displaced: int = 0

    @property
    def rate(self) -> float:
        return self.right / self.seen


class ModelDrafter:
    """Knows how often guesses were right, and what a pass costs."""

    def __init__(
        self, most: int | None = None, num_candidates: int = 0, has_kv: bool = True
    ) -> None:
        """most: tokens that can be guessed at a time, each whatever the others are; None: any
        number, each behind those before it. num_candidates: beside each. has_kv: it must have
        followed a text to guess what comes next."""
        self.most = most
        self._num_candidates = num_candidates
        self.is_independent = most is not None
        self._cells = [
            [_prior(index) * _PRIOR_WEIGHT, _PRIOR_WEIGHT]
            for index in range(_NUM_RANKS * _NUM_PLACES * _NUM_BINS)
        ]
        self.has_kv = has_kv
        self._rates: OrderedDict[Hashable, _OpRate] = OrderedDict()  # by op
        self._of_all = _OpRate(_PRIOR_RATE * _OWN_WEIGHT, _OWN_WEIGHT)
        self._passes = deque[float](maxlen=_PASSES)
        self.pass_s: float | None = None  # of all rows, a token each; None: not known
        self._pays = False  # in the last step for which it was asked, as far as is known
        self._num_steps = 0
        self._paid_at = -_IN_USE  # the last step in which it did
        self._elapsed_s = 0.0  # of all steps
        self._trials_s = 0.0  # of its own part in those in which it did not pay
        self._num_vain = 0
        self._patience = _VAIN
        self._rest = 0  # steps in which it need not be asked
        self._beside_share = 1.0  # of the guesses with candidates beside, where any was verified
        self._num_asked = 0

    def open(self, subject: Subject) -> ModelText:
        self._rest = 0
        return ModelText(self, self._rate_of(subject.op_key))

    def note_passes(self, seconds: float, num_passes: int) -> None:
        """The draft model took so long for so many tokens of each row."""
        if num_passes:
            self._passes.append(seconds / num_passes)
            self.pass_s = typical(self._passes)

    def note_step(self, duration_s: float, own_s: float) -> None:
        """A step took so long, of which the draft model `own_s`."""
        self._num_steps += 1
        self._elapsed_s += duration_s
        if self._pays:
            self._paid_at = self._num_steps
        else:
            self._trials_s += own_s

    def follows(self, op: Hashable, is_drafted: bool, curve: Sequence[float]) -> bool:
        """Whether to follow a request of this op from its first token on. is_drafted: it will
        want guesses; else its text may be the beginning of others that do. What only warms the
        cache of an engine that has just started is followed, too."""
        if not self.has_kv:
            return True
        if not is_drafted:
            is_worth_it = self._num_steps - self._paid_at < _IN_USE
        elif self.pass_s is None:
            is_worth_it = self._num_steps < _IN_USE
        else:
            of_op = self._rate_of(op)
            is_worth_it = self.pays(of_op.rate, of_op.share, of_op, curve)
        return is_worth_it or self._may_try

    def pays(self, rate: float, share: float, of_op: _OpRate, curve: Sequence[float]) -> bool:
        """Whether guesses of which so many are right would pay in steps of one row, where the
        first one is of use that often, beside what the op's others bring; also where nothing is
        measured yet."""
        if self.pass_s is None or not curve:
            return True
        others, displaced = of_op.others, of_op.displaced
        least = MIN_GAIN * (1.0 + others.right) / _at(curve, 1.0 + others.size)
        tokens, worth = 1.0 + others.right - share * displaced.right, share
        size = 1.0 + others.size - share * displaced.size
        for ahead in range(1, _LONGEST_WORTH + 1):
            worth *= rate
            tokens += worth
            if tokens > least * (_at(curve, size + share * ahead) + ahead * self.pass_s):
                return True
        return False

    def _trial(self, text: ModelText, curve: Sequence[float], most: int) -> int:
        """How many tokens to guess of a text that is followed though its op's guesses, as far as
        is known, would not even pay alone."""
        is_trial = self.has_kv and not text.pays(curve)
        return text.take_trial(most) if is_trial else 0

    @property
    def _may_try(self) -> bool:
        """Whether there is time for what does not pay."""
        return self._trials_s <= _TRIAL_SHARE * self._elapsed_s

    def num_ahead(
        self,
        texts: Sequence[ModelText],
        curve: Sequence[float],
        room: int,
        is_known: Callable[[int], bool],
    ) -> list[int]:
        """How many tokens, at most `room`, to guess of each text for a step that computes these
        alone. curve: see `StepTimes`; is_known: whether it was measured at such a size. Where it
        was not, one more than what pays is guessed if much is expected of it, so that it can be."""
        self._pays = True
        if self.pass_s is None or not curve:
            return [min(_FIRST_AHEAD, room)] * len(texts)
        rates = [text.rate for text in texts]
        shares = worth = [text.share for text in texts]
        num_rows, num_guessed = len(texts), 0.0
        others = _sum([text.others for text in texts])
        displaced = _sum([text.displaced for text in texts])
        # Without guesses, and with them but for what they bring.
        tokens = best_tokens = num_rows + others.right
        size = num_rows + others.size
        best = tokens / _at(curve, size) * MIN_GAIN
        tokens, size = tokens - displaced.right, size - displaced.size
        best_ahead = tried = 0
        for ahead in range(1, room + 1):
            worth = [chance * rate for chance, rate in zip(worth, rates, strict=True)]
            wanted = [chance for chance in worth if chance >= _LEAST_WORTH]
            num_guessed += sum(share for share, it in zip(shares, worth) if it >= _LEAST_WORTH)
            if not wanted or size + num_guessed > MAX_TOKENS:
                break
            tokens += sum(wanted)
            rate = tokens / (_at(curve, size + num_guessed) + ahead * self.pass_s)
            if rate > best:
                best, best_ahead, best_tokens = rate, ahead, tokens
            elif ahead == best_ahead + 1 and tokens >= best_tokens * PROMISE:
                tried = 0 if is_known(num_rows + round(num_guessed)) else ahead
        best_ahead = max(best_ahead, tried)
        self._pays = best_ahead > 0
        if not best_ahead:
            trials = [self._trial(text, curve, min(2, room)) for text in texts]
            if any(trials):
                return trials
            self._num_vain += 1
            if self._num_vain < self._patience:
                self._rest = _REST
                return [0] * num_rows
            self._num_vain, self._patience = 0, min(2 * self._patience, _MOST_VAIN)
            return [min(2, room)] * num_rows
        self._num_vain, self._patience = 0, _VAIN
        nums = [_num_worth(text, best_ahead) for text in texts]
        for text, num in zip(texts, nums, strict=True):
            text.take_trial(num)
        return nums

    def rests(self) -> bool:
        """Whether it need not be asked in this step how many tokens to guess: none."""
        if not self._rest:
            return False
        self._rest -= 1
        self._num_vain += 1
        return True

    def num_beside(self) -> int:
        """How many candidates to ask for beside each token ahead in the next step: some in each
        while any is verified now and then, else in some steps."""
        self._num_asked += 1
        is_vain = self._beside_share < _LEAST_SHARE and self._num_asked % _VAIN_BESIDE
        return 0 if is_vain else self._num_candidates

    def note_beside(self, are_verified: bool) -> None:
        """Candidates beside a guess were known; whether any was worth verifying."""
        self._beside_share += 0.1 * (are_verified - self._beside_share)

    def confidence(self, cell: int) -> float:
        right, seen = self._cells[cell]
        return right / seen

    def learn(self, cell: int, is_right: bool) -> None:
        counts = self._cells[cell]
        if counts[1] >= _MEMORY:
            counts[0] *= 0.5
            counts[1] *= 0.5
        counts[0] += is_right
        counts[1] += 1.0

    def learn_rate(self, rate: _OpRate, num_right: int, num_seen: int) -> None:
        """So many guesses of an op were seen, of which so many were right."""
        fade = max(0.0, 1.0 - num_seen / _MEMORY)
        for each in (rate, self._of_all):
            each.right = fade * each.right + num_right
            each.seen = fade * each.seen + num_seen

    def _rate_of(self, op: Hashable) -> _OpRate:
        rate = self._rates.pop(op, None)
        if rate is None:
            of_all = self._of_all
            rate = _OpRate(_OWN_WEIGHT * of_all.right / of_all.seen, _OWN_WEIGHT)
            if len(self._rates) >= _MAX_OPS:
                self._rates.popitem(last=False)
        self._rates[op] = rate
        return rate


class Candidate(NamedTuple):
    """What else may follow guess `behind` of a text, numbered as in `Side`; `rank`: so many
    candidates come before it."""

    behind: int
    token_id: int
    logprob: float
    rank: int = 1


class _Node(NamedTuple):
    """A guess, which follows another one, or, at -1, the text."""

    behind: int
    token_id: int
    cell: int


class ModelText:
    """One output, and what was guessed to follow it: a tree, parents before children, and before
    their siblings the tokens that each were guessed first."""

    def __init__(self, drafter: ModelDrafter, of_op: _OpRate) -> None:
        self._drafter = drafter
        self._of_op = of_op
        self._right, self._seen = _OWN_WEIGHT * of_op.rate, _OWN_WEIGHT
        self.share = of_op.share  # of its guesses, how many were preferred to those of others
        self._num_trials = _TRIAL_TOKENS
        self._nodes: tuple[_Node, ...] = ()
        self._is_noted = False  # how much of it was right

    @property
    def rate(self) -> float:
        """How often a guess is right whose predecessors are."""
        return self._right / self._seen

    @property
    def has_guess(self) -> bool:
        """Whether it knows what may follow now."""
        return bool(self._nodes)

    def offer(
        self, tokens: Sequence[int], logprobs: Sequence[float], beside: Sequence[Candidate] = ()
    ) -> None:
        """These may follow, or others beside them; logprobs: the draft model's. What is not a
        number ends the guess."""
        end = next((i for i, each in enumerate(logprobs) if math.isnan(each)), len(tokens))
        cells = map(_cell, range(end), logprobs)
        nodes = [_Node(i - 1, *each) for i, each in enumerate(zip(tokens[:end], cells))]
        numbers = {i: i for i in range(-1, end)}
        depths = {i: i for i in range(-1, end)}
        for number, each in enumerate(beside, len(tokens)):
            if each.behind in numbers and each.logprob > -math.inf:
                depths[number] = depths[each.behind] + 1
                numbers[number] = len(nodes)
                cell = _cell(depths[number], each.logprob, each.rank)
                nodes.append(_Node(numbers[each.behind], each.token_id, cell))
        self._nodes = tuple(nodes)
        self._is_noted = False

    def extend(self, tokens: Sequence[int]) -> None:
        """Of a guess that was not verified it is learnt here how much was right."""
        if self._nodes and not self._is_noted:
            own = [self._nodes[number] for number in _first_path(self._nodes)][: len(tokens)]
            pairs = enumerate(zip(own, tokens))
            num_right = next((i for i, (node, it) in pairs if node.token_id != it), len(own))
            self._learn([node.cell for node in own], num_right)
        self.skip(tokens)

    def skip(self, tokens: Sequence[int]) -> None:
        """These follow, whatever was guessed."""
        self._nodes = self._behind(tokens)

    def propose(self, room: int, tail: Sequence[int] = ()) -> Draft:
        nodes = self._behind(tail)
        if not nodes:
            return NO_DRAFT
        own = _first_path(nodes)[:room]
        cells = tuple([nodes[number].cell for number in own])
        confidences = tuple(map(self._drafter.confidence, cells))
        tokens = tuple([nodes[number].token_id for number in own])
        sides: tuple[Side, ...] = ()
        if len(nodes) > len(own):
            beside = self._crossed if self._drafter.is_independent else self._beside
            sides = tuple(beside(nodes, own, room))
        return Draft(tokens, confidences, NAME, cells, sides)

    def take_trial(self, most: int) -> int:
        """How many tokens, at most so many, to guess although that does not pay: a few of an
        output, so that it is found out where it would, unless as many were guessed since it did."""
        num_tokens = min(most, self._num_trials)
        self._num_trials -= num_tokens
        return num_tokens

    def note_choice(self, is_chosen: bool, others: Worth) -> None:
        """Beside what others guess its own is verified, or one of theirs; where it has none, this
        only tells what theirs are worth."""
        of_op = self._of_op
        of_op.others = of_op.others.towards(others, of_op.num_others)
        of_op.num_others += 1
        if self._nodes:
            self.share += 0.1 * (is_chosen - self.share)
            of_op.share += 0.02 * (is_chosen - of_op.share)
            if is_chosen:
                of_op.displaced = of_op.displaced.towards(others, of_op.num_displaced)
                of_op.num_displaced += 1

    @property
    def others(self) -> Worth:
        """What its op's others bring in a step."""
        return self._of_op.others

    @property
    def displaced(self) -> Worth:
        """What of that is lost where its own guesses may take their place."""
        right, size = self._of_op.displaced
        return Worth(self.share * right, self.share * size)

    def pays(self, curve: Sequence[float]) -> bool:
        """Whether its guesses would in steps of its own."""
        return self._drafter.pays(self.rate, self.share, self._of_op, curve)

    def is_worth_following(self, curve: Sequence[float]) -> bool:
        """Whether its guesses may pay, or are still tried."""
        return self._num_trials > 0 or self.pays(curve)

    def note(self, draft: Draft, num_accepted: int) -> None:
        self._is_noted = True
        self._learn(draft.evidence, num_accepted)

    def _learn(self, cells: Sequence[int], num_right: int) -> None:
        """Of guesses in a row so many were right, and then none."""
        for place, cell in enumerate(cells[: num_right + 1]):
            self._drafter.learn(cell, place < num_right)
        num_seen = num_right + (num_right < len(cells))
        self._drafter.learn_rate(self._of_op, num_right, num_seen)
        self._right += num_right
        self._seen += num_seen

    def note_side(self, cell: int, is_right: bool) -> None:
        """Of a side whose predecessors are right."""
        self._drafter.learn(cell, is_right)

    def close(self) -> None:
        pass

    def _behind(self, tokens: Sequence[int]) -> tuple[_Node, ...]:
        """What is left of the guess behind these tokens: nothing unless it begins with them."""
        nodes = self._nodes
        for token_id in tokens:
            nodes = _below(nodes, token_id, self._drafter.is_independent)
            if not nodes:
                break
        return nodes

    def _beside(self, nodes: Sequence[_Node], own: Sequence[int], room: int) -> Iterator[Side]:
        """The nodes that are not on a draft's own path, as its sides."""
        numbers = {number: place for place, number in enumerate(own)} | {-1: -1}
        depths = {place: place for place in range(-1, len(own))}
        num_given = len(own)
        for number, node in enumerate(nodes):
            behind = numbers.get(node.behind)
            if number not in numbers and behind is not None and depths[behind] + 1 < room:
                numbers[number], depths[num_given] = num_given, depths[behind] + 1
                num_given += 1
                yield Side(behind, node.token_id, self._drafter.confidence(node.cell), node.cell)

    def _crossed(self, nodes: Sequence[_Node], own: Sequence[int], room: int) -> Iterator[Side]:
        """The likeliest sides where each place has its candidates whatever stands before it."""
        places = [[nodes[number]] for number in own]
        for number, node in enumerate(nodes):
            if number not in own and node.behind + 1 < len(places):
                places[node.behind + 1].append(node)
        confidence = self._drafter.confidence
        chances = [1.0, *accumulate([confidence(place[0].cell) for place in places], mul)]
        # What may come next: (-chance, an order, behind, place, node).
        order = count()
        open_: list[tuple[float, int, int, int, _Node]] = []

        def put(behind: int, chance: float, place: int, candidates: Sequence[_Node]) -> None:
            for node in candidates:
                worth = -chance * confidence(node.cell)
                heappush(open_, (worth, next(order), behind, place, node))

        for place, candidates in enumerate(places):
            put(place - 1, chances[place], place, candidates[1:])
        for number in range(len(own), len(own) + _MAX_CROSSED):
            if not open_:
                break
            worth, _, behind, place, node = heappop(open_)
            yield Side(behind, node.token_id, confidence(node.cell), node.cell)
            if place + 1 < len(places):
                put(number, -worth, place + 1, places[place + 1])


def _below(nodes: Sequence[_Node], token_id: int, is_independent: bool) -> tuple[_Node, ...]:
    """What is guessed behind a first token. is_independent: it is so behind any."""
    tops = [number for number, node in enumerate(nodes) if node.behind == -1]
    top = next((number for number in tops if nodes[number].token_id == token_id), None)
    if top is None:
        return ()
    numbers = {tops[0] if is_independent else top: -1}
    kept: list[_Node] = []
    for number, node in enumerate(nodes):
        if node.behind in numbers:
            numbers[number] = len(kept)
            kept.append(node._replace(behind=numbers[node.behind]))
    return tuple(kept)


def _first_path(nodes: Sequence[_Node]) -> list[int]:
    """The numbers of the first node, of the first one behind it, and so on."""
    path: list[int] = []
    at = -1
    for number, node in enumerate(nodes):
        if node.behind == at:
            path.append(number)
            at = number
    return path


def _at(curve: Sequence[float], size: float) -> float:
    """Seconds of a step of this many tokens."""
    return curve[min(round(size), MAX_TOKENS)]


def _sum(column: Sequence[Worth]) -> Worth:
    return Worth(sum(each.right for each in column), sum(each.size for each in column))


def _num_worth(text: ModelText, most: int) -> int:
    chances = accumulate([text.share * text.rate, *[text.rate] * (most - 1)], mul)
    return sum(chance >= _LEAST_WORTH for chance in chances)


def _cell(place: int, logprob: float, rank: int = 0) -> int:
    bin_ = min(_NUM_BINS - 1, int(math.exp(min(0.0, logprob)) * _NUM_BINS))
    row = min(rank, _NUM_RANKS - 1) * _NUM_PLACES + min(place, _NUM_PLACES - 1)
    return row * _NUM_BINS + bin_


def _prior(cell: int) -> float:
    """How often a token is right that the draft model takes for so likely: a guess. One beside the
    first at most as often as that says."""
    share = (cell % _NUM_BINS + 0.5) / _NUM_BINS
    return 0.3 + 0.7 * share if cell < _NUM_PLACES * _NUM_BINS else share / 2
