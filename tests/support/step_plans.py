"""Drives a ModelRunner by hand: gives sequences shuffled pages and turns feeds into plans."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.schedule.plan import Adjustment, PageUpdate, Row, RowResult, StepPlan
from stemma.runtime.schedule.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Sequence_:
    """One sequence's state in the runner: its table row, its pages, its tokens with KV."""

    table_row: int
    pages: list[int] = field(default_factory=list)
    num_sent: int = 0  # of these, how many the runner's page table has
    length: int = 0


@dataclass(frozen=True)
class Feed:
    """One future row: `ids` appended to `sequence`."""

    sequence: Sequence_
    ids: Sequence[int]
    sampling: SamplingParams | None = None
    is_scored: bool = False  # score the following token at each input (the last against 0)
    targets: Sequence[int] = ()  # or these, from the first input on
    from_previous: int | None = None
    adjustment: Adjustment | None = None


class PlanDriver:
    """Owns all pages of a runner and hands them out in a random order."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self._free = list(range(runner.num_pages))
        random.Random(seed).shuffle(self._free)
        self._num_sequences = 0
        self._num_steps = 0

    def sequence(self) -> Sequence_:
        self._num_sequences += 1
        return Sequence_(self._num_sequences - 1)

    def release(self, sequence: Sequence_) -> None:
        """Give the sequence's pages back; the sequence starts again at 0."""
        self._free += sequence.pages
        sequence.pages, sequence.num_sent, sequence.length = [], 0, 0

    def take_page(self) -> int:
        return self._free.pop()

    def share(self, owner: Sequence_, reader: Sequence_, num_tokens: int) -> None:
        """Let `reader` begin with the owner's first tokens (whole pages), written or yet to be."""
        self._reserve(owner, num_tokens)
        reader.pages = owner.pages[: num_tokens // self.runner.page_size]
        reader.length = num_tokens

    def step(self, feeds: Sequence[Feed]) -> tuple[RowResult, ...]:
        """Execute one plan with a row for each feed."""
        result = self.runner.execute(self.plan(feeds))
        assert result.step_id == self._num_steps
        return result.rows

    def plan(self, feeds: Sequence[Feed]) -> StepPlan:
        """The next plan, with a row for each feed."""
        rows = tuple(self._row(feed) for feed in feeds)
        self._num_steps += 1
        return StepPlan(self._num_steps, rows)

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, chunk: int = 10**6
    ) -> list[list[int]]:
        """Greedy continuations; prompts in chunks, one step for all sequences."""
        sequences = [self.sequence() for _ in prompts]
        todo = [list(prompt) for prompt in prompts]
        outputs: list[list[int]] = [[] for _ in prompts]
        while any(len(output) < num_tokens for output in outputs):
            active = [i for i, output in enumerate(outputs) if len(output) < num_tokens]
            taken = {i: todo[i][:chunk] for i in active}
            feeds = [
                Feed(sequences[i], taken[i], GREEDY if len(todo[i]) <= chunk else None)
                for i in active
            ]
            for i, result in zip(active, self.step(feeds), strict=True):
                todo[i] = todo[i][len(taken[i]) :]
                if result.token_id is not None:
                    outputs[i].append(result.token_id)
                    todo[i] = [result.token_id]
        return outputs

    def _row(self, feed: Feed) -> Row:
        sequence, ids = feed.sequence, tuple(feed.ids)
        start, sequence.length = sequence.length, sequence.length + len(ids)
        self._reserve(sequence, sequence.length)
        first, sequence.num_sent = sequence.num_sent, len(sequence.pages)
        new = tuple(sequence.pages[first:])
        return Row(
            request_id=sequence.table_row,
            table_row=sequence.table_row,
            start=start,
            input_ids=ids,
            page_update=PageUpdate(first, new) if new else None,
            from_previous=feed.from_previous,
            sampling=feed.sampling,
            adjustments=() if feed.adjustment is None else (feed.adjustment,),
            target_ids=(*ids[1:], 0) if feed.is_scored else tuple(feed.targets),
            state_slot=sequence.table_row + 1,
        )

    def _reserve(self, sequence: Sequence_, num_tokens: int) -> None:
        while len(sequence.pages) * self.runner.page_size < num_tokens:
            sequence.pages.append(self.take_page())
