"""A draft model beside the model that it guesses for: a smaller one of the same tokens, whose KV
lies in the same pages, in layers of its own; or the model's own first layers, whose KV is the
model's.

    a step's row, in the pool   0 .......... start ......... end
                                | both have KV | the model computes these
    behind its draws            | ............ | the draft model computes those of them that count,
                                               and what was drawn; then guess by guess, one token
                                               a pass and row, all rows together

So wherever the model has KV, the draft model has: what is cached, shared, leased, stored or sent to
another engine keeps its drafts. What it computed along a guess that turned out right is not
computed again. While nothing is to be guessed of an output, its tokens wait, and are computed
together before anybody else can use them.

Rows that are not followed (`Row.is_followed`) cost nothing: the draft model's KV of their tokens
is missing, and known to be. A slot without it has a first key of zero bytes (`DeviceKVPool.keys`),
which no token's is, and which goes wherever the slot's KV does. Behind such tokens the draft model
sees the text from the last of them on:

    a cached prefix   0 ........... first ............ start
                      | some missing | all are there   |  what follows attends to these

A guess is drawn as the model will draw it: by the row's sampling parameters, with the noise of its
seed at that position (the coupling by Gumbel's noise of Daliri et al. 2025, arXiv:2408.07978, 4):
where both models' distributions are a total variation of D apart, both draw the same token with a
probability of at least (1 - D) / (1 + D). No output depends on any of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.ops import KVLayer
from ...kernels.registry import Kernels
from ..checkpoint.config.model_config import ModelConfig
from ..models.eagle3 import Eagle3Head
from ..models.forward_batch import ForwardBatch, LayerStates
from ..models.language_model import LanguageModel
from ..schedule.draft_tree import counted, token_ids_of
from ..schedule.plan import (
    NO_GUESSES,
    Guessing,
    Row,
    RowResult,
    SharedSegment,
    StepPlan,
)
from ..schedule.sampling_params import SamplingParams
from .candidates import Guesses, Leaf, draw_candidates
from .captured import CapturedForward
from .inputs import InputBuilder, StepInputs, plan_attentions
from .sampling_arrays import sampling_arrays

_MAX_WAITING = 128  # tokens of an output
_MAX_OF_PASS = 8  # tokens of a row that is guessed of in each step: a pass of more says nothing


@dataclass(frozen=True, slots=True)
class Ahead:
    """A row of which tokens are guessed: `position` is that of the next one."""

    row: Row
    sampling: SamplingParams
    position: int
    drawn: int  # the token before it


@dataclass(frozen=True, slots=True)
class _Known:
    """The tokens from a position on whose KV a row's draft model has computed along its guess."""

    request_id: int
    start: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class _Seen:
    """Of a request: the token from which on its KV is there without a gap, and the position behind
    its last row's tokens that count."""

    request_id: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _Missing:
    """Tokens to compute, and, where the draft model reads them, the hidden states before each, in
    parts [n, hidden_size]."""

    token_ids: tuple[int, ...] = ()
    before: tuple[Tensor, ...] = ()

    def and_token(self, token_id: int, before: Tensor) -> _Missing:
        return _Missing((*self.token_ids, token_id), (*self.before, before))


_NOTHING = _Missing()


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Tokens of an output that the draft model has not computed yet, from a position on."""

    row: Row
    start: int
    tokens: _Missing

    @property
    def end(self) -> int:
        return self.start + len(self.tokens.token_ids)


class Guesser(Protocol):
    """What guesses behind the steps of a runner."""

    layers: tuple[int, ...]  # of the model, whose states it reads: see `LayerStates`

    def settle(self, plan: StepPlan) -> None:
        """A plan is about to be carried out."""
        ...

    def guessed(
        self,
        plan: StepPlan,
        results: tuple[RowResult, ...],
        hidden: Tensor,
        kept: LayerStates | None,
    ) -> tuple[tuple[RowResult, ...], Guessing]:
        """A step's results with what is guessed to follow them. hidden [T, hidden_size]: the
        model's, of the step's tokens; kept: those behind `layers`."""
        ...


class DraftModel:
    """A `Guesser`. Owns what the draft model has computed along its guesses. Not thread-safe.

    `kv_layers`: of the draft model, of the pool whose pages the plans name.
    """

    def __init__(
        self,
        model: LanguageModel,
        kernels: Kernels,
        inputs: InputBuilder,
        kv_layers: tuple[KVLayer, ...],
        config: ModelConfig,
        *,
        vocab_size: int,
        keys: npt.NDArray[np.uint8] | None,
        reads_hidden: bool = False,
    ) -> None:
        """config: the draft model's. vocab_size: of the model that it guesses for. keys
        [num_slots, num_bytes]: the memory of its first layer's keys; None: it has no KV of its
        own, its layers are the model's first. reads_hidden: it is a `Predictor`, an `EagleHead` or
        an `Eagle3Head`."""
        self._model = model
        self._kernels = kernels
        self._inputs = inputs
        self._kv_layers = kv_layers
        self._config = config
        self._vocab_size = vocab_size
        self._keys = keys
        self._seen: dict[int, _Seen] = {}  # by table row
        self._reads_hidden = reads_hidden
        # By table row: the request, the position behind its last input, that one's hidden state.
        self._last: dict[int, tuple[int, int, Tensor]] = {}
        self._merge = model.merged if isinstance(model, Eagle3Head) else None
        self.layers = model.layers if isinstance(model, Eagle3Head) else ()  # see `LayerStates`
        self._forward = CapturedForward(model, kernels.capture)
        self._known: dict[int, _Known] = {}  # by table row
        self._waiting: dict[int, _Waiting] = {}  # by table row

    def settle(self, plan: StepPlan) -> None:
        """A plan is about to be carried out: compute the tokens that wait of rows that it does not
        go on with. NOTE: their pages may be others' in this plan, which writes them behind this."""
        going = {row.table_row: (row.request_id, row.start) for row in plan.rows}
        leaving = [
            table_row
            for table_row, each in self._waiting.items()
            if going.get(table_row) != (each.row.request_id, each.end)
        ]
        if leaving:
            waiting = [self._waiting.pop(table_row) for table_row in leaving]
            self._compute_rows(
                [self._part(each.row, each.start, each.tokens.token_ids) for each in waiting],
                (),
                [part for each in waiting for part in each.tokens.before],
            )

    def guessed(
        self,
        plan: StepPlan,
        results: tuple[RowResult, ...],
        hidden: Tensor,
        kept: LayerStates | None,
    ) -> tuple[tuple[RowResult, ...], Guessing]:
        """See `Guesser`."""
        if self._keys is None and not any(row.num_ahead for row in plan.rows):
            return results, NO_GUESSES
        started = time.perf_counter()
        if self._keys is not None:
            self._mark(plan.rows, self._keys)
        if not any(row.is_followed for row in plan.rows):
            return results, NO_GUESSES
        if self._merge is not None:
            assert kept is not None, "the step was told what to keep"
            hidden = self._merge(kept.of)
        followed = self.follow(plan, results, hidden)
        if not followed.ahead:
            return results, Guessing(time.perf_counter() - started)
        rows = list(results)
        for place, guess in zip(followed.places, self.guess(followed), strict=True):
            rows[place] = rows[place]._replace(ahead=tuple(guess.ahead), beside=tuple(guess.beside))
        is_usual = followed.num_tokens <= _MAX_OF_PASS * len(followed.ahead)
        num_passes = max(each.row.num_ahead for each in followed.ahead) if is_usual else 0
        return tuple(rows), Guessing(time.perf_counter() - started, num_passes)

    def _mark(self, rows: Sequence[Row], keys: npt.NDArray[np.uint8]) -> None:
        """Note of the tokens of these rows where their KV is missing. Of prompts that are followed
        it will be there: a row may read them that is followed in the same step."""
        decoded: list[tuple[int, int]] = []  # table rows, and positions
        for row in rows:
            if not row.is_followed:
                waiting = self._waiting.pop(row.table_row, None)
                start = row.start if waiting is None else waiting.start
                end = row.start + row.num_tokens
                if end - start == 1:
                    decoded.append((row.table_row, start))
                else:
                    keys[self._slots(row.table_row, np.arange(start, end))] = 0
            elif not row.is_output and len(rows) > 1:
                start = max(row.start, row.kv_start)
                positions = np.arange(start, row.start + len(row.input_ids))
                keys[self._slots(row.table_row, positions), 0] = 1
        if decoded:
            table_rows, positions = np.array(decoded).T
            keys[self._slots(table_rows, positions)] = 0

    def _slots(
        self, table_rows: int | npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Of tokens at these positions, all of a row of the page table or of one each."""
        pages, offsets = np.divmod(positions, self._inputs.page_size)
        entries = self._inputs.page_table.entries[table_rows, pages].astype(np.int64)
        slots: npt.NDArray[np.int64] = entries * self._inputs.page_size + offsets
        return slots

    def _first(self, row: Row) -> int:
        """The token, the first one of a page, from which on the KV before a row's inputs is there
        without a gap; looked up where the row does not go on with the last one of its request."""
        if self._keys is None:
            return 0
        seen = self._seen.get(row.table_row)
        if seen is not None and (seen.request_id, seen.end) == (row.request_id, row.start):
            return seen.first
        missing = np.flatnonzero(~self._are_there(row, 0, row.start))
        page_size = self._inputs.page_size
        return (int(missing[-1]) // page_size + 1) * page_size if len(missing) else 0

    def _are_there(self, row: Row, start: int, end: int) -> npt.NDArray[np.bool_]:
        """Of which of a row's tokens the KV is there."""
        assert self._keys is not None, "it has KV of its own"
        slots = self._slots(row.table_row, np.arange(start, end))
        are_there: npt.NDArray[np.bool_] = np.any(self._keys[slots], axis=1)
        return are_there

    def follow(self, plan: StepPlan, results: Sequence[RowResult], hidden: Tensor) -> Followed:
        """Compute the KV of what counts of a step's rows, of which these are the results, and of
        what was drawn where more is to be guessed. hidden [T, hidden_size]: what the draft model
        reads of the step's tokens."""
        rows: list[Row] = []
        before: list[Tensor] = []  # hidden states, of each token's predecessor, row by row
        ahead: list[Ahead] = []
        places: list[int] = []  # of `ahead` in the plan
        ends: list[int] = []  # of `ahead`: indices into `rows`
        was_waiting = bool(self._waiting)
        first = 0
        for place, (row, result) in enumerate(zip(plan.rows, results, strict=True)):
            if not row.is_followed:
                first += row.num_tokens
                continue
            of_row = counted(row, result)
            own = _of_tokens(hidden, first, of_row.numbers)
            first += row.num_tokens
            missing = self._missing(row, of_row.numbers, own)
            behind = row.start + len(of_row.numbers)
            self._seen[row.table_row] = _Seen(row.request_id, self._first(row), behind)
            is_asked = row.num_ahead > 0 and of_row.token_id is not None
            if is_asked and of_row.token_id is not None:
                missing = missing.and_token(of_row.token_id, own[-1:])
            end = behind + is_asked
            start = end - len(missing.token_ids)
            if not missing.token_ids:
                continue
            if not is_asked and row.is_output and len(missing.token_ids) < _MAX_WAITING:
                self._waiting[row.table_row] = _Waiting(row, start, missing)
                continue
            rows.append(self._part(row, start, missing.token_ids))
            before += missing.before
            if is_asked and row.sampling is not None:
                places.append(place)
                ends.append(len(rows) - 1)
                ahead.append(Ahead(row, row.sampling, end, missing.token_ids[-1]))
        if not rows:
            return _NO_ONE
        # NOTE: what rows share is before their first tokens, in consecutive rows.
        is_as_planned = len(rows) == len(plan.rows) and not was_waiting
        segments = plan.segments if is_as_planned else ()
        computed = self._compute_rows(rows, segments, before)
        if not ahead:
            return _NO_ONE
        last = np.cumsum([len(row.input_ids) for row in rows])[ends] - 1
        num_tokens = sum(len(row.input_ids) for row in rows)
        return Followed(places, ahead, computed[torch.from_numpy(last)], num_tokens)

    def _part(self, row: Row, start: int, token_ids: tuple[int, ...]) -> Row:
        """A row of the draft model's own: these tokens of a row, from a position on."""
        kv_start = row.kv_start if start >= row.start else 0  # what has waited is nowhere else
        if kv_start > start and self._keys is not None:
            is_there = self._are_there(row, start, min(kv_start, start + len(token_ids))).all()
            kv_start = kv_start if is_there else 0
        return Row(row.request_id, row.table_row, start, token_ids, kv_start=kv_start)

    def guess(self, followed: Followed) -> list[Guesses]:
        """What may follow each of the rows, one token a pass until each has as many as it wants.
        A pass also goes on behind the likeliest of what stands beside: the expansion of EAGLE-2 (Li
        et al. 2024, arXiv:2406.16858, 4.1), two nodes a layer."""
        ahead, hidden = followed.ahead, followed.hidden
        guesses = [Guesses(each.row.num_ahead, each.row.num_beside) for each in ahead]
        positions = np.array([each.position for each in ahead])
        firsts = np.array([self._first_of(each.row) for each in ahead])
        sampling = sampling_arrays([each.sampling for each in ahead], positions)
        leaves, rows = [Leaf(guess) for guess in guesses], list(range(len(ahead)))
        for place in range(max([guess.num_wanted for guess in guesses], default=0)):
            assert hidden is not None
            parameters = {name: array[rows] for name, array in sampling.items()}
            parameters["position"] = parameters["position"] + place
            logits = self._model.compute_logits(hidden)[:, : self._vocab_size].contiguous()
            draw_candidates(self._kernels, logits, parameters, leaves)
            at = {(row, leaf.number): i for i, (row, leaf) in enumerate(zip(rows, leaves))}
            grown = [
                (row, leaf)
                for row, guess in enumerate(guesses)
                if guess.num_wanted > place + 1
                for leaf in self._grown(guess, row, ahead[row].row)
            ]
            if not grown:
                break
            parents = torch.tensor([at[row, leaf.behind] for row, leaf in grown])
            rows, leaves = [row for row, _ in grown], [leaf for _, leaf in grown]
            table_rows = [self._table_row(row, leaf, ahead[row], place) for row, leaf in grown]
            inputs = self._inputs.build_decode(
                np.array(table_rows),
                positions[rows] + place - firsts[rows],
                np.array([leaf.token_id for leaf in leaves]),
                firsts[rows],
            )
            hidden = self._compute(inputs, hidden[parents])
        for each, guess in zip(ahead, guesses, strict=True):
            known = [each.drawn]  # behind it, what reads hidden states had its own
            if not self._reads_hidden:
                known += [token.token_id for token in guess.ahead[:-1]]
            self._known[each.row.table_row] = _Known(each.row.request_id, each.position - 1, known)
        return guesses

    def _grown(self, guess: Guesses, index: int, row: Row) -> Iterator[Leaf]:
        """What to go on behind of what was guessed last of a row."""
        yield guess.own_leaf()
        side = guess.likeliest_side()
        has_room = index < self._inputs.page_table.num_spare and not self._first_of(row)
        if row.expand_at and has_room and side is not None:
            yield side

    def _first_of(self, row: Row) -> int:
        """From which token on a row that was followed is seen."""
        seen = self._seen.get(row.table_row)
        return 0 if seen is None else seen.first

    def _table_row(self, index: int, leaf: Leaf, ahead: Ahead, place: int) -> int:
        """That by which a leaf is computed at its place; a side's is made here, and that of a row
        that is not seen from its beginning."""
        row, table = ahead.row, self._inputs.page_table
        entries, start = table.entries, ahead.position
        table_row = table.first_spare_row + index
        if first := self._first_of(row):
            self._copy_pages(row.table_row, table_row, first, start + place + 1)
            return table_row
        if leaf.number == place:
            return row.table_row
        entries[table_row, :start] = entries[row.table_row, :start]
        path = leaf.guesses.path_to(leaf.number)
        pages = [start + i if number == i else row.expand_at + i for i, number in enumerate(path)]
        entries[table_row, start : start + len(path)] = entries[row.table_row, pages]
        return table_row

    def _missing(self, row: Row, numbers: Sequence[int], hidden: Tensor) -> _Missing:
        """Of a row's tokens with these numbers the last ones, which are to be computed, with those
        that wait before them. hidden: of these tokens."""
        if self._keys is None:
            return _NOTHING
        taken = token_ids_of(row, numbers)
        before = self._before(row, hidden) if self._reads_hidden else None
        waiting = self._waiting.pop(row.table_row, None)
        num_own = sum([number < len(row.input_ids) for number in numbers])
        num_known = self._num_known(row, taken[:num_own]) if waiting is None else 0
        own = () if before is None else (before[num_known:],)
        if waiting is None:
            return _Missing(taken[num_known:], own)
        return _Missing((*waiting.tokens.token_ids, *taken), (*waiting.tokens.before, *own))

    def _before(self, row: Row, hidden: Tensor) -> Tensor:
        """[inputs, hidden_size]: the hidden state before each of a row's inputs; zeros before the
        first one where it was not computed in the step before."""
        request_id, end, last = self._last.get(row.table_row, (0, 0, None))
        if last is None or (request_id, end) != (row.request_id, row.start):
            last = hidden.new_zeros(1, hidden.shape[1])
        states = torch.cat([last, hidden])
        # A copy: a view would keep the states of a whole chunk.
        behind = row.start + len(hidden)
        self._last[row.table_row] = (row.request_id, behind, states[-1:].clone())
        return states[:-1]

    def _num_known(self, row: Row, taken: Sequence[int]) -> int:
        """How many of a row's inputs were computed along a guess, in the pages that it has now."""
        known = self._known.pop(row.table_row, None)
        if known is None or (known.request_id, known.start) != (row.request_id, row.start):
            return 0
        most = min(len(known.tokens), len(taken))
        if row.page_update is not None:
            most = min(most, row.page_update.first * self._inputs.page_size - row.start)
        num_same = 0
        while num_same < most and taken[num_same] == known.tokens[num_same]:
            num_same += 1
        return num_same

    def _compute_rows(
        self,
        rows: Sequence[Row],
        segments: tuple[SharedSegment, ...],
        before: Sequence[Tensor],
    ) -> Tensor:
        placed = tuple(self._placed(rows))
        segments = segments if placed == tuple(rows) else ()
        inputs = self._inputs.build(StepPlan(0, placed, segments))
        return self._compute(inputs, torch.cat(list(before)) if self._reads_hidden else None)

    def _placed(self, rows: Sequence[Row]) -> Iterator[Row]:
        """The rows as sequences that begin where the KV before them is there without a gap."""
        spare = self._inputs.page_table.first_spare_row
        for row in rows:
            first = self._first_of(row)
            if not first:
                yield row
                continue
            self._copy_pages(row.table_row, spare, first, row.start + len(row.input_ids))
            yield row._replace(
                table_row=spare,
                start=row.start - first,
                kv_start=max(0, row.kv_start - first),
                rope_shift=first,
            )
            spare += 1

    def _copy_pages(self, table_row: int, spare: int, first: int, end: int) -> None:
        """The pages of a row's tokens from `first` on as those of another row of the table."""
        entries, page_size = self._inputs.page_table.entries, self._inputs.page_size
        pages = entries[table_row, first // page_size : -(-end // page_size)]
        entries[spare, : len(pages)] = pages

    def _compute(self, inputs: StepInputs, before: Tensor | None) -> Tensor:
        """before: the hidden states before each token, where it reads them -> hidden
        [T, hidden_size], valid until the next call"""
        known = (inputs.token_ids >= 0) & (inputs.token_ids < self._config.vocab_size)
        ids = np.where(known, inputs.token_ids, 0)  # an image's are no ids of a vocabulary
        batch = ForwardBatch(
            input_ids=torch.from_numpy(ids),
            positions=torch.from_numpy(inputs.positions),
            slot_mapping=torch.from_numpy(inputs.slots),
            kv_layers=self._kv_layers,
            attention=plan_attentions(
                self._kernels, inputs.attention_rows, self._kv_layers, self._config
            ),
            residual=before if self._reads_hidden else None,
        )
        return self._forward(batch)


@dataclass(frozen=True, slots=True)
class Followed:
    """The rows of a step of which more is to be guessed, with their places in the plan and their
    hidden states [rows, hidden_size] behind what was drawn. `num_tokens`: computed for that."""

    places: list[int]
    ahead: list[Ahead]
    hidden: Tensor | None
    num_tokens: int = 0


_NO_ONE = Followed([], [], None)


def _of_tokens(hidden: Tensor, first: int, numbers: Sequence[int]) -> Tensor:
    """Of the row whose tokens begin at `first`, those with these numbers."""
    if isinstance(numbers, range):
        return hidden[first : first + len(numbers)]
    return hidden[torch.tensor(numbers) + first]
