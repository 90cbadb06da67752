"""What calls put out, token by token: read from a file, or recorded on a real engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import InvalidRequest
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ...runtime.config import EngineConfig
from ...training.recording import recording
from .conversations import conversations


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
    from ...runtime.loaded_model import LoadedModel  # imports torch

    calls: list[RecordedCall] = []
    program = 0
    loaded = LoadedModel(EngineConfig(model=EMBEDDED_MODEL, speculate="off"))
    with recording(loaded) as (backend, recorder):
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
