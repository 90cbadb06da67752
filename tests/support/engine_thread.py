"""A whole engine with its gateway in a thread of the test's process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
from waiting import PATIENCE_S

from stemma.frontend.client.backend import Backend
from stemma.frontend.client.client import Connection
from stemma.frontend.native.backend import NativeBackend
from stemma.runtime import encoder_engine
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.runtime.config import EngineConfig
from stemma.runtime.encoder_engine import LoadedEncoder
from stemma.runtime.gateway.gateway import Gateway
from stemma.runtime.loaded_model import LoadedModel


@contextmanager
def serving(checkpoint: Path, **options: Any) -> Iterator[Backend]:
    """Serves within the block, in float64 through the reference kernels unless told; no page is
    lost."""
    exact = {"dtype": "float64", "kernels": "reference", "max_model_len": 400}
    with engine_in_thread(checkpoint, **(exact | options)) as backend:
        yield backend


@contextmanager
def engine_in_thread(model: Path = EMBEDDED_MODEL, **options: Any) -> Iterator[Backend]:
    """As `st.Engine(model, ...)`, with the types and the kernels that a user gets; no page is lost.

    It takes 0.1 s of CPU to start, a process of its own 3."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    loaded = load(EngineConfig(model=model, **options))
    gateway = Gateway(loaded, ["inproc://programs"], context=context)
    thread = threading.Thread(target=gateway.run, daemon=True)
    thread.start()
    backend = Backend(Connection("inproc://programs", context=context))
    try:
        yield backend
        loaded.engine.flush_cache()
        kv_cache = loaded.engine.scheduler.kv_cache
        assert kv_cache.allocator.num_free == kv_cache.num_pages, "a page was lost"
    finally:
        backend.shutdown()
        gateway.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


class EngineInThread(NativeBackend):
    """In place of `st.Engine`, for benchmarks: their tests hold what they tell, not how long it
    took. None works ahead unless told: idle ones would take the others' time."""

    def __init__(self, model: Path | None = None, **options: Any) -> None:
        self._running = engine_in_thread(
            model or EMBEDDED_MODEL, **{"disable_ahead": True, **options}
        )
        super().__init__(self._running.__enter__().channel)
        self.pid = os.getpid()

    def shutdown(self) -> None:
        if self.is_open:
            self._running.__exit__(None, None, None)


def load(config: EngineConfig) -> LoadedModel | LoadedEncoder:
    """The processes for grammars start with the first of them, which most tests have none of."""
    loaded = encoder_engine.load(config)
    if isinstance(loaded, LoadedModel):
        loaded.engine.grammars.start = lambda: None  # type: ignore[union-attr,method-assign]
    return loaded
