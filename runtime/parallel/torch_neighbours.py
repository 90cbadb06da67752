"""The residual stream on its way from stage to stage of a pipeline, between GPUs: by NCCL's single
messages, of rows whose number both sides know from the plan.

    sender     | step t | copy t | step t + 1 | ...         a message is under way from the copy
    receiver                     | receive t | step t |     of its rows on; nobody's host waits

In Triton's interpreter by gloo's, where whoever receives waits at once.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import Work

    from ...kernels.torch_communicator import TorchWorld


class TorchNeighbours:
    """See `execute.neighbours.Neighbours`. Called where steps are queued."""

    def __init__(
        self,
        world: TorchWorld,
        previous: int | None,
        behind: int | None,
        *,
        row: Tensor,
        max_sent: int,
    ) -> None:
        """previous: the number of the process before; behind: of the one behind; None: there is
        none. row: an empty one of the residual stream, [0, hidden_size]; max_sent: messages that
        may be under way."""
        self._world = world
        self._previous, self._behind = previous, behind
        self._row = row
        self._max_sent = max_sent
        self._sent: deque[Work] = deque()
        self.has_previous = previous is not None
        self.has_next = behind is not None

    def receive(self, num_tokens: int) -> Tensor:
        """See `Neighbours`."""
        assert self._previous is not None
        hidden = self._row.new_empty(num_tokens, self._row.shape[1])
        self._world.receive(hidden, self._previous)
        return hidden

    def send(self, hidden: Tensor) -> None:
        """See `Neighbours`."""
        assert self._behind is not None
        if len(self._sent) == self._max_sent:
            self._world.end(self._sent.popleft())
        # NOTE: a copy, since a graph writes its results to the same place again.
        self._sent.append(self._world.send(hidden.clone(), self._behind))

    def least(self, number: int) -> int:
        """See `Neighbours`."""
        return self._world.least(number)

    def close(self) -> None:
        """Nobody uses it any more."""
        self._sent.clear()
