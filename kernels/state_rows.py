"""A step's rows as recurrent layers need them: whose tokens follow each other, and in which slot
of the pool each row's state is. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class StateRows:
    """Row r owns the tokens [query_start[r], query_start[r + 1]), at least one."""

    query_start: npt.NDArray[np.int64]  # [R + 1]
    slots: npt.NDArray[np.int64]  # [R]
    is_first: npt.NDArray[np.bool_]  # [R] begins its sequence: its slot's contents do not count
    num_drafts: npt.NDArray[np.int64]  # [R] of the tokens, the last ones: may turn out wrong
