"""Rank 0 of a model that several processes hold together: by parts of each layer (tensor
parallelism), by tokens (context parallelism), by layers (pipeline parallelism).

It is the engine's executor: what the engine asks of it, it first orders of the other processes, its
children, which then compute the same step on their part of the model. It is of the last stage,
which samples: a step is queued by being ordered, and computed here when its result is asked for,
or, by a device that works by itself, once the stages before have. If one of the processes ends, or
a step fails on any, the engine ends: its owner starts all again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...errors import RankLost
from ..checkpoint.config.model_config import ModelConfig
from ..checkpoint.lora.adapter import Adapter, AdapterModule, StoredTensor
from ..execute.layer_streams import KVSink
from ..execute.model_runner import GraphProgress, ModelRunner
from ..memory.copies import BlockRestore
from ..memory.sizing import DEFAULT_CPU_MEM_FRACTION
from ..memory.whole_kv import StagePieces
from ..schedule.plan import PendingStep, StepPlan, StepResult
from .orders import PlanWriter, frame, num_blocks, with_blocks, write_all
from .places import Division, OpenedPlaces, Place

log = logging.getLogger(__name__)
T = TypeVar("T")

_NOTHING = np.empty(0, dtype=np.uint8)
_GRACE_S = 0.5  # for an engine to end by itself
_END_S = 5.0  # for a rank to end once its input has ended


def load_model(
    model_folder: Path, model_config: ModelConfig, division: Division, **options: Any
) -> tuple[ModelRunner, Leader | None]:
    """The runner of this process; and, where there are others, what executes plans on all. options:
    of `ModelRunner`. Raises as `Leader` does."""
    if division.num_processes == 1:
        return ModelRunner(model_folder, model_config, **options), None
    if options["device"] == "cpu":  # all processes' KV lies in the memory of one machine
        fraction = options.get("mem_fraction") or DEFAULT_CPU_MEM_FRACTION
        options["mem_fraction"] = fraction / division.num_processes
    leader = Leader(model_folder, model_config, division, **options)
    return leader.runner, leader


@dataclass(frozen=True, slots=True)
class _RankedAdapter:
    """An adapter as rank 0 takes it, and as the others are sent it."""

    own: object
    modules: Sequence[AdapterModule]


class Leader:
    """Owns the other processes and what they share, until `close`. Not thread-safe, but for
    `prepare_adapter`.

    A source for the gateway's poller: it has something to collect when a process has ended.
    """

    def __init__(
        self,
        model_folder: Path,
        model_config: ModelConfig,
        division: Division,
        *,
        device: str,
        on_progress: Any = None,
        **options: Any,
    ) -> None:
        """options: of `ModelRunner`, the same for all. Raises as it does, InvalidRequest where the
        model cannot be divided so, and RankLost where another process cannot load its part."""
        options = {"device": device, **options}
        self._lost_fd, self._signal_fd = os.pipe()
        self._num_stages = division.num_stages
        self._is_closing = self._is_lost = False
        self._is_on_cpu = device == "cpu"
        self._plans = PlanWriter()
        self._pending: deque[_StagedStep] = deque()  # ordered, and not computed here yet
        opened = OpenedPlaces(division, model_folder, model_config, options)
        self._opened = opened
        self._processes = [_process_of(place) for place in opened.others]
        opened.hand_over()
        try:
            for process, place in zip(self._processes, opened.others, strict=True):
                self._write(process, frame(place))
            self._seat = opened.take_own(self._are_alive, self._lost_fd)
            self._watches = [
                threading.Thread(target=self._watch, args=(index,), daemon=True)
                for index in range(len(self._processes))
            ]
            for watch in self._watches:
                watch.start()
            self.runner = self._seat.runner(on_progress)
            self.segment_cost_tokens = self.runner.segment_cost_tokens
        except BaseException:
            self._is_closing = True
            self._end_processes(0.0)
            raise

    # --- the engine's executor, see `ModelRunner` ------------------------------------------------

    @property
    def can_overlap(self) -> bool:
        return self.runner.can_overlap

    def submit(self, plan: StepPlan) -> PendingStep:
        if self.runner.stage_pieces is None or not num_blocks(plan):
            self._order(self._plans.frame(plan))
        else:
            plan = self._order_with_blocks(plan, self.runner.stage_pieces)
        if self._num_stages == 1 or not self._is_on_cpu:
            return self._guarded(lambda: self.runner.submit(plan))
        step = _StagedStep(plan, self._compute)
        self._pending.append(step)
        return step

    def _compute(self, last: _StagedStep) -> None:
        """The steps up to this one, in their order."""
        while last.outcome is None:
            step = self._pending.popleft()
            step.outcome = self._guarded(partial(self.runner.execute, step.plan))

    def warm_up(self, on_graph: GraphProgress | None = None) -> None:
        self._order(frame(("warm_up",)))
        self._guarded(lambda: self.runner.warm_up(on_graph))

    def prepare_adapter(self, modules: Sequence[AdapterModule]) -> object:
        plain = [
            module._replace(a=_without_view(module.a), b=_without_view(module.b))
            for module in modules
        ]
        return _RankedAdapter(self.runner.prepare_adapter(modules), plain)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        weights = adapter.weights
        assert isinstance(weights, _RankedAdapter), "prepared here"
        own = replace(adapter, weights=weights.own)
        self._order(frame(("load_adapter", slot, weights.modules)))
        self._guarded(lambda: self.runner.load_adapter(slot, own))

    def stream_to(self, sink: KVSink) -> None:
        self._order(frame(("stream_kv",)))
        self.runner.stream_to(sink)

    def _order(self, order: bytes) -> None:
        """Have the others do what this process is about to do as well."""
        self.collect()
        for process in self._processes:
            self._write(process, order)

    def _order_with_blocks(self, plan: StepPlan, pieces: StagePieces) -> StepPlan:
        """Rank 0 of each stage gets its layers of the blocks; returns the plan with those of this
        one. Within a stage they cross in the step."""
        blocks = [each.payload for each in plan.transfers if isinstance(each, BlockRestore)]
        *before, own = zip(*map(pieces.cut, blocks), strict=True)
        *frames, without = self._plans.frames(plan, [*before, [_NOTHING] * len(blocks)])
        self.collect()
        for process, place in zip(self._processes, self._opened.others, strict=True):
            self._write(process, frames[place.stage] if place.rank == 0 else without)
        return with_blocks(plan, own)

    def _guarded(self, run: Callable[[], T]) -> T:
        """An error here would leave the others waiting."""
        self.collect()
        try:
            result = run()
        except RankLost:
            raise
        except Exception as error:
            self._seat.abort()
            failed = f"a step failed on rank 0: {type(error).__name__}: {error}"
            raise RankLost(failed) from error
        self.collect()
        return result

    # --- the other processes ----------------------------------------------------------------------

    def describe(self) -> list[dict[str, Any]]:
        """The other processes as plain data: each one's `name`, `pid` and `peak_rss_bytes`, None
        where the system does not tell."""
        return [
            {"name": place.name, "pid": process.pid, "peak_rss_bytes": _peak_rss_bytes(process.pid)}
            for process, place in zip(self._processes, self._opened.others, strict=True)
        ]

    def fileno(self) -> int:
        """Readable when a process has ended."""
        return self._lost_fd

    def collect(self) -> None:
        """Raises RankLost when a process has ended."""
        if self._is_lost:
            raise RankLost("a process of the model has ended: the engine cannot go on without it")
        self._seat.check()

    def close(self) -> None:
        """End the other processes. No step may run any more."""
        if self._is_closing:
            return
        self._is_closing = True
        self._end_processes(_END_S)
        for watch in self._watches:
            watch.join()
        self._seat.close()
        os.close(self._lost_fd)
        os.close(self._signal_fd)

    def _are_alive(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def _end_processes(self, limit_s: float) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _write(self, process: subprocess.Popen[bytes], data: bytes) -> None:
        assert process.stdin is not None
        try:
            write_all(process.stdin, data)
        except OSError as error:
            raise RankLost("a rank of the model has ended") from error

    def _watch(self, index: int) -> None:
        """In a thread of its own: until the process has ended."""
        self._processes[index].wait()
        if self._is_closing:
            return
        log.error("%s of the model has ended", self._opened.others[index].name)
        self._is_lost = True
        self._seat.abort()
        os.write(self._signal_fd, b"\0")
        if not self._is_on_cpu:  # a device may wait without end for what never comes
            time.sleep(_GRACE_S)
            os._exit(1)


class _StagedStep:
    """A step that the stages before compute meanwhile, see `PendingStep`."""

    def __init__(self, plan: StepPlan, compute: Callable[[_StagedStep], None]) -> None:
        self.plan = plan
        self.outcome: StepResult | None = None
        self._compute = compute

    def result(self) -> StepResult:
        """Compute it here."""
        self._compute(self)
        assert self.outcome is not None
        return self.outcome


def _process_of(place: Place) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "stemma.runtime.parallel.follower"],
        bufsize=0,
        stdin=subprocess.PIPE,
        pass_fds=place.descriptors,
        # Its parent handles Ctrl-C. And a group in the session of its parent is told by the system
        # (SIGHUP, SIGCONT) when that ends while it is stopped and could not see its input end.
        process_group=0,
    )


def _peak_rss_bytes(pid: int) -> int | None:
    """Of another process (Linux)."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def _without_view(stored: StoredTensor) -> StoredTensor:
    """As it can be pickled."""
    return stored._replace(data=memoryview(bytes(stored.data)).obj)  # type: ignore[arg-type]
