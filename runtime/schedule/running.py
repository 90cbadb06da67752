"""The requests that run: their order, their rows of the executor's page table, adapters' slots."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence

from .queue.adapter_slots import AdapterSlots
from .queue.admission import NewTokenEstimate
from .request import Request, RequestState


class RunningRequests:
    """Owns who runs and who has which table row; tells the estimate and the slots of it.

    Invariant: `requests` is in the order of the `keep` that each came with: the last is preempted
    first. A table row has one owner, from `add` to `free_row`; a plan in flight may name it still
    when the request has been removed.
    """

    def __init__(
        self, max_requests: int, new_tokens: NewTokenEstimate, adapters: AdapterSlots | None
    ) -> None:
        """`adapters`: needed where requests have any."""
        self.requests: list[Request] = []
        self._free_rows = list(range(max_requests - 1, -1, -1))
        self._new_tokens = new_tokens
        self._adapters = adapters

    @property
    def num_free_rows(self) -> int:
        """Requests that could run beside those that do."""
        return len(self._free_rows)

    def add(self, request: Request, keep: Callable[[Request], float]) -> None:
        """A request begins to run; there is a free row, and a slot for its adapter."""
        if request.adapter is not None:
            assert self._adapters is not None, "an adapter where none are served"
            request.adapter_slot = self._adapters.acquire(request.adapter)
        insort(self.requests, request, key=keep)
        self._new_tokens.num_running += request.num_new_tokens
        request.state = RequestState.RUNNING
        request.table_row = self._free_rows.pop()

    def remove(self, request: Request) -> int:
        """A request runs no more; its table row, which is not free yet."""
        self.requests.remove(request)
        if request.adapter is not None and self._adapters is not None:
            self._adapters.release(request.adapter)
            request.adapter_slot = 0
        self._new_tokens.num_running -= request.num_new_tokens
        table_row, request.table_row = request.table_row, -1
        request.state = RequestState.WAITING
        return table_row

    def free_row(self, table_row: int) -> None:
        """No plan names the row of a removed request any more."""
        self._free_rows.append(table_row)

    def check(self, held_rows: Sequence[int]) -> None:
        """Raises when table rows, with those of removed requests, or counts do not add up."""
        self._new_tokens.check(self.requests)
        rows = sorted([*(r.table_row for r in self.requests), *self._free_rows, *held_rows])
        assert rows == list(range(len(rows))), f"a table row is lost or owned twice: {rows}"
        if self._adapters is not None:
            self._adapters.check([r.adapter for r in self.requests if r.adapter is not None])
