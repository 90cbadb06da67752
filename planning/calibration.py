"""How much longer steps take than the roofline model says, by measurement: `stemma bench step`.

Ratios of measured to predicted time by the number of tokens that a step computes, between two
measured numbers by the logarithm; beyond the smallest and the largest that of these.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

import numpy as np

from ..errors import InvalidRequest
from .roofline import CostModel

_COLUMNS = ("rows", "tokens a row", "tokens before", "step, ms")


@dataclass(frozen=True, slots=True)
class Calibration:
    """`ratios[i]` for steps of exp(`logs[i]`) tokens, ascending; none: 1 for all."""

    logs: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()

    @classmethod
    def of(cls, measured: Mapping[tuple[int, int, int], float], costs: CostModel) -> Calibration:
        """`measured`: seconds, by (rows, tokens of each, tokens before these) of the step; those of
        one number of tokens count by their geometric mean."""
        found: defaultdict[int, list[float]] = defaultdict(list)
        for (num_rows, num_tokens, before), step_s in measured.items():
            predicted = costs.step_time([(num_tokens, before)] * num_rows, num_rows).total_s
            found[num_rows * num_tokens].append(log(step_s / predicted))
        numbers = sorted(found)
        ratios = tuple(exp(sum(found[num]) / len(found[num])) for num in numbers)
        return cls(tuple(log(num) for num in numbers), ratios)

    @classmethod
    def read(cls, path: Path, costs: CostModel) -> Calibration:
        """Of what `stemma bench step` has written. Raises InvalidRequest for what is none."""
        try:
            rows = json.loads(path.read_text())["rows"]
            measured = {
                (int(row[_COLUMNS[0]]), int(row[_COLUMNS[1]]), int(row[_COLUMNS[2]])): (
                    float(row[_COLUMNS[3]]) / 1e3
                )
                for row in rows
            }
        except (OSError, ValueError, TypeError, KeyError) as error:
            allowed = f"a report of `stemma bench step` ({type(error).__name__}: {error})"
            raise InvalidRequest.of("calibration", str(path), allowed) from error
        if not measured or min(measured.values()) <= 0:
            raise InvalidRequest.of("calibration", str(path), "steps that took time")
        return cls.of(measured, costs)

    def ratio(self, num_tokens: int) -> float:
        """Of a step that computes so many tokens."""
        if not self.ratios:
            return 1.0
        return float(np.interp(log(max(1, num_tokens)), self.logs, self.ratios))


NO_CALIBRATION = Calibration()
