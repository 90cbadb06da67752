"""What clients ask beside programs: passed to one replica or to all, and answered once.

Counters are summed, caches flushed everywhere, adapters loaded everywhere; what `watch` shows, and
one engine's tree, is asked of the replica that the call names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson

from ..errors import EngineError, InvalidProgram, InvalidRequest, ProtocolError
from ..frontend.protocol import wire
from ..runtime.config import ROLES
from ..runtime.sessions.clients import Client, Clients
from .counters import summed, with_counts
from .fleet_view import FleetView
from .replica import Replica, ReplicaState, RoutedProgram

Merge = Callable[[list[tuple[int, Any]]], Any]  # of the results, with their replicas' numbers

MAX_CALL_BYTES = 2 * 1024 * 1024  # as engines take
MAX_ID_CHARS = 256
_OFTEN = {"has_experts": False}  # of `info`, where it is asked for again and again
_OUTCOMES = (
    "rejected",
    "missing",
    "deferred",
    "clipped",
    "accepted",
)  # of hints, the best one last


@dataclass(slots=True, eq=False)
class _Pending:
    """A client's call, until all that were asked have answered."""

    client: Client[RoutedProgram]
    call_id: Any
    merge: Merge
    num_missing: int
    needs_one: bool  # it cannot be answered where nobody has
    note: Callable[[bool], object]  # whether all have done it, once that is known
    results: list[tuple[int, Any]] = field(default_factory=list)
    failure: dict[str, Any] | None = None


class RouterCalls:
    """Owns the calls that replicas have been asked and have not answered."""

    def __init__(
        self, replicas: Sequence[Replica], restart: Callable[[Replica], None], view: FleetView
    ) -> None:
        """`restart`: starts a replica anew; `view`: what there is to show of all."""
        self._replicas = replicas
        self._view = view
        self._restart = restart
        self.adapters: dict[str, dict[str, Any]] = {}  # loaded at run time: how, by name
        self.dropped: set[str] = set()  # unloaded at run time, of those that engines start with
        self.clients: Clients[Client[RoutedProgram]] | None = None
        self._asked: dict[int, tuple[_Pending, Replica]] = {}  # by the number of the question
        self._num_asked = 0
        self._one: dict[str, Callable[[], Replica]] = {
            "tokenize": self._least_loaded,
            "detokenize": self._least_loaded,
        }
        self._all: dict[str, Merge] = {
            "info": self._info,
            "metrics": self._info,
            "vitals": self._summed,
            "flush_cache": lambda results: sum(int(result) for _, result in results),
            "kv_hints": _best_outcomes,
            "lora_adapters": _first,
            "load_lora_adapter": _first,
            "unload_lora_adapter": lambda results: _with_sums(results, ("num_requests",)),
            "lora_users": lambda results: _with_sums(results, ("num_requests",)),
        }
        self._named: dict[str, Merge] = {"tree": _first, "watch": self._watched}  # by number

    @property
    def model(self) -> dict[str, Any]:
        """What a replica says of the model."""
        known = next((replica.info for replica in self._replicas if replica.info), {})
        return {**known, "num_replicas": len(self._replicas)}

    def take(self, client: Client[RoutedProgram], message: wire.Message) -> None:
        """Ask whom a client's call concerns. Raises ProtocolError for one that is too large, or has
        an id that none may have."""
        header = message.header
        call_id, method = header.get("id"), str(header.get("method"))
        if message.num_bytes > MAX_CALL_BYTES:
            raise ProtocolError(f"a call of {message.num_bytes} bytes; at most {MAX_CALL_BYTES}")
        if not isinstance(call_id, int | str) or len(str(call_id)) > MAX_ID_CHARS:
            raise ProtocolError(
                f"id={call_id!r:.200} is not allowed; allowed: an integer or a name"
            )
        args = header["args"] if isinstance(header.get("args"), dict) else {}
        try:
            if method == "restart_replica":
                client.link.put("reply", id=call_id, ok=True, result=self._started_anew(args))
                return
            replicas, merge, method, args = self._whom(method, args)
            encoded = orjson.Fragment(wire.encode_part("args", args))  # now: it is the client's
        except (InvalidRequest, EngineError) as error:
            told = {"error": str(error), "kind": type(error).__name__}
            client.link.put("reply", id=call_id, ok=False, **told)
            return
        note = partial(self._end_change, method, args, self._begin_change(method, args, replicas))
        pending = _Pending(client, call_id, merge, len(replicas), merge != self._fleet, note)
        if not replicas:
            self._answer(pending)
        for replica in replicas:
            self._num_asked += 1
            self._asked[self._num_asked] = pending, replica
            asked = {"id": self._num_asked, "method": method, "args": encoded}
            replica.outbox.queue("call", asked)

    def _whom(
        self, method: str, args: dict[str, Any]
    ) -> tuple[list[Replica], Merge, str, dict[str, Any]]:
        """Who is asked what, and what becomes of the answers."""
        if method == "fleet":
            serving = [each for each in self._replicas if each.is_serving and not each.is_paused]
            return serving if args.get("asks", True) else [], self._fleet, "info", _OFTEN
        if method in self._named and args.get("replica") is not None:
            given = {name: value for name, value in args.items() if name != "replica"}
            return [self._serving(args["replica"])], self._named[method], method, given
        ready = self._ready()
        if method in self._all:
            return ready, self._all[method], method, args
        if method in self._one:
            return [self._one[method]()], _first, method, args
        if method == "set_role":
            return self._whose_role(args)
        if method == "tree":
            return ready, partial(self._tree, self._view.tree(**args)), "info", _OFTEN
        if method == "watch":
            return ready[:1], self._watched, method, args
        known = sorted(
            [*self._all, *self._one, *self._named, "fleet", "restart_replica", "set_role"]
        )
        raise InvalidProgram.of("method", method, f"one of {known}")

    def _whose_role(self, args: dict[str, Any]) -> tuple[list[Replica], Merge, str, dict[str, Any]]:
        """The replica that is to have another role. Programs that run on one which is to compute
        prompts for others go on elsewhere once they wait for no call."""
        replica, role = self._serving(args.get("replica")), args.get("role")
        if replica.role is None:
            reason = "they were started without prefill_replicas"
            raise InvalidRequest(f"role={role!r} has no effect: {reason}", "role")
        if role not in ROLES:
            raise InvalidRequest.of("role", role, f"one of {', '.join(ROLES)}")
        others = [each for each in self._ready() if each is not replica and each.role != "prefill"]
        if role == "prefill" and not others:
            raise InvalidRequest.of("role", role, "another one: no other replica runs programs")

        def is_set(_: list[tuple[int, Any]]) -> dict[str, Any]:
            replica.role = role
            return {"replica": replica.number, "role": role}

        return [replica], is_set, "set_role", {"role": role}

    def _started_anew(self, args: dict[str, Any]) -> dict[str, Any]:
        """One at a time, so that there is another one for its programs."""
        replica = _named(args.get("replica"), self._replicas)
        if not replica.is_own:
            allowed = "none: these engines are started anew where they run, one after the other"
            raise InvalidRequest.of("replica", replica.number, allowed)
        others = [each for each in self._replicas if each is not replica]
        unready = [each.number for each in others if each.state is not ReplicaState.READY]
        if unready:
            raise EngineError(f"replica {unready[0]} is not ready; try again when it is")
        num_programs = len(replica.programs)
        self._restart(replica)
        return {"replica": replica.number, "num_moved_programs": num_programs}

    def take_reply(self, replica: Replica, header: dict[str, Any]) -> None:
        """A replica has answered."""
        asked = self._asked.pop(header.get("id", -1), None)
        if asked is None:
            return
        pending, _ = asked
        if header.get("ok"):
            result = header.get("result")
            if isinstance(result, dict) and "stats" in result:
                self._view.note(replica, result)  # as it comes: others of the same call may be late
            pending.results.append((replica.number, result))
        else:
            pending.failure = {"error": header.get("error"), "kind": header.get("kind")}
        self._count(pending)

    def lose(self, replica: Replica, reason: str) -> None:
        """A replica will not answer any more: what it was asked is answered without it, if others
        were asked, too."""
        for number, (pending, asked) in list(self._asked.items()):
            if asked is replica:
                del self._asked[number]
                if pending.needs_one and pending.num_missing == 1 and not pending.results:
                    pending.failure = {"error": reason, "kind": "EngineError"}
                self._count(pending)

    def _count(self, pending: _Pending) -> None:
        pending.num_missing -= 1
        if not pending.num_missing:
            self._answer(pending)

    def _answer(self, pending: _Pending) -> None:
        link = pending.client.link  # which takes what it is told also when its client has gone
        pending.note(pending.failure is None)
        if pending.failure is not None:
            link.put("reply", id=pending.call_id, ok=False, **pending.failure)
            return
        pending.results.sort(key=lambda result: result[0])
        try:
            link.put("reply", id=pending.call_id, ok=True, result=pending.merge(pending.results))
        except Exception as error:  # too large together, or not alike
            told = {"error": f"{type(error).__name__}: {error}", "kind": "EngineError"}
            link.put("reply", id=pending.call_id, ok=False, **told)

    def _begin_change(
        self, method: str, args: dict[str, Any], asked: Sequence[Replica]
    ) -> Sequence[Replica]:
        """Replicas that are not asked, as they start or are stopped, are to have the same
        adapters; returns those that will have dropped one that they started with."""
        name = str(args.get("lora_name"))
        if method == "load_lora_adapter" and name not in self.adapters:
            self.adapters[name] = args
            for replica in asked:
                replica.told_adapters[name] = args
        elif method == "unload_lora_adapter" and self.adapters.pop(name, None) is not None:
            for replica in asked:
                replica.told_adapters.pop(name, None)
        else:
            return asked if method == "unload_lora_adapter" else ()
        self._have_all_follow()
        return ()

    def _end_change(
        self, method: str, args: dict[str, Any], droppers: Sequence[Replica], is_done: bool
    ) -> None:
        """An adapter that one of those asked cannot have, none is to have."""
        name = str(args.get("lora_name"))
        if method == "unload_lora_adapter" and is_done and droppers:
            self.dropped.add(name)
            for replica in droppers:
                replica.told_dropped.add(name)
        elif method == "load_lora_adapter" and is_done:
            self.adapters.setdefault(name, args)
        elif self.adapters.get(name) is args:
            del self.adapters[name]
        else:
            return
        self._have_all_follow()

    def _have_all_follow(self) -> None:
        for replica in self._replicas:
            replica.is_behind = True

    def _least_loaded(self) -> Replica:
        return min(self._ready(), key=lambda replica: replica.num_calls)

    def _ready(self) -> list[Replica]:
        """Raises EngineError where none is."""
        ready = [replica for replica in self._replicas if replica.is_serving]
        if not ready:
            raise EngineError("no replica is ready")
        return [replica for replica in ready if not replica.is_paused] or ready

    def _serving(self, number: Any) -> Replica:
        """The one that a call names. Raises InvalidRequest where there is none, and EngineError
        where it cannot be asked now."""
        replica = _named(number, self._replicas)
        if not replica.is_serving or replica.is_paused:
            why = "its process is stopped" if replica.is_serving else replica.why_lost
            raise EngineError(f"replica {number} is not ready: {why}")
        return replica

    def _info(self, results: list[tuple[int, Any]]) -> Any:
        told = with_counts(self._summed(results), self._view.counts())
        told.pop("run", None)  # each has its own
        return {**told, "replicas": self._view.reports(dict(results))}

    def _fleet(self, results: list[tuple[int, Any]]) -> Any:
        return {"replicas": self._view.reports(dict(results))}

    def _tree(self, tree: dict[str, Any], results: list[tuple[int, Any]]) -> Any:
        return {**self._info(results), **tree}

    def _watched(self, results: list[tuple[int, Any]]) -> Any:
        number, watched = results[0]
        return {**watched, "replica": number}

    def _summed(self, results: list[tuple[int, Any]]) -> Any:
        merged = summed([result for _, result in results])
        if isinstance(merged, dict):  # what is the model's is no sum
            merged |= {name: self.model[name] for name in self.model if name in merged}
        if self.clients is not None and isinstance(merged, dict):
            for name, value in (
                ("num_clients", len(self.clients)),
                ("num_programs", self.clients.num_programs),
            ):
                if name in merged:
                    merged[name] = value
        return merged


def _named(number: Any, replicas: Sequence[Replica]) -> Replica:
    """Raises InvalidRequest where there is no such replica."""
    for replica in replicas:
        if replica.number == number and type(number) is int:
            return replica
    raise InvalidRequest.of("replica", number, f"one of {[each.number for each in replicas]}")


def _first(results: list[tuple[int, Any]]) -> Any:
    return results[0][1]


def _with_sums(results: list[tuple[int, Any]], names: Sequence[str]) -> Any:
    first = dict(results[0][1])
    return {**first, **{name: sum(result[name] for _, result in results) for name in names}}


def _best_outcomes(results: list[tuple[int, Any]]) -> Any:
    """Of each action the best outcome: a prefix is where it is."""
    merged = results[0][1]
    for _, result in results[1:]:
        merged = [max(pair, key=_rank) for pair in zip(merged, result, strict=True)]
    return merged


def _rank(outcome: Any) -> int:
    named = outcome.get("outcome") if isinstance(outcome, dict) else None
    return _OUTCOMES.index(named) if named in _OUTCOMES else -1
