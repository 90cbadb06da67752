"""Where programs run: each on one replica, its home, but for branches elsewhere (`parts.py`).

A program gets its home with its first ops, and another one when it is moved or its home is lost;
between two homes, or while no replica is ready, it is homeless.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ..errors import EngineError, InvalidProgram
from ..frontend.protocol import wire
from ..frontend.protocol.program_log import MAX_LOST
from .fleet_view import FleetView
from .known_prefixes import KnownPrefixes
from .parts import Parts
from .placement.load import BYTES_PER_TOKEN
from .placement.policies import DEFAULT_PLACEMENT, Newcomer, policy_of
from .placement.spread import Spread
from .replica import Part, Replica, ReplicaState, RoutedProgram

log = logging.getLogger(__name__)

PATIENCE_S = 60.0  # that programs wait for a replica while none is ready
_STOPPING = "the cluster is being stopped: it takes no new programs"


class Homes:
    """Owns who is homeless; what a replica carries out is the replica's own table."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        prefixes: KnownPrefixes,
        view: FleetView,
        *,
        placement: str,
        spread: Spread,
    ) -> None:
        """`replicas`: all that there are, as they change; `placement`, `spread`: as of a
        `Router`."""
        self.moves = placement == DEFAULT_PLACEMENT  # programs, and branches of wide forks
        self.is_draining = False  # no new program is taken
        self.homeless: dict[RoutedProgram, None] = {}
        self.parts = Parts(
            spread,
            lambda: self.takers() if self.moves else [],
            lambda program: prefixes.match(program, program.opening.text),
        )
        self._replicas = replicas
        self._prefixes = prefixes
        self._view = view
        self._policy = policy_of(placement)
        self._ready_at_s = time.monotonic()  # when a replica was ready, last

    # --- a home ---------------------------------------------------------------------------------

    def place(self, program: RoutedProgram) -> None:
        """Have it run on a replica from where it is: at first, or after one was lost. Raises
        EngineError where no new one is taken, InvalidProgram if it cannot be sent."""
        if self.is_draining and not program.number_there:
            raise EngineError(_STOPPING)
        candidates = self._candidates()
        if not candidates:
            self.homeless[program] = None
            return
        newcomer = self._newcomer(program)
        replica = self._policy(newcomer, candidates)
        assert isinstance(replica, Replica)
        self._settle(program, newcomer, replica)

    def _newcomer(self, program: RoutedProgram) -> Newcomer:
        """What is known of it to place it. What it has said counts with its first prompt."""
        text, load = program.opening.text, program.load
        if not load.num_ended:
            load.max_tokens = program.opening.max_tokens
        return Newcomer(
            max(len(text) / BYTES_PER_TOKEN, load.held_tokens),
            self._prefixes.match(program, text),
            program.create.get("history") or None,
            text,
            load.output_tokens * load.habits.num_calls,
            load.tenant,
        )

    def _settle(self, program: RoutedProgram, newcomer: Newcomer, replica: Replica) -> None:
        """Run it there, from where it is. Raises InvalidProgram if it cannot be sent."""
        self.homeless.pop(program, None)
        replica.open(program)
        self._prefixes.send(program, newcomer, replica.number)
        self._view.place(program, replica)
        missing = newcomer.num_tokens - newcomer.cached.get(replica.number, 0.0)
        program.load.enter(replica.load, max(0.0, missing))
        self.parts.send(program, program.log.ops)
        if program.log.ends_gens:
            replica.outbox.queue("cancel", {"program": program.number_there, "keep": True})

    def takers(self) -> list[Replica]:
        """Those that may be given more."""
        ready = [r for r in self._replicas if r.state is ReplicaState.READY and not r.is_paused]
        return [each for each in ready if each.role != "prefill"]

    def _candidates(self) -> list[Replica]:
        """Those, or whoever is there where nobody is ready: one that computes prompts for others
        last of all, though it can do the same as any."""
        serving = [each for each in self._replicas if each.is_serving]
        serving = [each for each in serving if each.role != "prefill"] or serving
        ready = [each for each in serving if each.state is ReplicaState.READY] or serving
        return [each for each in ready if not each.is_paused] or ready

    # --- another one ----------------------------------------------------------------------------

    def move(self, program: RoutedProgram, there: Replica | None = None) -> None:
        """Have a program that waits for no call go on elsewhere; None: where the policy says."""
        assert program.replica is not None, "it is nowhere"
        self.leave(program)
        self._view.move(program.replica)
        program.replica.release(program)
        program.log.lose(is_asked=True)
        self.homeless[program] = None
        if there is not None:
            try:
                self._settle(program, self._newcomer(program), there)
            except Exception as error:  # it cannot be sent, or is a bug: of one program
                self.reject(program, _as_failure(error))

    def lose(self, replica: Replica, reason: str, *, is_asked: bool) -> None:
        """A replica has ended: what it carried out goes on elsewhere, branches of programs that
        live on others at their homes."""
        for program in list(replica.programs.values()):
            self.leave(program)
        parts = [part for part in replica.parts.values() if part.replica is not None]
        for program in replica.lose(reason, is_asked=is_asked):
            program.log.lose(is_asked=is_asked)
            if program.log.is_cancelled:
                self.dismiss(program)
            elif not self._has_lost_too_many(program, reason):
                self.homeless[program] = None
        waited = [part.program for part in parts if self.recall(part)]
        for program in dict.fromkeys(waited):
            program.log.num_lost += not is_asked
            self._has_lost_too_many(program, reason)

    def recall(self, part: Part) -> bool:
        """Have its branches go on at home; whether one waited for a call."""
        try:
            return self.parts.recall(part)
        except Exception as error:  # it cannot be sent, or is a bug: of one program
            log.exception("a part of a program could not be recalled")
            self.reject(part.program, _as_failure(error))
            return False

    def recall_idle(self, replica: Replica) -> None:
        """Now and then, of the programs at home there: see `Parts.note_idle`."""
        for program in [each for each in replica.programs.values() if each.parts]:
            try:
                self.parts.note_idle(program)
            except Exception as error:  # a bug must end one program, not the router
                log.exception("parts of a program could not be recalled")
                self.reject(program, _as_failure(error))

    def _has_lost_too_many(self, program: RoutedProgram, reason: str) -> bool:
        """Then it counts as the cause, and is refused."""
        if program.log.num_lost < MAX_LOST:
            return False
        ended = f"{program.log.num_lost} engines in a row have ended with this program"
        self.reject(program, EngineError(f"{ended}, the last one: {reason}"))
        return True

    def rehouse(self) -> None:
        """Have homeless programs go on, once a replica can take them."""
        now_s = time.monotonic()
        if self._candidates():
            self._ready_at_s = now_s
        elif now_s - self._ready_at_s < PATIENCE_S:
            return
        homeless, self.homeless = self.homeless, {}
        for program in homeless:
            try:
                if self._ready_at_s != now_s:
                    reasons = "; ".join(f"replica {r.number}: {r.why_lost}" for r in self._replicas)
                    raise EngineError(f"no replica is ready ({reasons})")
                self.place(program)
            except (EngineError, InvalidProgram) as error:
                self.reject(program, error)
            except Exception as error:  # a bug must end one program, not the router
                log.exception("a program could not be placed again")
                self.reject(program, _as_failure(error))

    # --- the end --------------------------------------------------------------------------------

    def leave(self, program: RoutedProgram) -> None:
        """Nothing of it is on its way to its home, or elsewhere, any more."""
        self._prefixes.arrive(program)
        self.parts.forget(program)

    def close(self, program: RoutedProgram) -> None:
        """End it wherever it is."""
        self.leave(program)
        self.homeless.pop(program, None)
        if program.replica is not None:
            program.replica.close_program(program)

    def dismiss(self, program: RoutedProgram) -> None:
        """One that is nowhere was cancelled."""
        self.homeless.pop(program, None)
        program.client.remove(program.number)
        program.client.events.append(program.number, 0, 0, wire.DONE, program.log.done({}))

    def reject(self, program: RoutedProgram, error: EngineError | InvalidProgram) -> None:
        """End one that cannot be carried out at all."""
        failure = {"message": str(error), "kind": type(error).__name__, "op": "program"}
        self.close(program)
        if program.client.programs.get(program.number) is program:
            program.client.remove(program.number)
        events = program.client.events
        events.append(program.number, 0, 0, wire.FAILED, failure)
        used = {"num_requests": 0, "prompt_tokens": 0, "completion_tokens": 0}
        events.append(program.number, 0, 0, wire.DONE, used)


def _as_failure(error: Exception) -> EngineError:
    return EngineError(f"{type(error).__name__}: {error}")
