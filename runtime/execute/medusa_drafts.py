"""Guesses by Medusa's heads: behind a step, one pass of each head over the hidden states of what
counts, for as many tokens as are wanted. Nothing is kept between steps.

A guess is drawn as the model will draw it (see draft_model.py); what follows a head's guess does
not depend on it, so the guesses are a chain, and not the paper's tree.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...kernels.registry import Kernels
from ..models.forward_batch import LayerStates
from ..models.medusa import MedusaHeads
from ..schedule.plan import Guessing, RowResult, StepPlan, TokenLogprob
from .draft_model import counted, drawn
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
        first = 0
        for place, (row, result) in enumerate(zip(plan.rows, results, strict=True)):
            of_row = counted(row, result)
            if row.num_ahead > 0 and row.sampling is not None and of_row.token_id is not None:
                places.append(place)
                at.append(first + of_row.num_inputs - 1)
            first += len(row.input_ids)
        if not places:
            return results, Guessing(time.perf_counter() - started)
        guesses = self._guess(plan, places, at, hidden)
        rows = list(results)
        for place, tokens in zip(places, guesses, strict=True):
            rows[place] = replace(rows[place], ahead=tuple(tokens))
        return tuple(rows), Guessing(time.perf_counter() - started, max(map(len, guesses)))

    def _guess(
        self, plan: StepPlan, places: list[int], at: list[int], hidden: Tensor
    ) -> list[list[TokenLogprob]]:
        """Of each of the places, behind what was drawn from the hidden state there."""
        rows = [plan.rows[place] for place in places]
        firsts = np.cumsum([0, *(len(row.input_ids) for row in plan.rows)])[places]
        positions = np.array([row.start + 2 for row in rows]) + np.array(at) - firsts
        sampling = sampling_arrays(
            [row.sampling for row in rows if row.sampling is not None], positions
        )
        wanted = np.array([min(row.num_ahead, len(self._heads)) for row in rows])
        picked = hidden[torch.tensor(at)]
        guesses: list[list[TokenLogprob]] = [[] for _ in rows]
        for place in range(wanted.max()):
            going = np.flatnonzero(wanted > place)
            parameters = {name: array[going] for name, array in sampling.items()}
            parameters["position"] = parameters["position"] + place
            logits = self._heads.compute_logits(place, picked[torch.from_numpy(going)])
            token_ids, logprobs = drawn(self._kernels, logits, parameters)
            for i, token_id, logprob in zip(going, token_ids.tolist(), logprobs.tolist()):
                guesses[i].append(TokenLogprob(token_id, logprob))
        return guesses
