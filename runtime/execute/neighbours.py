"""What a process that has some of a model's layers exchanges with those that have the layers before
and behind them (`runtime/parallel/neighbours.py`)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Neighbours(Protocol):
    """Of one stage of a pipeline. All stages execute the same plans in the same order."""

    has_previous: bool
    has_next: bool

    def receive(self, num_tokens: int) -> Tensor:
        """[num_tokens, hidden_size] of the next plan that the stage before has computed, valid
        until the next call. Waits for it; raises RankLost where it will not come."""
        ...

    def send(self, hidden: Tensor) -> None:
        """[T, hidden_size] to the stage behind. Waits only if that is far behind; raises RankLost
        where it has ended."""
        ...

    def least(self, number: int) -> int:
        """The smallest of this stage's number and those of the stages before it."""
        ...
