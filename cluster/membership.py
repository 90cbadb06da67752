"""Who comes and goes: replicas are added, asked to leave, lost, and relieved of programs."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Mapping
from itertools import islice

from .fleet_view import FleetView
from .homes import Homes
from .known_prefixes import KnownPrefixes
from .placement.moves import FETCHED_SHARE, better_home, is_crowded
from .replica import Replica, ReplicaState
from .router_calls import RouterCalls
from .scaling import FleetLoad, Scaling

log = logging.getLogger(__name__)

MAX_CONSIDERED = 256  # programs of a replica that might be moved, in one look
LEAVE_S = 30.0  # that a replica which leaves gives the calls that run there


class Membership:
    """Owns the list of replicas, which others read as it changes."""

    def __init__(
        self,
        replicas: list[Replica],
        homes: Homes,
        prefixes: KnownPrefixes,
        calls: RouterCalls,
        view: FleetView,
        *,
        scaling: Scaling | None,
        tenant_weights: Mapping[Hashable, float],
    ) -> None:
        """`replicas`: empty, for `add`; `scaling`, `tenant_weights`: as of a `Router`."""
        self.is_starting = True  # own replicas that are lost then are their starter's to report
        self._replicas = replicas
        self._homes = homes
        self._prefixes = prefixes
        self._calls = calls
        self._view = view
        self._scaling = scaling
        self._tenant_weights = tenant_weights

    def add(self, replica: Replica) -> None:
        """One more, under a number that none of them has; it is started."""
        self._prefixes.add(replica.number)
        replica.adapters, replica.dropped = self._calls.adapters, self._calls.dropped
        replica.load.weights = self._tenant_weights
        self._replicas.append(replica)

    def look(self) -> None:
        """Now and then: who is stopped, who has too much, whether there are enough."""
        for replica in self._replicas:
            replica.is_paused = replica.is_stopped
            self._homes.recall_idle(replica)
            if replica.is_paused:
                self._calls.lose(replica, "its process is stopped")
        for replica in self._replicas:
            if replica.role == "prefill" and replica.programs and self._homes.takers():
                self._move_resting(replica)
        if self._homes.moves:
            self._rebalance()
        if self._scaling is not None:
            self._scale(self._scaling)

    def attend(self, replica: Replica) -> None:
        """Each turn, of each: one that leaves, and one that has left."""
        if replica.state is ReplicaState.LEAVING:
            self._drain(replica)
        if replica.state is ReplicaState.LOST and replica.leaves_for_good:
            self._replicas.remove(replica)
            self._prefixes.remove(replica.number)

    # --- as many as are wanted ------------------------------------------------------------------

    def _scale(self, scaling: Scaling) -> None:
        """Start another one, or have one leave, if that is wanted."""
        staying = [r for r in self._replicas if not r.leaves_for_good]
        num_waiting = sum(len(each.log.open_calls) for each in self._homes.homeless)
        running = next((r.info["max_running_requests"] for r in staying if r.info), None)
        if running is None:
            return
        load = FleetLoad(
            num_waiting + sum(each.num_calls for each in self._replicas),
            sum(each.load.held_tokens for each in self._replicas),
            scaling.target_calls or running / 2,
            max(each.total_tokens for each in staying),
        )
        num_wanted = scaling.scaler.decide(len(staying), load)
        for _ in range(num_wanted - len(staying)):
            taken = {each.number for each in self._replicas}
            number = next(n for n in range(len(taken) + 1) if n not in taken)
            log.info("replica %d is started: there is enough to do", number)
            self.add(scaling.hire(number))
        ready = [each for each in staying if each.state is ReplicaState.READY]
        ready.sort(key=lambda each: (each.load.held_tokens, each.expected_tokens, -each.number))
        for replica in ready[: max(0, len(staying) - num_wanted)]:
            log.info("replica %d is to leave: there is less to do", replica.number)
            self.retire(replica, for_good=True)

    def _rebalance(self) -> None:
        """Move programs that wait for no call from replicas that have too much to do or to hold."""
        ready = self._homes.takers()
        for here in ready:
            others = [each for each in ready if each is not here]
            if not is_crowded(here, others):
                continue
            share = FETCHED_SHARE if here.info.get("shares_kv") else 1.0
            resting = (each for each in list(here.programs.values()) if each.is_at_rest)
            for program in islice(resting, MAX_CONSIDERED):
                there = better_home(program.load, here, others, share)
                if there is not None:
                    self._homes.move(program, there)

    # --- those that end -------------------------------------------------------------------------

    def retire(self, replica: Replica, *, for_good: bool) -> None:
        """It is to leave, `for_good` or to be started anew. Its programs go on elsewhere, each once
        it waits for no call, and all after `LEAVE_S`."""
        is_serving = replica.is_serving
        replica.leave(time.monotonic() + LEAVE_S, for_good=for_good)
        if not is_serving:
            self.lose(replica, "it is to leave", is_asked=True)

    def _drain(self, replica: Replica) -> None:
        """Move what can be moved; end it once nothing is left, or its time has come."""
        if any(each.state is ReplicaState.READY for each in self._replicas):
            self._move_resting(replica)
        for part in list(replica.parts.values()):
            if not part.load.num_calls:
                self._homes.recall(part)
        if (replica.programs or replica.parts) and time.monotonic() < replica.leaves_at_s:
            return
        reason = "it has left" if replica.leaves_for_good else "it is being started anew"
        self.lose(replica, reason, is_asked=True)

    def _move_resting(self, replica: Replica) -> None:
        """Have programs that wait for no call go on elsewhere."""
        for program in list(replica.programs.values()):
            if program.is_at_rest:
                self._homes.move(program)

    def lose(self, replica: Replica, reason: str, *, is_asked: bool = False) -> None:
        """A replica has ended, or does not answer."""
        is_news = replica.is_serving or reason != replica.why_lost
        if is_news and not (self.is_starting and replica.is_own):
            log.warning("replica %d is lost: %s", replica.number, reason)
        self._view.lose(replica, is_asked=is_asked)
        self._prefixes.lose(replica.number)
        self._calls.lose(replica, reason)
        self._homes.lose(replica, reason, is_asked=is_asked)
