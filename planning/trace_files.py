"""Traces of what was asked of a service: programs with the sizes of their texts, never the texts.

Read from four formats, told apart by their first line:

    ours       JSON lines, a program each: {"at_s", "kind", "prefix": {"name", "tokens"}, "calls":
               [{"new_tokens", "output_tokens", "pause_s"}]}; a list in place of a call: in parallel
    Mooncake   JSON lines, a call each: {"timestamp" (ms), "input_length", "output_length",
               "hash_ids"}: blocks of 512 tokens, equal ids are equal prefixes (FAST '25)
    BurstGPT   CSV: Timestamp (s), ..., Request tokens, Response tokens (arXiv 2401.17644)
    Azure      CSV: TIMESTAMP, ContextTokens, GeneratedTokens (Splitwise, ISCA 2024)
"""

from __future__ import annotations

import csv
import json
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest
from .mixes import Mix
from .traces import Call, Job, Start

_BLOCK_TOKENS = 512  # of a Mooncake hash id
_TOKEN_BYTES = 4
_JITTER_S = 1.0  # between copies of a program: bursts of a few seconds stay bursts


@dataclass(frozen=True, slots=True)
class Text:
    """So many tokens. Texts of one name begin alike; those without one are nobody else's."""

    num_tokens: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class TracedCall:
    """Texts behind the prompt and output of the call that it `follows`, by its number in the
    program (None: of none), and the tokens that it generates."""

    texts: tuple[Text, ...]
    num_output: int
    follows: int | None = None
    pause_s: float = 0.0  # behind the end of the calls before


@dataclass(frozen=True, slots=True)
class TracedProgram:
    """Calls in steps: those of a step run in parallel, behind all of the step before."""

    at_s: float
    kind: str
    steps: tuple[tuple[TracedCall, ...], ...]

    @property
    def num_calls(self) -> int:
        return sum(map(len, self.steps))

    @property
    def num_output(self) -> int:
        """Tokens that its calls generate."""
        return sum(call.num_output for step in self.steps for call in step)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its output."""
        ends: list[int] = []
        for step in self.steps:
            before = list(ends)
            for call in step:
                own = sum(text.num_tokens for text in call.texts) + call.num_output
                ends.append(own + (0 if call.follows is None else before[call.follows]))
        return max(ends)

    def job(self, rng: random.Random) -> Job:
        """The program as a simulation runs it; texts without a name are drawn anew."""
        ends: list[array[int]] = []
        num_left = len(self.steps)
        for step in self.steps:
            calls = []
            for each in step:
                prompt = array("i") if each.follows is None else ends[each.follows][:]
                for text in each.texts:
                    prompt += _named(text) if text.name else _drawn(rng, text.num_tokens)
                calls.append(
                    Call(
                        prompt, each.num_output, each.num_output, self.kind, delay_s=each.pause_s,
                        num_calls_left=num_left,
                    )
                )  # fmt: skip
            outputs = yield calls
            ends += [call.prompt + out for call, out in zip(calls, outputs, strict=True)]
            num_left -= 1


@dataclass(frozen=True)
class Trace:
    """Programs in the order of their starts; the first one starts at 0. Not empty."""

    name: str
    programs: tuple[TracedProgram, ...]

    @cached_property
    def duration_s(self) -> float:
        """From the first start to the last one, and a usual gap."""
        last_s = self.programs[-1].at_s
        return last_s * (1 + 1 / max(1, len(self.programs) - 1)) or 1.0

    @cached_property
    def num_calls(self) -> float:
        """Of a program, on average."""
        return sum(each.num_calls for each in self.programs) / len(self.programs)

    @cached_property
    def num_output(self) -> float:
        """Tokens that a call generates, on average."""
        total = sum(each.num_output for each in self.programs)
        return total / (self.num_calls * len(self.programs))

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest prompt with its output."""
        return max(each.longest for each in self.programs)

    def call_rates(self, slot_s: float) -> list[float]:
        """Calls a second that programs bring which start in each slot of the trace."""
        rates = [0.0] * max(1, round(self.duration_s / slot_s))
        for program in self.programs:
            slot = min(len(rates) - 1, int(program.at_s / slot_s))
            rates[slot] += program.num_calls / slot_s
        return rates

    def mix(self) -> Mix:
        """Its programs in any order, each as likely as any other."""
        jobs = partial(_any_of, self.programs)
        return Mix(self.name, f"{len(self.programs)} programs of a trace", jobs, self.num_calls)

    def starts(self, seed: int = 0, times: float = 1.0) -> list[Start]:
        """The trace itself with `times` as many programs: each as often on average, its copies
        within a second of it."""
        rng = random.Random(f"{self.name} {seed}")
        starts = []
        for program in self.programs:
            num = int(times) + (rng.random() < times % 1.0)
            for copy in range(num):
                later_s = rng.uniform(0.0, _JITTER_S) if copy or times > 1.0 else 0.0
                starts.append(
                    Start(program.at_s + later_s, program.job(random.Random(rng.random())))
                )
        return sorted(starts, key=lambda each: each.at_s)

    def window(self, begin_s: float, end_s: float) -> Trace:
        """The programs that start then. Raises InvalidRequest where there are none."""
        kept = [each for each in self.programs if begin_s <= each.at_s < end_s]
        if not kept:
            raise InvalidRequest.of("window", (begin_s, end_s), "one in which programs start")
        moved = tuple(replace(each, at_s=each.at_s - begin_s) for each in kept)
        return Trace(self.name, moved)


def _any_of(programs: Sequence[TracedProgram], _: random.Random) -> Callable[[random.Random], Job]:
    return partial(_one_of, programs)


def _one_of(programs: Sequence[TracedProgram], rng: random.Random) -> Job:
    return rng.choice(programs).job(rng)


def read_trace(path: Path) -> Trace:
    """Of any of the formats. Raises InvalidRequest, with the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest.of("trace", str(path), f"a file of text ({error})") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise InvalidRequest.of("trace", str(path), "a file with at least one program")
    first = numbered[0][1].lstrip()
    programs = list(_of_json(path, numbered) if first[0] == "{" else _of_csv(path, numbered))
    if not programs:
        raise InvalidRequest.of("trace", str(path), "a file with at least one program")
    programs.sort(key=lambda each: each.at_s)
    zero_s = programs[0].at_s
    return Trace(path.stem, tuple(replace(each, at_s=each.at_s - zero_s) for each in programs))


def _of_json(path: Path, lines: Sequence[tuple[int, str]]) -> Iterator[TracedProgram]:
    for number, line in lines:
        try:
            record = json.loads(line)
            yield _mooncake(record) if "input_length" in record else _ours(record)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise _wrong(path, number, error) from error


def _ours(record: Any) -> TracedProgram:
    prefix = record.get("prefix")
    steps: list[tuple[TracedCall, ...]] = []
    num_before, last = 0, None
    for each in record["calls"]:
        step = []
        for call in each if isinstance(each, list) else [each]:
            texts = [Text(_number(call["new_tokens"], 0))]
            if prefix and last is None:
                texts.insert(0, Text(_number(prefix["tokens"], 0), str(prefix["name"])))
            follows = call.get("follows", last)
            if follows is None and not _some(texts):
                raise ValueError("a prompt without tokens")
            if follows is not None and not 0 <= follows < num_before:
                raise ValueError(f"follows={follows} is no call of an earlier step")
            output, pause_s = _number(call["output_tokens"], 1), float(call.get("pause_s", 0.0))
            if not pause_s >= 0:
                raise ValueError(f"pause_s={pause_s} is below 0")
            step.append(TracedCall(_some(texts), output, follows, pause_s))
        if not step:
            raise ValueError("a step without calls")
        last = num_before
        num_before += len(step)
        steps.append(tuple(step))
    if not steps:
        raise ValueError("a program without calls")
    return TracedProgram(float(record["at_s"]), str(record.get("kind", "")), tuple(steps))


def _mooncake(record: Any) -> TracedProgram:
    num_input = _number(record["input_length"], 1)
    texts, num_left = [], num_input
    for block in record["hash_ids"]:
        num = min(num_left, _BLOCK_TOKENS)
        texts.append(Text(num, f"block {block}"))
        num_left -= num
    texts.append(Text(num_left))
    call = TracedCall(_some(texts), _number(record["output_length"], 1))
    return TracedProgram(float(record["timestamp"]) / 1e3, "call", ((call,),))


def _of_csv(path: Path, lines: Sequence[tuple[int, str]]) -> Iterator[TracedProgram]:
    head, *rows = csv.reader(line for _, line in lines)
    names = [name.strip().lower() for name in head]
    known: dict[tuple[str, ...], Callable[[str], float]] = {
        ("timestamp", "request tokens", "response tokens"): float,
        ("timestamp", "contexttokens", "generatedtokens"): _azure_s,
    }
    found = next((columns for columns in known if all(name in names for name in columns)), None)
    if found is None:
        allowed = "the columns of BurstGPT's or Azure's traces, or JSON lines"
        raise InvalidRequest.of("trace", f"{path}, line {lines[0][0]}", allowed)
    at, num_input, num_output = (names.index(name) for name in found)
    seconds = known[found]
    for (number, _), row in zip(lines[1:], rows, strict=True):
        try:
            if int(row[num_output]) == 0:  # a call that failed: nothing was generated
                continue
            texts = _some([Text(_number(int(row[num_input]), 1))])
            call = TracedCall(texts, _number(int(row[num_output]), 1))
            yield TracedProgram(seconds(row[at]), "call", ((call,),))
        except (ValueError, IndexError) as error:
            raise _wrong(path, number, error) from error


def _azure_s(text: str) -> float:
    """Seconds. Those of 2023 have seven digits behind the point, one more than Python reads; those
    of 2024 end with +00:00, as all are UTC."""
    whole, _, part = text.strip().removesuffix("+00:00").partition(".")
    moment = datetime.fromisoformat(whole)
    return (moment - datetime(2000, 1, 1)).total_seconds() + float(f"0.{part or 0}")


def _some(texts: Sequence[Text]) -> tuple[Text, ...]:
    return tuple(text for text in texts if text.num_tokens)


def _number(value: Any, least: int) -> int:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{value!r} is no integer >= {least}")
    return value


def _wrong(path: Path, number: int, error: Exception) -> InvalidRequest:
    found = f"{type(error).__name__}: {error}"
    return InvalidRequest.of("trace", f"{path}, line {number}", f"a program or a call ({found})")


@lru_cache(maxsize=4096)
def _named(text: Text) -> array[int]:
    """The same for each text of the name, up to its length."""
    return _drawn(random.Random(text.name), text.num_tokens)


def _drawn(rng: random.Random, num_tokens: int) -> array[int]:
    return array("i", rng.randbytes(_TOKEN_BYTES * num_tokens))
