"""What clients ask beside programs: passed to one replica or to all, and answered once.

Counters are summed, caches flushed everywhere, adapters loaded everywhere; what concerns one engine
(its tree, what `watch` shows) is asked of the replica that the call names, else of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import EngineError, InvalidProgram, InvalidRequest, ProtocolError
from ..frontend.protocol import wire
from ..runtime.sessions.clients import Client, Clients
from .replica import Replica, ReplicaState, RoutedProgram

Merge = Callable[[list[tuple[int, Any]]], Any]  # of the results, with their replicas' numbers

MAX_CALL_BYTES = 2 * 1024 * 1024  # as engines take
MAX_ID_CHARS = 256
_OUTCOMES = (
    "rejected",
    "missing",
    "deferred",
    "clipped",
    "accepted",
)  # of hints, the best one last
# Of what several replicas say under one name, what is no sum.
_THE_FIRST = frozenset({"page_size", "bounds"})
_THE_LEAST = frozenset({"uptime_s", "since_step_s"})


@dataclass(slots=True, eq=False)
class _Pending:
    """A client's call, until all that were asked have answered."""

    client: Client[RoutedProgram]
    call_id: Any
    merge: Merge
    num_missing: int
    results: list[tuple[int, Any]] = field(default_factory=list)
    failure: dict[str, Any] | None = None


class RouterCalls:
    """Owns the calls that replicas have been asked and have not answered."""

    def __init__(self, replicas: Sequence[Replica], restart: Callable[[Replica], None]) -> None:
        """`restart`: starts a replica anew."""
        self._replicas = replicas
        self._restart = restart
        self.clients: Clients[Client[RoutedProgram]] | None = None
        self._asked: dict[int, tuple[_Pending, Replica]] = {}  # by the number of the question
        self._num_asked = 0
        self._one: dict[str, Callable[[], Replica]] = {
            "tokenize": self._least_loaded,
            "detokenize": self._least_loaded,
        }
        self._all: dict[str, Merge] = {
            "info": self._info,
            "metrics": self._summed,
            "vitals": self._summed,
            "flush_cache": lambda results: sum(int(result) for _, result in results),
            "kv_hints": _best_outcomes,
            "lora_adapters": _first,
            "load_lora_adapter": _first,
            "unload_lora_adapter": lambda results: _with_sums(results, ("num_requests",)),
            "lora_users": lambda results: _with_sums(results, ("num_requests",)),
        }
        self._named = ("tree", "watch")

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
            replicas, merge, args = self._whom(method, args)
        except (InvalidRequest, EngineError) as error:
            told = {"error": str(error), "kind": type(error).__name__}
            client.link.put("reply", id=call_id, ok=False, **told)
            return
        pending = _Pending(client, call_id, merge, len(replicas))
        for replica in replicas:
            self._num_asked += 1
            self._asked[self._num_asked] = pending, replica
            replica.outbox.queue("call", {"id": self._num_asked, "method": method, "args": args})

    def _whom(
        self, method: Any, args: dict[str, Any]
    ) -> tuple[list[Replica], Merge, dict[str, Any]]:
        ready = self._ready()
        if method in self._all:
            return ready, self._all[method], args
        if method in self._one:
            return [self._one[method]()], _first, args
        if method in self._named:
            chosen = _named(args.get("replica", ready[0].number), ready)
            return [chosen], _first, {name: v for name, v in args.items() if name != "replica"}
        known = sorted([*self._all, *self._one, *self._named, "restart_replica"])
        raise InvalidProgram.of("method", method, f"one of {known}")

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
            pending.results.append((replica.number, header.get("result")))
        else:
            pending.failure = {"error": header.get("error"), "kind": header.get("kind")}
        self._count(pending)

    def lose(self, replica: Replica, reason: str) -> None:
        """A replica will not answer any more: what it was asked is answered without it, if others
        were asked, too."""
        for number, (pending, asked) in list(self._asked.items()):
            if asked is replica:
                del self._asked[number]
                if pending.num_missing == 1 and not pending.results:
                    pending.failure = {"error": reason, "kind": "EngineError"}
                self._count(pending)

    def forget(self, client: Client[RoutedProgram]) -> None:
        """A client has gone."""
        for number, (pending, _) in list(self._asked.items()):
            if pending.client is client:
                del self._asked[number]

    def _count(self, pending: _Pending) -> None:
        pending.num_missing -= 1
        if pending.num_missing:
            return
        link = pending.client.link
        if pending.failure is not None:
            link.put("reply", id=pending.call_id, ok=False, **pending.failure)
            return
        pending.results.sort(key=lambda result: result[0])
        try:
            link.put("reply", id=pending.call_id, ok=True, result=pending.merge(pending.results))
        except Exception as error:  # too large together, or not alike
            told = {"error": f"{type(error).__name__}: {error}", "kind": "EngineError"}
            link.put("reply", id=pending.call_id, ok=False, **told)

    def _least_loaded(self) -> Replica:
        return min(self._ready(), key=lambda replica: replica.num_calls)

    def _ready(self) -> list[Replica]:
        """Raises EngineError where none is."""
        ready = [replica for replica in self._replicas if replica.is_serving]
        if not ready:
            raise EngineError("no replica is ready")
        return [replica for replica in ready if not replica.is_paused] or ready

    def _info(self, results: list[tuple[int, Any]]) -> Any:
        infos = dict(results)
        reports = [_report(replica, infos.get(replica.number)) for replica in self._replicas]
        return {**self._summed(results), "replicas": reports}

    def _summed(self, results: list[tuple[int, Any]]) -> Any:
        merged = _merged([result for _, result in results])
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


def _report(replica: Replica, info: dict[str, Any] | None) -> dict[str, Any]:
    """`info`: what it says of itself, where it does."""
    told = {
        "replica": replica.number,
        "state": replica.state.value,
        "num_starts": replica.num_starts,
        "num_programs": len(replica.programs),
    }
    if info is None:
        return told if replica.is_serving else {**told, "why": replica.why_lost}
    names = ("total_tokens", "free_tokens", "evictable_tokens", "num_running", "num_waiting")
    return told | {name: info.get(name) for name in names}


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


def _merged(values: list[Any]) -> Any:
    """Sums of numbers, place by place; what is no number is the first one's."""
    first = values[0]
    if isinstance(first, dict):
        return {
            name: _merged_field(name, [value[name] for value in values if name in value])
            for name in first
        }
    if isinstance(first, list) and all(
        isinstance(value, list) and len(value) == len(first) for value in values
    ):
        return [_merged(list(each)) for each in zip(*values, strict=True)]
    if isinstance(first, bool) or not all(isinstance(value, int | float) for value in values):
        return first
    return sum(values)


def _merged_field(name: str, values: list[Any]) -> Any:
    if name in _THE_FIRST:
        return values[0]
    numbers = [value for value in values if isinstance(value, int | float)]
    return min(numbers) if name in _THE_LEAST and numbers else _merged(values)
