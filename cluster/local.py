"""Replicas as plain processes of this machine, which share its cores and memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from ..frontend.client.engine_process import EngineProcess, start_timeout_s
from ..runtime.config import EngineConfig, options_of
from ..runtime.execute.threads import default_num_threads
from ..runtime.memory.sizing import DEFAULT_CPU_MEM_FRACTION
from .replica import Replica


def hire_local(
    config: EngineConfig, num_replicas: int, context: zmq.Context[zmq.Socket[bytes]]
) -> Callable[[int], Replica]:
    """Makes the replica of a number, not started yet; `config`: of all of them together, its model
    a folder."""
    options = share_of(config, num_replicas)
    model = options.pop("model", None)
    start = partial(EngineProcess, model, options=options)
    connect_s = start_timeout_s(model)
    return lambda number: Replica(number, start, context=context, connect_s=connect_s)


def share_of(config: EngineConfig, num_replicas: int) -> dict[str, Any]:
    """The options of one engine of several: an equal part of the threads, and of the memory where
    no number of tokens is given."""
    options = options_of(config)
    num_threads = config.num_threads or default_num_threads(Path(config.model), config.tp_size)
    cores = max(1, len(os.sched_getaffinity(0)) // (num_replicas * config.tp_size))
    options["num_threads"] = min(num_threads, cores)
    if config.max_total_tokens is None and config.device == "cpu":
        fraction = config.mem_fraction or DEFAULT_CPU_MEM_FRACTION
        options["mem_fraction"] = fraction / num_replicas
    return options
