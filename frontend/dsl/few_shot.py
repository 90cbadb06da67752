"""Examples for a prompt, chosen by how well the program does with them.

Random search over sets of examples, as in DSPy (Khattab et al. 2023, arXiv:2310.03714), with
successive halving (Jamieson and Talwalkar 2016): all sets are tried on a few cases, the better half
on twice as many, and so on. Runs of one set share its prefix in the cache, so they go together.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidProgram
from ..protocol.numbers import MAX_INT, Range
from .evaluation import Case, Evaluation, Metric, evaluate
from .function import Function

_COUNTS = Range(1, MAX_INT, is_whole=True)
_FIRST_CASES = 8  # on which all sets are tried


@dataclass(frozen=True, slots=True)
class ChosenExamples:
    """The best set of examples, how it did on all cases, and how the function did without any."""

    examples: Sequence[Any]
    evaluation: Evaluation
    without: Evaluation

    def __str__(self) -> str:
        return f"without: {self.without.score:.3f}, with {len(self.examples)}:\n{self.evaluation}"


def choose_examples(
    fn: Function,
    pool: Iterable[Any],
    cases: Iterable[Case],
    metric: Metric,
    *,
    num_examples: int = 3,
    num_candidates: int = 8,
    parameter: str = "examples",
    seed: int = 0,
    **options: Any,
) -> ChosenExamples:
    """Choose `num_examples` of `pool` for the function's `parameter`, by the metric's first score.

    `num_candidates` sets are drawn, the same for the same seed. Where none does better than no
    examples at all, `examples` is empty. Use other cases for a final `evaluate`: these were chosen
    for. Other arguments are those of `evaluate`. Raises InvalidProgram.
    """
    if not isinstance(fn, Function) or parameter not in fn.parameters:
        raise InvalidProgram.of("parameter", parameter, "a parameter of the function")
    _COUNTS.checked("num_candidates", num_candidates)
    pool, cases = list(pool), list(cases)
    if not _COUNTS.holds(num_examples) or num_examples > len(pool):
        raise InvalidProgram.of("num_examples", num_examples, f"1 to {len(pool)}, as in the pool")
    rng = random.Random(seed)
    candidates = [rng.sample(pool, num_examples) for _ in range(num_candidates)]
    shuffled = rng.sample(cases, len(cases))
    num_cases = min(_FIRST_CASES, len(shuffled))
    while len(candidates) > 1:
        part = shuffled[:num_cases]
        scores = [_tried(fn, each, part, metric, parameter, options).score for each in candidates]
        ranked = sorted(range(len(candidates)), key=lambda i: -scores[i])
        candidates = [candidates[i] for i in ranked[: (len(ranked) + 1) // 2]]
        if num_cases == len(shuffled):
            candidates = candidates[:1]
        num_cases = min(2 * num_cases, len(shuffled))
    best = _tried(fn, candidates[0], cases, metric, parameter, options)
    without = _tried(fn, [], cases, metric, parameter, options)
    if without.score >= best.score:
        return ChosenExamples((), without, without)
    return ChosenExamples(tuple(candidates[0]), best, without)


def _tried(
    fn: Function,
    examples: Sequence[Any],
    cases: Sequence[Case],
    metric: Metric,
    parameter: str,
    options: dict[str, Any],
) -> Evaluation:
    return evaluate(fn, [{**case, parameter: examples} for case in cases], metric, **options)
