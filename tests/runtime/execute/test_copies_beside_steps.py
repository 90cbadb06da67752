"""Copies between tiers are queued beside the steps, and the next step waits for the pool alone:
before each run of its layers for what these have of it, or, in one launch, for all."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from checkpoints import make_checkpoint
from device_plans import device_kernels

from stemma.kernels.ops import PageCopy
from stemma.kernels.registry import Kernels
from stemma.runtime.execute import model_runner
from stemma.runtime.execute.accelerator import InterpretedAccelerator, PassedEvent
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.memory.asynchronous_transfer import Moment
from stemma.runtime.memory.copies import PageFork, Transfer
from stemma.runtime.models.layers.stage import Stage, config_of_stage
from stemma.runtime.models.model_config import read_model_config
from stemma.runtime.schedule.plan import PageUpdate, Row, RowResult, StepPlan
from stemma.runtime.schedule.sampling_params import SamplingParams

Log = list[tuple[str, object]]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers."""
    return make_checkpoint(tmp_path_factory.mktemp("deep"), num_layers=6)


class TwoOrders(InterpretedAccelerator):
    """Notes in which order something is queued, what is held for what, and copies to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.log: Log = []
        self._orders: list[str] = []

    @contextmanager
    def queue(self) -> Iterator[None]:
        with self._in("steps"):
            yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        with self._in("copies"):
            yield

    @contextmanager
    def _in(self, order: str) -> Iterator[None]:
        self._orders.append(order)
        yield
        self._orders.pop()

    def event(self) -> PassedEvent:
        event = PassedEvent()
        self.log.append((f"event in {self._orders[-1]}", event))
        return event

    def hold_for(self, event: Moment) -> None:
        self.log.append((f"{self._orders[-1]} are held", event))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.log.append((f"copy in {self._orders[-1]}", None))
        super().copy(target, source)

    def copied_before(self, event: object) -> int:
        """Copies in the order of copies until this event."""
        names = [name for name, _ in self.log[: self.log.index(("event in copies", event))]]
        return names.count("copy in copies")


def logging_kernels(log: Log) -> Kernels:
    """The reference's, with plans that are data."""
    kernels = device_kernels(torch.float64)
    attend = kernels.paged_attention

    def logged(*args: Any) -> torch.Tensor:
        log.append(("attention", None))
        return attend(*args)

    return replace(kernels, paged_attention=logged)


def runner_on(
    accelerator: InterpretedAccelerator,
    folder: Path,
    kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> ModelRunner:
    monkeypatch.setattr(model_runner, "accelerator_for", lambda device: accelerator)
    options = {"model_config": read_model_config(folder), **options}
    return ModelRunner(
        folder, dtype="float64", device="cuda", kernels=kernels,
        num_pages=16, page_size=8, num_host_pages=8, max_running_requests=2, max_model_len=96,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_step_is_held_before_its_layers_for_what_they_read(
    deep: Path, is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six layers, in four runs: of 1, 2, 1 and 2."""
    accelerator = TwoOrders()
    kernels = logging_kernels(accelerator.log)
    graph_max_tokens = 8 if is_captured else 0
    runner = runner_on(accelerator, deep, kernels, monkeypatch, graph_max_tokens=graph_max_tokens)
    row = Row(0, 0, 0, tuple(range(5, 12)), PageUpdate(0, (3,)))
    pages = array("i", [5]), array("i", [2])
    copies = Transfer("store", *pages), Transfer("load", array("i", [6]), array("i", [1]))
    accelerator.log.clear()
    result = runner.execute(StepPlan(0, (row,), transfers=copies))
    log = accelerator.log
    names = [name for name, _ in log if name in ("steps are held", "attention")]
    held, layer = "steps are held", "attention"
    assert names == (
        [held, *[layer] * 6]
        if is_captured
        else [held, layer, held, layer, layer, held, layer, held, layer, layer]
    )
    events = [event for name, event in log if name == "steps are held"]
    # Two of indices, then what is loaded of each run; what is stored is taken by the bus later.
    assert [accelerator.copied_before(each) for each in events] == (
        [6] if is_captured else [3, 4, 5, 6]
    )
    assert [name for name, _ in log].count("copy in copies") == 2 + 4 + 4
    first = [name for name, _ in log].index("steps are held")
    assert "copy in steps" not in [name for name, _ in log[:first]]
    assert result.transfer_s is not None and result.transfer_s >= 0


def test_layers_of_a_stage_count_from_its_first(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last five of six."""
    accelerator = TwoOrders()
    config = config_of_stage(read_model_config(deep), (1, 6))
    stage = {"model_config": config, "stage": Stage(first_layer=1), "graph_max_tokens": 0}
    runner = runner_on(accelerator, deep, logging_kernels(accelerator.log), monkeypatch, **stage)
    row = Row(0, 0, 0, (5,), PageUpdate(0, (3,)))
    accelerator.log.clear()
    load = Transfer("load", array("i", [6]), array("i", [1]))
    runner.execute(StepPlan(0, (row,), transfers=(load,)))
    held, layer = "steps are held", "attention"
    names = [name for name, _ in accelerator.log if name in (held, layer)]
    assert names == [*[held, layer] * 4, layer]


def test_copies_within_the_device_are_made_at_once_for_all_layers(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = TwoOrders()
    runner = runner_on(accelerator, deep, logging_kernels(accelerator.log), monkeypatch)
    row = Row(0, 0, 0, (5,), PageUpdate(0, (3,)))
    accelerator.log.clear()
    runner.execute(StepPlan(0, (row,), transfers=(PageFork(array("i", [4]), array("i", [2])),)))
    assert [name for name, _ in accelerator.log].count("steps are held") == 1


class LateOrder(TwoOrders):
    """Does what is queued among copies when somebody waits for it, and not before."""

    def __init__(self) -> None:
        super().__init__()
        self._late: list[Callable[[], object]] = []

    def later(self, work: Callable[[], object]) -> None:
        self._late.append(work)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._orders[-1] == "copies":
            self.later(lambda: target.copy_(source))
        else:
            target.copy_(source)

    def event(self) -> PassedEvent:
        return LateEvent(self, len(self._late) if self._orders[-1] == "copies" else 0)

    def hold_for(self, event: Moment) -> None:
        event.wait()

    def do(self, until: int) -> None:
        for place in range(until):
            self._late[place]()
            self._late[place] = lambda: None


class LateEvent(PassedEvent):
    def __init__(self, order: LateOrder, place: int) -> None:
        super().__init__()
        self._order, self._place = order, place

    def wait(self) -> None:
        self._order.do(self._place)


@pytest.mark.parametrize("graph_max_tokens", [0, 64])
def test_a_step_reads_what_arrives_as_late_as_it_may(
    deep: Path, graph_max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are stored, overwritten, loaded elsewhere, and one of them is copied on the device: the
    last prompt chunk says what it says where they never moved."""

    def run(accelerator: InterpretedAccelerator, kernels: Kernels, moves: bool) -> RowResult:
        runner = runner_on(
            accelerator, deep, kernels, monkeypatch, graph_max_tokens=graph_max_tokens
        )
        told = SamplingParams(temperature=0.0, logprobs=3)
        text = tuple(range(5, 45))
        first = StepPlan(0, (Row(0, 0, 0, text[:32], PageUpdate(0, (1, 2, 3, 4))),))
        plans, update = [first], PageUpdate(4, (9,))
        if moves:
            host = array("i", [3, 2, 6, 0])
            other = Row(1, 1, 0, text[::-1][:32], PageUpdate(0, (1, 2, 3, 4)))
            store = Transfer("store", array("i", [1, 2, 3, 4]), host)
            load = Transfer("load", array("i", [10, 11, 12, 14]), host)
            fork = PageFork(array("i", [14]), array("i", [13]))
            plans.append(StepPlan(1, (other,), transfers=(store,)))
            update = PageUpdate(0, (10, 11, 12, 13, 9))
        last = Row(0, 0, 32, text[32:], update, sampling=told)
        plans.append(StepPlan(2, (last,), transfers=(load, fork) if moves else ()))
        return [runner.submit(plan).result() for plan in plans][-1].rows[0]

    accelerator = LateOrder()
    kernels = device_kernels(torch.float64)

    def late_page_copy(layers: Sequence[torch.Tensor], page_size: int) -> PageCopy:
        copy = kernels.make_page_copy(layers, page_size)
        late = SimpleNamespace(
            pack=lambda *args: accelerator.later(lambda: copy.pack(*args)),
            unpack=lambda *args: accelerator.later(lambda: copy.unpack(*args)),
        )
        return cast(PageCopy, late)

    found = run(accelerator, replace(kernels, make_page_copy=late_page_copy), moves=True)
    assert found == run(InterpretedAccelerator(), kernels, moves=False)
