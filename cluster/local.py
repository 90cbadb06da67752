"""Replicas as plain processes of this machine, which share its cores and memory."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from ..frontend.client.engine_process import EngineProcess, start_timeout_s
from ..frontend.client.temporary_folder import TemporaryFolder
from ..runtime.config import EngineConfig, Role, options_of
from ..runtime.execute.threads import default_num_threads
from ..runtime.memory.sizing import DEFAULT_CPU_MEM_FRACTION
from .replica import Replica


def hire_local(
    config: EngineConfig,
    num_replicas: int,
    context: zmq.Context[zmq.Socket[bytes]],
    num_prefill: int | None = None,
) -> Callable[[int], Replica]:
    """Makes the replica of a number, not started yet; `config`: of all of them together, its model
    a folder. `num_prefill`: so many, the last ones, compute long prompts for the others; None: no
    replica has a role."""
    options = share_of(config, num_replicas)
    model = options.pop("model", None)
    connect_s = start_timeout_s(model)
    peers = None if num_prefill is None else _Peers(num_replicas)

    def hire(number: int) -> Replica:
        def start() -> EngineProcess:
            own = {} if peers is None else {"role": replica.role, **peers.options(number)}
            return EngineProcess(model, options=options | own)

        role: Role | None = None
        if num_prefill is not None:
            role = "prefill" if number >= num_replicas - num_prefill else "decode"
        replica = Replica(number, start, context=context, connect_s=connect_s, role=role)
        return replica

    return hire


class _Peers:
    """Where replicas ask each other to compute prompts: any of them any other, since roles may
    change. Lifetime: the process's."""

    def __init__(self, num_replicas: int) -> None:
        folder = TemporaryFolder()
        atexit.register(folder.remove)
        self._endpoints = [f"ipc://{folder.path / f'kv-{n}'}" for n in range(num_replicas)]

    def options(self, number: int) -> dict[str, Any]:
        """Of one replica's engine."""
        others = [each for each in self._endpoints if each != self._endpoints[number]]
        return {"prefill_endpoint": self._endpoints[number], "prefill_engines": others}


def share_of(config: EngineConfig, num_replicas: int) -> dict[str, Any]:
    """The options of one engine of several: an equal part of the threads, and of the memory where
    no number of tokens is given."""
    options = options_of(config)
    num_threads = config.num_threads or default_num_threads(Path(config.model), config.num_ranks)
    cores = max(1, len(os.sched_getaffinity(0)) // (num_replicas * config.num_ranks))
    options["num_threads"] = min(num_threads, cores)
    if config.max_total_tokens is None and config.device == "cpu":
        fraction = config.mem_fraction or DEFAULT_CPU_MEM_FRACTION
        options["mem_fraction"] = fraction / num_replicas
    return options
