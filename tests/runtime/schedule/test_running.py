"""Who runs: order, table rows, adapters' slots and counts, without an engine."""

from __future__ import annotations

from pathlib import Path

from fakes import make_request

from stemma.runtime.checkpoint.lora.adapter import Adapter
from stemma.runtime.schedule.queue.adapter_slots import AdapterSlots
from stemma.runtime.schedule.queue.admission import NewTokenEstimate
from stemma.runtime.schedule.queue.policy import OutputShare
from stemma.runtime.schedule.request import Request, RequestState
from stemma.runtime.schedule.running import RunningRequests

ADAPTER = Adapter("a", Path("a"), "a", 1, None)


def running(max_requests: int = 3, adapters: AdapterSlots | None = None) -> RunningRequests:
    return RunningRequests(max_requests, NewTokenEstimate(OutputShare()), adapters)


def lowest_last(request: Request) -> float:
    return -request.priority


def test_the_last_is_the_first_to_be_preempted_among_equals_the_one_added_last() -> None:
    requests = [make_request(i, [1], priority=p) for i, p in enumerate((0, 2, 0))]
    runs = running()
    for request in requests:
        runs.add(request, lowest_last)
    assert [request.id for request in runs.requests] == [1, 0, 2]
    assert all(request.state is RequestState.RUNNING for request in requests)
    runs.check([])


def test_a_table_row_is_free_again_only_when_that_is_said() -> None:
    runs, first = running(1), make_request(1, [1])
    runs.add(first, lowest_last)
    assert not runs.num_free_rows
    row = runs.remove(first)
    assert first.table_row == -1 and first.state is RequestState.WAITING
    assert not runs.num_free_rows
    runs.check([row])
    runs.free_row(row)
    assert runs.num_free_rows == 1
    runs.check([])


def test_an_adapters_slot_is_in_use_while_a_request_runs_with_it() -> None:
    slots = AdapterSlots(1, lambda slot, adapter: None)
    runs, request = running(adapters=slots), make_request(1, [1], adapter=ADAPTER)
    runs.add(request, lowest_last)
    assert request.adapter_slot == 1 and not slots.has_free
    runs.check([])
    runs.free_row(runs.remove(request))
    assert request.adapter_slot == 0 and slots.has_free
    runs.check([])
