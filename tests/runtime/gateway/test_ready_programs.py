"""Which program has the next turn."""

from __future__ import annotations

from typing import Any

from stemma.runtime.gateway.ready_programs import ReadyPrograms
from stemma.runtime.schedule.program_record import ProgramRecord


class Program:
    """All that the order knows of a session."""

    def __init__(self, tenant: str) -> None:
        self.record = ProgramRecord(tenant=tenant)


def test_one_program_beside_another_tenants_thousand_is_among_the_next_two() -> None:
    ready: Any = ReadyPrograms()
    many, one = [Program("many") for _ in range(1000)], Program("one")
    for program in (*many, one, many[1]):
        ready.add(program)
    ready.discard(many[0])
    ready.discard(many[0])
    assert [ready.take() for _ in range(3)] == [many[1], one, many[2]]
    assert list(ready) == many[3:]
    for program in many[3:]:
        ready.discard(program)
    assert not ready
