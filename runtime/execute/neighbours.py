"""What a process that has some of a model's layers exchanges with those that have the layers before
and behind them (`runtime/parallel/neighbours.py`; between GPUs `torch_neighbours.py`)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Neighbours(Protocol):
    """Of one stage of a pipeline. All stages execute the same plans in the same order."""

    has_previous: bool
    has_next: bool

    def receive(self, num_tokens: int) -> Tensor:
        """[num_tokens, hidden_size] of the next plan that the stage before computes, valid until
        the next call. Waits for it, or has the device wait; raises RankLost where it will not come.
        """
        ...

    def send(self, hidden: Tensor) -> None:
        """[T, hidden_size], which may be changed from then on, to the stage behind. Waits only if
        that is far behind; raises RankLost where it has ended."""
        ...

    def least(self, number: int) -> int:
        """The smallest of the stages' numbers, at least of this one and those before it. All call
        it together."""
        ...
