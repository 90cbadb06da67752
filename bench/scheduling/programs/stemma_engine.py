"""Scripts as programs of the DSL, on an engine's process."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....frontend.backend import Engine
from ....frontend.dsl.expr import tokens
from ....frontend.dsl.function import function
from ....frontend.dsl.generation import gen
from ....frontend.dsl.state import ProgramState
from .record import CallRecord, Counters
from .scripts import Script, Turn


class StemmaEngine:
    """Owns the engine's process; `options` are those of `Engine`."""

    def __init__(self, name: str, model: Path, options: Mapping[str, Any]) -> None:
        self.name = name
        self.num_host_tokens = int(options.get("host_kv_tokens", 0))
        self.engine = Engine(model, **options)

    def play(self, script: Script, origin_s: float) -> list[CallRecord]:
        calls: list[CallRecord] = []
        _program.run(script=script, origin_s=origin_s, calls=calls, backend=self.engine)
        return calls

    def counters(self) -> Counters:
        info = self.engine.get_server_info()
        stats = info["stats"]
        return Counters(
            stats["num_computed_tokens"], stats["num_preemptions"], info["cached_tokens"]
        )

    def close(self) -> None:
        self.engine.shutdown()


@function
def _program(s: ProgramState, script: Script, origin_s: float, calls: list[CallRecord]) -> None:
    history = array("i")
    for number, turn in enumerate(script.turns):
        if turn.pause_s:
            with s.pause(expected_s=turn.expected_s):
                time.sleep(turn.pause_s)
        sent_s = time.perf_counter() - origin_s
        made = _carry_out(s, turn, str(number))
        for part, meta in zip(turn.parts, made, strict=True):
            prompt = history + array("i", part)
            calls.append(_record(prompt, meta, sent_s))
        if len(made) == 1:
            history = calls[-1].prompt + calls[-1].output


def _carry_out(s: ProgramState, turn: Turn, name: str) -> list[dict[str, Any]]:
    """One call on the branch itself, or several on forks of it; returns the meta of each."""
    call = gen(name, max_tokens=turn.num_output, temperature=0, ignore_eos=True)
    if len(turn.parts) == 1:
        s += tokens(turn.parts[0])
        s += call
        return [s.get_meta_info(name)]
    forks = s.fork(len(turn.parts))
    forks += lambda index: tokens(turn.parts[index]) + call
    forks.join()
    return list(s.get_meta_info(name))


def _record(prompt: array[int], meta: Mapping[str, Any], sent_s: float) -> CallRecord:
    first_s = meta["time_to_first_token_s"]
    return CallRecord(
        prompt=prompt,
        output=array("i", meta["output_ids"]),
        num_cached=meta["cached_tokens"],
        sent_s=sent_s,
        ended_s=sent_s + meta["latency_s"],
        queue_s=meta["queue_s"],
        prefill_s=first_s - meta["queue_s"],
        decode_s=meta["latency_s"] - first_s,
    )
