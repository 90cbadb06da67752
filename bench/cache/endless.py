"""A chat that does not end: how well a model goes on with what a stream keeps of it.

The questions and answers of extractions follow each other as turns of one chat, shuffled again
whenever all have been told, in a pool of three times what is kept. Answers are not generated but
scored, so that the text is the same however it is kept: their loss, in nats a token over each so
many tokens of the chat, is flat if nothing is missed of what was dropped. The same chat with all KV
ends where the context does.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from ...errors import ProgramError
from ...frontend.backend import Engine
from ...frontend.dsl.expr import assistant, user
from ...frontend.dsl.function import function
from ...frontend.dsl.generation import select
from ...frontend.dsl.state import ProgramState
from ...frontend.protocol.kv_policy import KVPolicy
from ..harness.process_meter import ProcessMeter


@dataclass(slots=True)
class _Told:
    """What was told of a chat, and how likely the model found the answers."""

    num_tokens: int = 0
    num_dropped: int = 0
    answers: list[tuple[int, float, int]] = field(default_factory=list)  # end, nats, tokens
    ended_by: str = ""

    def loss(self, first: int, end: int) -> dict[str, Any]:
        """Of the answers that end within [first + 1, end]."""
        inside = [each for each in self.answers if first < each[0] <= end]
        num_answered = sum(num_tokens for _, _, num_tokens in inside)
        nats = sum(loss for _, loss, _ in inside)
        each_nats = round(nats / num_answered, 3) if num_answered else ""
        return {"answered": num_answered, "nats_a_token": each_nats}


def stream_rows(
    model: Sequence[str], policy: KVPolicy | None, num_tokens: int, num_windows: int = 10
) -> list[dict[str, Any]]:
    """A chat of so many tokens, under a streaming policy, or (None) with all KV: a row for each
    part of it."""
    pool_tokens = 8192 if policy is None else 3 * int(policy.keep)
    name = None if policy is None else str(policy)
    told = _Told()
    with (
        Engine(*model, max_total_tokens=pool_tokens, kv_policy=name, speculate="off") as engine,
        ProcessMeter(engine.pid) as meter,
    ):
        began = time.perf_counter()
        chat.run(told, num_tokens, backend=engine)
        wall_s = time.perf_counter() - began
    size = max(1, num_tokens // num_windows)
    parts = [(first, first + size) for first in range(0, num_tokens, size)]
    rows = [
        {"policy": name or "none", "pool_tokens": pool_tokens, "tokens": f"{first} to {end}",
         **told.loss(first, end), "dropped": "", "wall_s": "", "cpu_s": "", "ended_by": ""}
        for first, end in parts if first < told.num_tokens
    ]  # fmt: skip
    total = {"tokens": f"{told.num_tokens} in all", "dropped": told.num_dropped,
             "wall_s": round(wall_s), "cpu_s": round(meter.cpu_s), "ended_by": told.ended_by,
             **told.loss(0, told.num_tokens)}  # fmt: skip
    return [*rows, {**rows[-1], **total}]


def _turns(seed: int = 7) -> Iterator[tuple[str, str]]:
    """Questions and answers without end."""
    path = files(__package__).joinpath("../speculation/data/extractions.json")
    told = json.loads(path.read_text())
    rng = random.Random(seed)
    while True:
        rng.shuffle(told)
        for each in told:
            yield each["user"][0], each["answers"][0]


@function
def chat(s: ProgramState, told: _Told, num_tokens: int) -> None:
    """So many tokens of it; it ends earlier where a turn is refused."""
    for index, (question, answer) in enumerate(_turns()):
        s += user(question)
        s += assistant(select(f"answer{index}", [answer]))
        try:
            meta = s.get_meta_info(f"answer{index}")
        except ProgramError as error:
            told.ended_by = str(error).partition(" maximum")[0].partition(": ")[2]
            return
        logprobs = meta["choice_token_logprobs"][0]
        told.num_tokens = meta["prompt_tokens"] + len(logprobs)
        told.num_dropped = meta.get("dropped_tokens", 0)
        told.answers.append((told.num_tokens, -sum(logprobs), len(logprobs)))
        if told.num_tokens >= num_tokens:
            return
