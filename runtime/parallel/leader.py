"""Rank 0 of a model that several processes hold together (tensor or context parallelism).

It is the engine's executor: what the engine asks of it, it first orders of the other ranks, its
children, which then compute the same step on their parts of the weights and of the KV. Sums between
them keep all in step. If one of them ends, or a step fails on any, the engine ends: its owner
starts all of them again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...errors import RankLost
from ...kernels.triton.availability import is_interpreted
from ..checkpoint.config.model_config import ModelConfig
from ..checkpoint.lora.adapter import Adapter, AdapterModule, StoredTensor
from ..execute.model_runner import GraphProgress, ModelRunner
from ..memory.sizing import DEFAULT_CPU_MEM_FRACTION
from ..models.layers.expert_placement import ExpertGroups
from ..models.layers.ranks import Ranks
from ..schedule.plan import PendingStep, StepPlan
from .meeting import OpenedMeeting
from .orders import PlanWriter, Start, frame, write_all

log = logging.getLogger(__name__)
T = TypeVar("T")

_GRACE_S = 0.5  # for an engine to end by itself
_END_S = 5.0  # for a rank to end once its input has ended


def load_model(
    model_folder: Path,
    model_config: ModelConfig,
    num_ranks: int,
    expert_groups: ExpertGroups,
    *,
    divides_tokens: bool = False,
    **options: Any,
) -> tuple[ModelRunner, Leader | None]:
    """The runner of this process, which is rank 0; and, where there are other ranks, what executes
    plans on all. expert_groups, divides_tokens: see `Ranks`; options: of `ModelRunner`. Raises
    as `Leader` does."""
    if num_ranks == 1:
        return ModelRunner(model_folder, model_config, **options), None
    if options["device"] == "cpu":  # all ranks' KV lies in the memory of one machine
        fraction = options.get("mem_fraction") or DEFAULT_CPU_MEM_FRACTION
        options["mem_fraction"] = fraction / num_ranks
    leader = Leader(
        model_folder,
        model_config,
        num_ranks,
        expert_groups,
        divides_tokens=divides_tokens,
        **options,
    )
    return leader.runner, leader


@dataclass(frozen=True, slots=True)
class _RankedAdapter:
    """An adapter as rank 0 takes it, and as the others are sent it."""

    own: object
    modules: Sequence[AdapterModule]


class Leader:
    """Owns the other ranks' processes and the communicator, until `close`. Not thread-safe, but for
    `prepare_adapter`.

    A source for the gateway's poller: it has something to collect when a rank has ended.
    """

    def __init__(
        self,
        model_folder: Path,
        model_config: ModelConfig,
        num_ranks: int,
        expert_groups: ExpertGroups,
        *,
        divides_tokens: bool,
        device: str,
        on_progress: Any = None,
        **options: Any,
    ) -> None:
        """options: of `ModelRunner`, the same for all ranks. Raises as it does, and RankLost where
        another rank cannot load its part."""
        opened = OpenedMeeting(num_ranks, device)
        self._lost_fd, self._signal_fd = os.pipe()
        self._is_closing = False
        self._is_on_gpu = device != "cpu" and not is_interpreted()
        self._plans = PlanWriter()
        self._processes = [_rank_process(opened.meeting.descriptors) for _ in range(1, num_ranks)]
        options = {"device": device, **options}
        try:
            for rank, process in enumerate(self._processes, 1):
                own = {**options, "device": _device_of(device, rank)}
                start = Start(
                    rank,
                    opened.meeting,
                    expert_groups,
                    divides_tokens,
                    model_folder,
                    model_config,
                    own,
                )
                self._write(process, frame(start))
            self._communicator = opened.communicator(self._are_alive)
            self._watches = [
                threading.Thread(target=self._watch, args=(process,), daemon=True)
                for process in self._processes
            ]
            for watch in self._watches:
                watch.start()
            ranks = Ranks(
                0,
                num_ranks,
                self._communicator,
                gathers_logits=device != "cpu",
                expert_groups=expert_groups,
                divides_tokens=divides_tokens,
            )
            self.runner = ModelRunner(
                model_folder, model_config, ranks=ranks, on_progress=on_progress, **options
            )
            self.segment_cost_tokens = self.runner.segment_cost_tokens
            self._communicator.all_gather(np.zeros(1))  # all have loaded their parts
        except BaseException:
            self._is_closing = True
            self._end_processes(0.0)
            raise

    # --- the engine's executor, see `ModelRunner` ------------------------------------------------

    @property
    def can_overlap(self) -> bool:
        return self.runner.can_overlap

    def submit(self, plan: StepPlan) -> PendingStep:
        return self._together(lambda: self.runner.submit(plan), self._plans.frame(plan))

    def warm_up(self, on_graph: GraphProgress | None = None) -> None:
        self._together(lambda: self.runner.warm_up(on_graph), frame(("warm_up",)))

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
        order = frame(("load_adapter", slot, weights.modules))
        self._together(lambda: self.runner.load_adapter(slot, own), order)

    def _together(self, run: Callable[[], T], order: bytes) -> T:
        """Run it here, and the order there; an error on one rank would leave the others waiting."""
        self._communicator.check()
        try:
            for process in self._processes:
                self._write(process, order)
            result = run()
        except RankLost:
            raise
        except Exception as error:
            self._communicator.abort()
            failed = f"a step failed on rank 0: {type(error).__name__}: {error}"
            raise RankLost(failed) from error
        self._communicator.check()
        return result

    # --- the other ranks --------------------------------------------------------------------------

    def fileno(self) -> int:
        """Readable when a rank has ended."""
        return self._lost_fd

    def collect(self) -> None:
        """Raises RankLost when a rank has ended."""
        self._communicator.check()

    def close(self) -> None:
        """End the other ranks. No step may run any more."""
        if self._is_closing:
            return
        self._is_closing = True
        self._end_processes(_END_S)
        for watch in self._watches:
            watch.join()
        self._communicator.close()
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

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """In a thread of its own: until the process has ended."""
        process.wait()
        if self._is_closing:
            return
        log.error("rank %d of the model has ended", self._processes.index(process) + 1)
        self._communicator.abort()
        os.write(self._signal_fd, b"\0")
        if self._is_on_gpu:  # where a sum that comes to nothing is waited for without end
            time.sleep(_GRACE_S)
            os._exit(1)


def _rank_process(descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "stemma.runtime.parallel.follower"],
        bufsize=0,
        stdin=subprocess.PIPE,
        pass_fds=descriptors,
        # Its parent handles Ctrl-C. And a group in the session of its parent is told by the system
        # (SIGHUP, SIGCONT) when that ends while it is stopped and could not see its input end.
        process_group=0,
    )


def _device_of(device: str, rank: int) -> str:
    """GPUs of one machine, one after the other."""
    if device == "cpu":
        return device
    first = int(device.partition(":")[2] or 0)
    return f"cuda:{first + rank}"


def _without_view(stored: StoredTensor) -> StoredTensor:
    """As it can be pickled."""
    return stored._replace(data=memoryview(bytes(stored.data)).obj)  # type: ignore[arg-type]
