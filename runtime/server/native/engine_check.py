"""Whether the engine really steps: one has just succeeded, or one can be made to.

An engine that is busy proves itself by its own steps; an idle one is asked for a token.
"""

from __future__ import annotations

import asyncio
import math

from ....errors import EngineError
from ....frontend.client import Connection
from ....frontend.ir import GenParams
from ..generation.completion import Completion
from ..generation.pieces import GenerationFailed
from ..service import Service

TIMEOUT_S = 5.0
RECENT_S = 5.0  # a step that succeeded so long ago at most is proof enough
FRESH_S = 1.0  # an answer is given again for so long


class EngineCheck:
    """Simultaneous callers share one look at the engine. Used on one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._look: asyncio.Task[str | None] | None = None
        self._looked_s = -math.inf

    async def problem(self) -> str | None:
        """Why the engine does not work, None where it does; within TIMEOUT_S. Raises EngineError
        where there is none."""
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
        except (EngineError, GenerationFailed) as error:
            return str(error)
        finally:
            self._looked_s = asyncio.get_running_loop().time()
        return None

    async def _require_step(self, connection: Connection) -> None:
        """Raises EngineError or GenerationFailed."""
        vitals = await asyncio.to_thread(connection.call, "vitals", TIMEOUT_S)
        age_s = vitals["since_step_s"]
        is_proven = age_s is not None and age_s < RECENT_S
        if not is_proven and self._service.intake.is_open:  # while draining it takes no programs
            await _generate_a_token(connection)


async def _generate_a_token(connection: Connection) -> None:
    params = GenParams(max_tokens=1, ignore_eos=True, temperature=0.0)
    with Completion(connection, ".", params, seed=0) as completion:
        async for _ in completion.pieces():
            pass
