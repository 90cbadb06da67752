"""Appending what waits for the model before the branch can go on: written once, for threads and for
coroutines.

The steps of such an append are a generator of what is to be waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

from ..client.program import Pending, Program
from .forks import Forks

Fork: TypeAlias = Callable[[], Forks[Any]]  # a branch that goes on from where the one at hand is
Steps: TypeAlias = Generator[Pending, None, None]


def carry_out(program: Program, steps: Steps) -> None:
    """Wait for each on this thread."""
    with contextlib.closing(steps):
        for pending in steps:
            program.wait(pending)


async def carry_out_async(program: Program, steps: Steps) -> None:
    """The same for a coroutine."""
    with contextlib.closing(steps):
        for pending in steps:
            await program.wait_async(pending)
