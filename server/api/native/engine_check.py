"""Whether the engine really steps: either it has just completed a step, or it is made to.

A busy engine proves itself by its own steps; an idle one is asked to generate a token.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from ....errors import EngineError
from ....frontend.client.client import Connection
from ....frontend.protocol import ir, wire
from ...generation.service import Service

TIMEOUT_S = 5.0
RECENT_S = 5.0  # a step at most this long ago is proof enough
FRESH_S = 1.0  # how long a result is reused


class EngineCheck:
    """Simultaneous callers share one check of the engine. Used on one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._look: asyncio.Task[str | None] | None = None
        self._looked_s = -math.inf

    async def problem(self) -> str | None:
        """Why the engine does not work, or None; within TIMEOUT_S. Raises EngineError where there
        is no engine."""
        connection = self._service.engine.connection
        now = asyncio.get_running_loop().time()
        if self._look is None or (self._look.done() and now - self._looked_s > FRESH_S):
            self._look = asyncio.create_task(self._find_problem(connection))
        return await asyncio.shield(self._look)

    async def _find_problem(self, connection: Connection) -> str | None:
        try:
            await asyncio.wait_for(self._require_step(connection), TIMEOUT_S)
        except TimeoutError:
            return f"the engine has not completed a step within {TIMEOUT_S:g} s"
        except EngineError as error:
            return str(error)
        finally:
            self._looked_s = asyncio.get_running_loop().time()
        return None

    async def _require_step(self, connection: Connection) -> None:
        """Raises EngineError unless the engine steps."""
        vitals = await connection.acall("vitals", TIMEOUT_S)
        age_s = vitals["since_step_s"]
        is_proven = age_s is not None and age_s < RECENT_S
        if (
            not is_proven and self._service.drain_state.is_open
        ):  # while draining it accepts no programs
            await _generate_a_token(connection)


async def _generate_a_token(connection: Connection) -> None:
    """Run a program of one token. Raises EngineError."""
    token = _Token()
    program = connection.open_program(token, {"seed": 0, "instance": 0, "stream": False})
    try:
        connection.send_program(program, _PROGRAM)
        await token.wait()
    finally:
        connection.close_program(program)


_ONE_TOKEN = ir.GenParams(max_tokens=1, ignore_eos=True, temperature=0.0)
_PROGRAM = (ir.Text(0, 0, None, "."), ir.Gen(0, 1, None, "token", _ONE_TOKEN))


class _Token:
    """Waits for a program's only value."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_ended = asyncio.Event()
        self._failure: str | None = None

    async def wait(self) -> None:
        """Return once it has come. Raises EngineError."""
        await self._has_ended.wait()
        if self._failure is not None:
            raise EngineError(self._failure)

    # --- on the connection's I/O thread ---

    def handle_event(self, branch: int, seq: int, kind: str, payload: Any) -> None:
        if kind == wire.FAILED:
            self._end(str(payload["message"]))
        elif kind == wire.VALUE:
            self._end(None)

    def handle_disconnect(self, error: EngineError) -> None:
        self._end(str(error))

    def _end(self, failure: str | None) -> None:
        self._failure = self._failure or failure
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._has_ended.set)
