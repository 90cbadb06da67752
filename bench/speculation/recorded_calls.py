"""What calls put out, token by token: read from a file, or recorded on a real engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from ...errors import InvalidRequest
from ...frontend.client.backend import Backend
from ...frontend.client.client import Connection
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ...runtime.config import EngineConfig
from ...runtime.gateway.gateway import Gateway
from ...runtime.schedule.request import FinishReason, Request
from .conversations import conversations

if TYPE_CHECKING:
    from ...runtime.engine import Engine

_ENDPOINT = "inproc://recorded"


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call; calls of a program come in the order in which they began."""

    program: int
    op: str
    prompt: list[int]
    output: list[int]
    forced: list[int] = field(default_factory=list)  # 1 for tokens that cost no step; or none
    after: list[int] = field(default_factory=list)  # its program's calls that had ended before
    skill: str = ""


def read_calls(path: Path) -> list[RecordedCall]:
    """From JSON lines, an object for each call. Raises InvalidRequest."""
    try:
        calls = [RecordedCall(**json.loads(line)) for line in path.read_text().splitlines()]
        for index, call in enumerate(calls):
            if len(call.forced) not in (0, len(call.output)):
                raise ValueError(
                    f"call {index}: {len(call.output)} tokens, {len(call.forced)} forced"
                )
            earlier = (i for i, other in enumerate(calls[:index]) if other.program == call.program)
            if not {*earlier}.issuperset(call.after):
                raise ValueError(f"call {index} is after others than its program's earlier ones")
        if not any(call.output for call in calls):
            raise ValueError("there is no output")
    except (OSError, TypeError, ValueError) as error:
        raise InvalidRequest.of("calls", str(path), f"JSON lines of calls ({error})") from error
    return calls


def record_calls(num_each: int) -> list[RecordedCall]:
    """Of so many conversations of each kind on the embedded model, one after the other, greedy and
    without drafts. Those that generate nothing leave no calls."""
    calls: list[RecordedCall] = []
    program = 0
    with _recorder() as (backend, recorder):
        for skill, cases in conversations(num_each).items():
            for case in cases:
                recorder.requests.clear()
                case.program.run(case=case, temperature=0.0, backend=backend).text()
                first = len(calls)
                for request in recorder.requests:
                    output, forced = [*request.output_ids], recorder.forced.get(request, set())
                    if output:
                        calls.append(
                            RecordedCall(
                                program,
                                repr(request.op_key),
                                [*request.prompt],
                                output,
                                [int(i in forced) for i in range(len(output))],
                                after=[*range(first, len(calls))],
                                skill=skill,
                            )
                        )
                program += 1
    return calls


class _Recorder:
    """Keeps an engine's requests, and which of their tokens a grammar forced."""

    def __init__(self, engine: Engine) -> None:
        self.requests: list[Request] = []
        self.forced: dict[Request, set[int]] = {}
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
def _recorder() -> Iterator[tuple[Backend, _Recorder]]:
    from ...runtime.loaded_model import LoadedModel  # imports torch

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    loaded = LoadedModel(EngineConfig(model=EMBEDDED_MODEL, speculate="off"))
    gateway = Gateway(loaded, [_ENDPOINT], context=context)
    recorder = _Recorder(loaded.engine)
    thread = threading.Thread(target=gateway.run, daemon=True)
    thread.start()
    backend = Backend(Connection(_ENDPOINT, context=context))
    try:
        yield backend, recorder
    finally:
        backend.shutdown()
        gateway.stop()
        thread.join()
