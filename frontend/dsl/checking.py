"""Values that are generated until one will do: `gen(validate=, retries=)`.

Each attempt is a fork. The branch takes over what the one that will do has written, token for
token, and goes on as if the others had never been.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from ...errors import InvalidProgram, ProgramError
from ..client.program import Pending
from ..protocol.numbers import plain
from .expr import Check, GenExpr
from .forks import Forks
from .waits import Fork, Steps
from .writing import BranchWriter

RETRY_TEMPERATURE = 0.7  # where the first attempt took the likeliest tokens: they stay the same


def checked_steps(state: BranchWriter, fork: Fork, asked: GenExpr, source: str | None) -> Steps:
    """Append a value that will do, once there is one; yields each attempt, to be waited for. Raises
    ProgramError."""
    assert asked.check is not None
    problem = ""
    for number in range(asked.check.retries + 1):
        attempts = fork()
        attempts[0]._append(_attempt(state, asked, number), source)
        pending = attempts[0]._pieces[-1]
        assert isinstance(pending, Pending)
        yield pending
        problem = _problem_of(pending, asked.check)
        if not problem:
            _take_over(state, attempts, pending)
            return
    tried = f" ({asked.check.retries + 1} attempts)" if asked.check.retries else ""
    raise ProgramError(
        f"{problem}{tried}", op=asked.name or "gen", source=source, kind="InvalidOutput"
    )


def _attempt(state: BranchWriter, asked: GenExpr, number: int) -> GenExpr:
    params = asked.params
    if number:
        defaults = state._program.defaults
        whole = params if defaults is None else defaults.applied_to(params)
        if whole.temperature == 0:
            params = replace(params, temperature=RETRY_TEMPERATURE)
        if whole.seed is not None:
            params = replace(params, seed=whole.seed + number)
    return GenExpr(asked.name, params, asked.read, ahead=asked.ahead)


def _problem_of(pending: Pending, check: Check) -> str:
    """Why a value will not do; "" where it will."""
    try:
        value: Any = pending.typed_value
        if check.accepts is None or not _says_false(check.accepts(value)):
            return ""
        return f"validate says False of {value!r:.200}"
    except ProgramError as error:  # it stands for no value
        return error.message
    except InvalidProgram:  # another output would not help
        raise
    except (ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}; the output was {pending.value!r:.200}"


def _says_false(answer: Any) -> bool:
    """Of Python's or NumPy's. Raises InvalidProgram for what has to be awaited."""
    if inspect.iscoroutine(answer):
        answer.close()
        raise InvalidProgram.of("validate", "an awaitable", "a plain function of the value")
    return plain(answer) is False


def _take_over(state: BranchWriter, attempts: Forks[Any], pending: Pending) -> None:
    attempts.join("concate_and_append")
    if pending.name is not None:
        state._vars[pending.name] = state._own_vars[pending.name] = pending
