"""A whole engine with its gateway in a thread of the test's process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
from waiting import PATIENCE_S

from stemma.frontend.client.backend import Backend
from stemma.frontend.client.client import Connection
from stemma.runtime.config import EngineConfig
from stemma.runtime.gateway.gateway import Gateway
from stemma.runtime.loaded_model import LoadedModel


@contextmanager
def serving(checkpoint: Path, **options: Any) -> Iterator[Backend]:
    """Serves within the block, in float64 through the reference kernels unless told; no page is
    lost."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    exact = {"dtype": "float64", "kernels": "reference", "max_model_len": 400}
    loaded = load(EngineConfig(model=checkpoint, **(exact | options)))
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


def load(config: EngineConfig) -> LoadedModel:
    """The processes for grammars start with the first of them, which most tests have none of."""
    loaded = LoadedModel(config)
    loaded.engine.grammars.start = lambda: None  # type: ignore[union-attr,method-assign]
    return loaded
