"""Guesses by Medusa's heads: behind a step, one pass of each head over the hidden states of what
counts, for as many tokens as are wanted. Nothing is kept between steps.

A guess is drawn as the model will draw it (see draft_model.py), and so are others beside it. What
follows a head's guess does not depend on it: the paper's tree is made of them by the scheduler
(`speculate/guesses.py`), as far as it pays to verify it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...kernels.registry import Kernels
from ..models.forward_batch import LayerStates
from ..models.medusa import MedusaHeads
from ..schedule.draft_tree import counted
from ..schedule.plan import Guessing, Row, RowResult, StepPlan
from .candidates import Guesses, Leaf, draw_candidates
from .sampling_arrays import sampling_arrays


class MedusaDrafts:
    """A `Guesser`."""

    layers: tuple[int, ...] = ()

    def __init__(self, heads: MedusaHeads, kernels: Kernels) -> None:
        self._heads = heads
        self._kernels = kernels

    def settle(self, plan: StepPlan) -> None:
        """Nothing waits."""

    def guessed(
        self,
        plan: StepPlan,
        results: tuple[RowResult, ...],
        hidden: Tensor,
        kept: LayerStates | None,
    ) -> tuple[tuple[RowResult, ...], Guessing]:
        """See `Guesser`."""
        started = time.perf_counter()
        places: list[int] = []
        at: list[int] = []  # the last tokens that count, on the token axis
        positions: list[int] = []  # of the first guesses
        first = 0
        for place, (row, result) in enumerate(zip(plan.rows, results, strict=True)):
            of_row = counted(row, result)
            if row.num_ahead > 0 and row.sampling is not None and of_row.token_id is not None:
                places.append(place)
                at.append(first + of_row.numbers[-1])
                positions.append(row.start + len(of_row.numbers) + 1)
            first += row.num_tokens
        if not places:
            return results, Guessing(time.perf_counter() - started)
        guesses = self._guess(
            [plan.rows[place] for place in places], positions, hidden[torch.tensor(at)]
        )
        rows = list(results)
        for place, guess in zip(places, guesses, strict=True):
            rows[place] = rows[place]._replace(ahead=tuple(guess.ahead), beside=tuple(guess.beside))
        num_passes = max(len(guess.ahead) for guess in guesses)
        return tuple(rows), Guessing(time.perf_counter() - started, num_passes)

    def _guess(
        self, rows: Sequence[Row], positions: Sequence[int], picked: Tensor
    ) -> list[Guesses]:
        """Of each of the rows from a position on, by a hidden state picked [rows, hidden_size]."""
        sampling = sampling_arrays(
            [row.sampling for row in rows if row.sampling is not None], np.array(positions)
        )
        wanted = np.array([min(row.num_ahead, len(self._heads)) for row in rows])
        guesses = [
            Guesses(num, row.num_beside) for num, row in zip(wanted.tolist(), rows, strict=True)
        ]
        for place in range(wanted.max()):
            going = np.flatnonzero(wanted > place)
            parameters = {name: array[going] for name, array in sampling.items()}
            parameters["position"] = parameters["position"] + place
            logits = self._heads.compute_logits(place, picked[torch.from_numpy(going)])
            leaves = [Leaf(guesses[i], place - 1) for i in going]
            draw_candidates(self._kernels, logits, parameters, leaves)
        return guesses
