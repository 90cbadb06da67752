"""What calls put out, token by token: read from a file, or recorded on a real engine."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...frontend.protocol import ir
from ...runtime.programs.session import ProgramSession
from ...runtime.schedule.program_record import ProgramRecord
from ...runtime.schedule.request import Request

if TYPE_CHECKING:
    from ...runtime.engine import Engine, LoadedModel

NAMES = ("Anna Berg", "Tomas Velik", "Mira Solane", "Paul Dorn", "Lena Fisk", "Omar Haddad")
CITIES = ("Lisbon", "Prague", "Oslo", "Vienna", "Porto", "Bergen", "Geneva")
HOBBIES = ("chess", "sailing", "painting", "tennis", "gardening")


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call; calls of a program come in the order in which they began."""

    program: int
    op: str
    prompt: list[int]
    output: list[int]
    forced: list[int] = field(default_factory=list)  # 1 for tokens that cost no step; or none
    after: list[int] = field(default_factory=list)  # the calls that had ended before it began
    skill: str = ""


def read_calls(path: Path) -> list[RecordedCall]:
    """From JSON lines, an object for each call."""
    return [RecordedCall(**json.loads(line)) for line in path.read_text().splitlines()]


def record_calls(loaded: LoadedModel, num_programs: int) -> list[RecordedCall]:
    """Of extractions and chats, one program after the other."""
    rng, queue = random.Random(0), _Recorder(loaded.engine)
    calls: list[RecordedCall] = []
    for program in range(num_programs):
        op, turns = _extraction(rng) if program % 2 else _chat(rng)
        queue.requests.clear()
        _run(loaded, queue, list(_ops(turns)))
        for request in queue.requests:
            calls.append(
                RecordedCall(
                    program,
                    op,
                    [*request.prompt],
                    [*request.output_ids],
                    after=[i for i, call in enumerate(calls) if call.program == program],
                    skill=op,
                )
            )
    return calls


class _Recorder:
    """The engine's queue, which keeps what goes through it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.requests: list[Request] = []

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        self._engine.submit(request)

    def abort(self, request: Request) -> None:
        self._engine.abort(request)

    def end_program(self, program: ProgramRecord) -> None:
        self._engine.end_program(program)


def _run(loaded: LoadedModel, queue: _Recorder, ops: list[ir.Op]) -> None:
    ready: list[ProgramSession] = []
    session = ProgramSession(
        replace(loaded.context(), queue=queue),
        lambda *event: None,
        ready.append,
        seed=1,
        instance=0,
        is_streaming=False,
    )
    session.receive(ops, end=True)
    session.advance()
    while loaded.engine.has_work:
        loaded.engine.step()
        while ready:
            ready.pop().advance()


def _ops(turns: Iterable[str]) -> Iterator[ir.Op]:
    seq = 0
    for number, text in enumerate(turns):
        params = ir.GenParams(max_tokens=96, temperature=0.0)
        made: tuple[tuple[type[ir.Op], tuple[object, ...]], ...] = (
            (ir.RoleBegin, ("user",)),
            (ir.Text, (text,)),
            (ir.RoleEnd, ()),
            (ir.RoleBegin, ("assistant",)),
            (ir.Gen, (f"reply{number}", params)),
            (ir.RoleEnd, ()),
        )
        for op, values in made:
            yield op(0, seq, None, *values)
            seq += 1


def _extraction(rng: random.Random) -> tuple[str, list[str]]:
    name, city, hobby = rng.choice(NAMES), rng.choice(CITIES), rng.choice(HOBBIES)
    text = f"{name} is {rng.randint(20, 70)} years old. Lives in {city} and likes {hobby}."
    return "extract", [f"Text: {text}\nExtract name, age, city, hobby as JSON."]


def _chat(rng: random.Random) -> tuple[str, list[str]]:
    name, city = rng.choice(NAMES).split()[0], rng.choice(CITIES)
    questions = ["What is my name?", "Where do I live?"]
    rng.shuffle(questions)
    return "chat", [f"Hi, my name is {name}.", f"I live in {city}.", *questions]
