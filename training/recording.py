"""What a model says in programs, token by token: an engine in this process, whose requests are
kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import zmq

from ..frontend.client.client import Connection
from ..frontend.native.backend import NativeBackend
from ..runtime.gateway.gateway import Gateway
from ..runtime.schedule.request import FinishReason, Request

if TYPE_CHECKING:
    from ..runtime.engine import Engine
    from ..runtime.loaded_model import LoadedModel

_ENDPOINT = "inproc://recorded"


class Recorder:
    """Keeps an engine's requests that generate, and which of their tokens a grammar forced."""

    def __init__(self, engine: Engine) -> None:
        self.requests: list[Request] = []
        self.forced: dict[Request, set[int]] = {}  # places in the output
        self._submit, engine.submit = engine.submit, self.submit  # type: ignore[method-assign]
        outputs = engine.scheduler.outputs
        self._append, outputs.append_forced = outputs.append_forced, self.append  # type: ignore[method-assign]

    def submit(self, request: Request) -> None:
        if request.samples:
            self.requests.append(request)
        self._submit(request)

    def append(self, request: Request) -> FinishReason | None:
        first = request.num_output_tokens
        reason = self._append(request)
        self.forced.setdefault(request, set()).update(range(first, request.num_output_tokens))
        return reason


@contextmanager
def recording(loaded: LoadedModel) -> Iterator[tuple[NativeBackend, Recorder]]:
    """A backend whose programs run on this model, and what is kept of them."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gateway = Gateway(loaded, [_ENDPOINT], context=context)
    recorder = Recorder(loaded.engine)
    thread = threading.Thread(target=gateway.run, daemon=True)
    thread.start()
    backend = NativeBackend(Connection(_ENDPOINT, context=context))
    try:
        yield backend, recorder
    finally:
        backend.shutdown()
        gateway.stop()
        thread.join()
