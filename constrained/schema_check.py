"""What a JSON Schema compiles to, for its author: path and size, what is refused and what to
change, an example document, and what each part costs.
"""

from __future__ import annotations

import json
import random
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import InvalidGrammar, MissingDependency, UnsupportedSchema
from .compiled_grammar import CompiledGrammar
from .compiler import compile_grammar, prepare
from .fsm import Automaton, FsmGrammar
from .matcher import BoundGrammar, Matcher
from .regular.dfa import DEAD
from .serving.frames import DEFAULT_GRAMMAR_TIMEOUT_S
from .spec import GrammarSpec
from .vocabulary import Vocabulary, single_bytes

MAX_EXAMPLE_BYTES = 5_000
RICH_BYTES = 120  # up to here an example has properties and items that it need not have
NUM_TRIES = 8
MAX_STATES_OF_A_WAY = 5_000
_QUOTE = 0x22
_LETTERS = b"abcdefghijklmnopqrstuvwxyz"
_PLAIN_FIRST = bytes(sorted(range(256), key=lambda byte: (byte not in _LETTERS, byte)))


@dataclass(frozen=True, slots=True)
class Refusal:
    """What cannot be enforced, or is no schema: where, why and what to change."""

    pointer: str | None
    keyword: str | None
    reason: str
    remedy: str


@dataclass(slots=True)
class SchemaReport:
    """`path` is None where the schema is refused. Times in seconds of wall time, by part."""

    path: str | None = None
    reason: str = ""
    num_states: int | None = None
    num_bytes: int = 0
    watches: list[str] = field(default_factory=list)  # what is enforced beside the grammar
    refusals: list[Refusal] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # of words that are no keywords
    example: str | None = None
    is_example_valid: bool | None = None  # None: no example, or the validator is not installed
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add what the block takes to a part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0) + time.perf_counter() - start


def check_schema(spec: GrammarSpec, vocabulary: Vocabulary | None = None) -> SchemaReport:
    """The report on a JSON Schema. With a vocabulary also what binding to it and a first mask take.

    A refused schema is compiled again as lenient, to name all that is refused and not only the
    first of it.
    """

    report, start = SchemaReport(), time.process_time()
    with report.timed("compile"):
        compiled = _compiled(spec, report)
    report.notes = _notes(spec)
    seconds = time.process_time() - start
    if seconds > DEFAULT_GRAMMAR_TIMEOUT_S:
        report.warnings.append(
            f"a server refuses it: compiling took {seconds:.1f} s of CPU time, and it gives "
            f"{DEFAULT_GRAMMAR_TIMEOUT_S:g} s"
        )
    if compiled is None:
        return report
    report.path, report.reason = compiled.path, compiled.reason
    report.warnings += compiled.warnings
    if compiled.dfa is not None:
        report.num_states, report.num_bytes = compiled.dfa.num_states, compiled.dfa.num_bytes
    elif compiled.rules is not None:
        report.num_bytes = compiled.rules.words.nbytes
    else:
        report.num_bytes = len(compiled.lark or "")
    if compiled.needs_unique_keys:
        report.watches.append("keys that must not repeat")
    if compiled.item_places is not None:
        report.watches.append("items that must not repeat")
    if vocabulary is not None:
        _first_mask(compiled, vocabulary, report)
    with report.timed("example"):
        inner = compiled.bind_unwatched(single_bytes())
        automaton = inner.automaton if isinstance(inner, FsmGrammar) else None
        report.example = example_of(compiled.bind(single_bytes()), automaton)
    if report.example is not None:
        with report.timed("validation"):
            _validate(spec, report)
    return report


def _compiled(spec: GrammarSpec, report: SchemaReport) -> CompiledGrammar | None:
    try:
        return compile_grammar(spec)
    except InvalidGrammar as error:
        report.refusals.append(_refusal(error))
    if not spec.is_lenient:
        others = map(_refusal, _dropped(replace(spec, is_lenient=True)))
        report.refusals = list(dict.fromkeys([*report.refusals, *others]))
    return None


def _notes(spec: GrammarSpec) -> list[str]:
    from .schema.unknown_keywords import unknown_keywords

    try:
        return list(map(str, unknown_keywords(json.loads(spec.source))))
    except ValueError:  # refused as such
        return []


def _dropped(spec: GrammarSpec) -> tuple[UnsupportedSchema, ...]:
    from .schema.schema_grammar import schema_grammar

    try:
        return schema_grammar(
            json.loads(spec.source),
            whitespace=spec.whitespace,
            property_order=spec.property_order,
            asserts_format=spec.formats == "enforce",
            is_lenient=True,
        ).dropped
    except (InvalidGrammar, ValueError):
        return ()


def _refusal(error: InvalidGrammar) -> Refusal:
    if isinstance(error, UnsupportedSchema):
        return Refusal(error.pointer or "/", error.keyword, error.reason, error.remedy)
    reason, _, remedy = str(error).partition("; remedy: ")
    return Refusal(None, None, reason, remedy)


def _first_mask(compiled: CompiledGrammar, vocabulary: Vocabulary, report: SchemaReport) -> None:
    with report.timed("vocabulary"):
        prepare(vocabulary)
    with report.timed("binding"):
        matcher = compiled.bind(vocabulary).matcher()
    with report.timed("first mask"):
        matcher.mask(np.empty(vocabulary.num_words, np.uint32))


def _validate(spec: GrammarSpec, report: SchemaReport) -> None:
    assert report.example is not None
    try:
        from .validation import validation_errors

        errors = validation_errors(spec.source, report.example)
    except (ImportError, MissingDependency):
        return
    report.is_example_valid = not errors
    report.warnings += [f"the example is not valid by jsonschema: {error}" for error in errors]


def example_of(bound: BoundGrammar, automaton: Automaton | None = None) -> str | None:
    """A text of the grammar, whose tokens are single bytes; None: no short one was found.

    A walk along the masks: at first it takes up what it may, then it makes for the end, by the
    shortest way where an automaton knows it. Where it finds none it is begun again, with less.
    """
    for attempt in range(NUM_TRIES):
        rich = RICH_BYTES if attempt < NUM_TRIES // 2 else 0
        text = _walk(bound.matcher(), random.Random(attempt), rich >> attempt, automaton)
        if text is not None:
            return text
    return None


def _way_out(automaton: Automaton, start: int) -> bytes:
    """Of the shortest texts after which the automaton accepts one of plain characters, where there
    are; b"" where none is near."""
    seen = {start}
    nearest: deque[tuple[int, bytes]] = deque([(start, b"")])
    while nearest and len(seen) < MAX_STATES_OF_A_WAY:
        state, text = nearest.popleft()
        following = automaton.next_bytes(state)
        for byte in _PLAIN_FIRST:
            if following >> byte & 1:
                longer = text + bytes([byte])
                after = automaton.step(state, longer[-1:])
                if automaton.is_accepting(after):
                    return longer
                if after not in seen:
                    seen.add(after)
                    nearest.append((after, longer))
    return b""


def _walk(
    matcher: Matcher, rng: random.Random, rich_bytes: int, automaton: Automaton | None
) -> str | None:
    text, way = bytearray(), b""  # what was written, and a way to the end
    state = DEAD if automaton is None else automaton.start
    is_string, run = False, 0  # within a string, and its characters so far
    mask = np.empty(8, np.uint32)
    while not matcher.is_finished():
        matcher.mask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        if not allowed or (matcher.is_accepting() and len(text) >= rich_bytes):
            break
        is_rich = len(text) < rich_bytes
        if automaton is not None and not is_rich:
            way = way or _way_out(automaton, state)
        if way[:1] and way[0] in allowed:
            byte = way[0]
        elif is_string:
            byte = _in_string(allowed, rng, run, wants_more=run < 4 and is_rich)
        else:
            byte = _outside(allowed, rng, is_rich=is_rich)
        if not matcher.consume(byte) or len(text) > MAX_EXAMPLE_BYTES:
            return None
        text.append(byte)
        way = way[1:] if way[:1] == bytes([byte]) else b""
        state = DEAD if automaton is None else automaton.step(state, bytes([byte]))
        if byte == _QUOTE and not (is_string and text.endswith(b'\\"')):
            is_string = not is_string
        run = run + 1 if is_string else 0
    return text.decode("utf-8", "replace") if matcher.is_accepting() else None


def _in_string(allowed: list[int], rng: random.Random, run: int, *, wants_more: bool) -> int:
    """A letter, or the end as soon as the string is long enough; of longer ones also what may have
    to come before the end."""
    letters = [byte for byte in _LETTERS if byte in allowed]
    if _QUOTE in allowed and not (wants_more and letters):
        return _QUOTE
    plain = [byte for byte in allowed if 0x20 < byte < 0x7F and byte not in b'"\\']
    return rng.choice((plain if run > 3 and rng.random() < 0.5 else letters) or plain or allowed)


def _outside(allowed: list[int], rng: random.Random, *, is_rich: bool) -> int:
    """Another member or item now and then, else an end, else the plainest value."""
    ends = [byte for byte in b"]}" if byte in allowed]
    if ord(",") in allowed and (not ends or (is_rich and rng.random() < 0.6)):
        return ord(",")
    if ends and not (is_rich and len(allowed) > 1 and rng.random() < 0.6):
        return ends[0]
    begins = [
        byte for byte in allowed if byte in (b'"0123456789tfn[{' if is_rich else b'"0123456789')
    ]
    others = [byte for byte in allowed if byte not in b" \t\r\n"]
    return rng.choice(begins or others or allowed)
