"""A step's answers on their way back: copied into pinned memory, read when they are there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
from torch import Tensor

from .accelerator import Accelerator
from .staging import Field, aligned


class ReadBack:
    """Owns the pinned memory of one step's answers."""

    def __init__(self, accelerator: Accelerator, answers: Mapping[str, Tensor]) -> None:
        """Queue the copies."""
        self._fields: dict[str, Field] = {}
        offset = 0
        for name, tensor in answers.items():
            self._fields[name] = Field(offset, tensor.dtype, tuple(tensor.shape))
            offset = aligned(self._fields[name].end)
        self._host = accelerator.pinned(offset)
        for name, tensor in answers.items():
            accelerator.copy(self._fields[name].view(self._host), tensor)
        self.done = accelerator.event()

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Waits for the copies. The arrays are this object's memory."""
        self.done.wait()
        return {name: field.view(self._host).numpy() for name, field in self._fields.items()}
