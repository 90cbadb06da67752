"""`python -m stemma.bench.cluster.scripted_engine`: a stand-in for an engine, answers at once.

It speaks the engine's side of the protocol over real sockets: a call that streams gets a token a
turn of the loop, as from a decode step, any other one its whole value. Whoever follows the cache is
told of a node for each program, which grows with its texts and tokens, and of the oldest ones' end.
It knows no model: each token is `TOKEN`, and texts count a token for each 4 bytes. It reads what a
router sends: programs of one branch of texts, roles and gens.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import zmq

from ...frontend.protocol import wire
from ...runtime.sessions.clients import Client, ClientProgram
from ...runtime.sessions.host import SessionHost

TOKEN = " word"
MAX_CACHED = 512  # programs that are kept
COSTS = {"prompt_token_s": 1e-4, "total_tokens": 1_000_000}


@dataclass(slots=True, eq=False)
class _Program(ClientProgram):
    number: int
    streams: bool
    num_chars: int = 0  # of its texts
    fresh: list[str] = field(default_factory=list)  # texts that the cache does not have
    node: int = 0  # its own in the cache; 0: none yet
    gens: deque[tuple[int, int]] = field(default_factory=deque)  # seq, max_tokens
    num_tokens: int = 0  # of the first of them
    num_calls: int = 0
    has_ended: bool = False


_Client = Client[_Program]


class ScriptedEngine:
    """The taker of a `SessionHost`, and its loop."""

    def __init__(self, endpoint: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._host: SessionHost[_Client] = SessionHost(self, _Client, [endpoint], context=context)
        self._follower: _Client | None = None
        self._changes: list[list[Any]] = []
        self._cached: deque[int] = deque()
        self._num_nodes = 0
        self._busy: dict[_Program, _Client] = {}  # have gens

    def run(self, stop_fd: int) -> None:
        """Until `stop_fd` is readable: its owner has gone, or wants no more."""
        poller = zmq.Poller()
        poller.register(self._host.socket, zmq.POLLIN)
        poller.register(stop_fd, zmq.POLLIN)
        while stop_fd not in (ready := dict(poller.poll(0 if self._busy else 250))):
            if self._host.socket in ready:
                self._host.receive()
            self._host.sweep()
            for program, client in list(self._busy.items()):
                self._step(client, program)
            self._tell_of_cache()
            self._host.send_events()
        self._host.close()

    # --- as of a `Taker` --------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What a router and a client ask of a model."""
        return {"model": "scripted", "max_running_requests": 128, "max_model_len": 1_000_000}

    def take(self, client: _Client, message: wire.Message) -> None:
        """Programs, and who follows the cache; any other call is answered with nothing."""
        header = message.header
        if message.op == "ops":
            for item in header["programs"]:
                self._take_program(client, item)
        elif message.op == "call":
            client.link.put("reply", id=header["id"], ok=True, result={})
            if header["method"] == "follow_cache":
                self._follower = client
                client.link.put("cache", changes=[{"costs": COSTS, "reset": True}])

    def forget(self, client: _Client) -> None:
        """Its programs end with it."""
        self._follower = None if self._follower is client else self._follower
        for program in client.programs.values():
            self._busy.pop(program, None)

    def _take_program(self, client: _Client, item: dict[str, Any]) -> None:
        number = item["program"]
        program = client.programs.get(number)
        if program is None:
            program = _Program(number, streams=bool(item["create"].get("stream")))
            client.programs[number] = program
        for op in item["ops"]:
            kind, branch, seq = op[:3]
            if kind == "text":
                self._append(program, op[4])
            elif kind == "chat":
                text = "".join(f"<{m[0]}>{m[1]}\n" for m in op[4]) + "<assistant>"
                self._append(program, text)
                client.events.append(number, branch, seq, wire.MARK, {"text": text})
            elif kind in ("role_begin", "role_end"):
                text = f"<{op[4]}>" if kind == "role_begin" else "\n"
                self._append(program, text)
                client.events.append(number, branch, seq, wire.MARK, {"text": text})
            elif kind == "gen":
                program.gens.append((seq, op[5]["max_tokens"]))
        program.has_ended |= bool(item.get("end"))
        self._busy[program] = client

    # --- steps ------------------------------------------------------------------------------------

    def _step(self, client: _Client, program: _Program) -> None:
        """The first of its gens gets a token, or all of them."""
        number = program.number
        if program.gens:
            seq, max_tokens = program.gens[0]
            num_new = 1 if program.streams else max_tokens
            self._append(program, TOKEN * num_new)
            self._cache(program)
            if program.streams:
                delta: dict[str, Any] = {"text": TOKEN, "token_ids": [1]}
                if not program.num_tokens:
                    delta |= {"prompt_tokens": program.num_chars // 4, "cached_tokens": 0}
                client.events.append(number, 0, seq, wire.DELTA, delta)
            program.num_tokens += num_new
            if program.num_tokens >= max_tokens:
                value = _value(program.num_chars // 4, max_tokens)
                client.events.append(number, 0, seq, wire.VALUE, value)
                program.gens.popleft()
                program.num_tokens = 0
                program.num_calls += 1
        if program.gens:
            return
        del self._busy[program]
        if program.has_ended:
            used = {"num_requests": program.num_calls, "prompt_tokens": 0, "completion_tokens": 0}
            client.events.append(number, 0, 0, wire.DONE, used)
            client.remove(number)

    def _append(self, program: _Program, text: str) -> None:
        program.fresh.append(text)
        program.num_chars += len(text)

    def _cache(self, program: _Program) -> None:
        """What a program has come to is cached."""
        text = "".join(program.fresh).encode().decode("latin-1")
        program.fresh.clear()
        if program.node:
            self._changes.append(["grown", program.node, 0, None, text, len(text) // 4])
            return
        self._num_nodes += 1
        program.node = self._num_nodes
        self._changes.append(["grown", program.node, 0, "", text, len(text) // 4])
        self._cached.append(program.node)
        if len(self._cached) > MAX_CACHED:
            self._changes.append(["gone", self._cached.popleft(), 0, None, "", 0])

    def _tell_of_cache(self) -> None:
        changes, self._changes = self._changes, []
        if changes and self._follower is not None:
            self._follower.link.put("cache", changes=[{"costs": COSTS}, *changes])


def _value(prompt_tokens: int, max_tokens: int) -> dict[str, Any]:
    """As large as a gen's."""
    text, ids = TOKEN * max_tokens, [1] * max_tokens
    meta: dict[str, Any] = {
        "id": 1, "prompt_tokens": prompt_tokens, "cached_tokens": 0, "host_tokens": 0,
        "disk_tokens": 0, "completion_tokens": max_tokens, "forced_tokens": 0, "drafted_tokens": 0,
        "accepted_tokens": 0, "preemptions": 0, "start_s": 0.001, "queue_s": 0.001,
        "prefill_s": 0.01, "decode_s": 0.1, "time_to_first_token_s": 0.011, "latency_s": 0.111,
        "finish_reason": "length", "output_ids": ids,
    }  # fmt: skip
    return {"value": text, "text": text, "meta": meta, "kept": {"ids": ids, "text": text}}


def main() -> int:
    """Serve at an address until standard input closes."""
    parser = argparse.ArgumentParser(prog="python -m stemma.bench.cluster.scripted_engine")
    parser.add_argument("--endpoint", required=True)
    engine = ScriptedEngine(parser.parse_args().endpoint, zmq.Context.instance())
    engine.run(sys.stdin.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
