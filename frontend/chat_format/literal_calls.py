"""Calls whose arguments are literals:

<|tool_call_start|>[weather(city="Ulm", days=2), clock()]<|tool_call_end|>
<|tool_call>call:weather{city:<|"|>Ulm<|"|>,days:2}<tool_call|>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .arguments import ArgumentsReader
from .contents import Content, one_of, parameters, separated, tag
from .literal_arguments import LiteralArguments
from .matching import Undecided, after_blanks, match_name, match_parts
from .named_object import array_tail, named_head
from .tool_format import Head, MarkedCalls, OfferedFunction, Tail, first_end
from .value_kinds import parameter_names


@dataclass(frozen=True, slots=True)
class PythonicCalls(MarkedCalls):
    """Calls of Python in a list between two marks. A list of JSON objects is read, too."""

    begin: str
    end: str

    @property
    def triggers(self) -> Sequence[str]:
        return (self.begin,)

    @property
    def grammar_triggers(self) -> Sequence[str]:
        return self.triggers

    def tags(self, functions: Sequence[OfferedFunction], *, is_parallel: bool) -> Sequence[Content]:
        style = {
            "key_end": "=",
            "separator": ", ",
            "raw_strings": False,
            "words": ["None", "False", "True"],
        }
        calls = [tag(f"{f.name}(", parameters(f.schema, style), ")") for f in functions]
        listed = separated(one_of(calls), ", ", is_repeated=is_parallel)
        return (tag(f"{self.begin}[", listed, f"]{self.end}"),)

    def forced(self, functions: Sequence[OfferedFunction]) -> Content:
        return self.tags(functions, is_parallel=False)[0]

    def head(self, text: str, at: int) -> Head | Undecided:
        opening = match_parts(text, at, ("[",))
        start = after_blanks(text, opening if isinstance(opening, int) else at)
        if text.startswith("{", start):
            found = named_head(text, start, ("arguments", "parameters"))
            return replace(found, is_json=True) if isinstance(found, Head) else found
        called = match_name(text, start, end="(")
        if isinstance(called, Undecided):
            return called
        return Head(*called)

    def arguments(self, head: Head, schema: object) -> ArgumentsReader:
        if head.is_json:
            return MarkedCalls.arguments(self, head, schema)
        return LiteralArguments(closing=")", key_end="=", listed=parameter_names(schema))

    def tail(self, text: str, *, is_last: bool) -> Tail | Undecided:
        brace = match_parts(text, 0, ("}",))  # of a JSON object
        if isinstance(brace, int):
            return array_tail(text, is_last=is_last, end_mark=self.end)
        again = match_parts(text, 0, (",",))
        if isinstance(again, int):
            return Tail(again, goes_on=True)
        endings = [match_parts(text, 0, parts) for parts in (("]", self.end), ("]",), (self.end,))]
        found = first_end(endings, is_last=is_last, text=text)
        return Tail(found) if isinstance(found, int) else found


@dataclass(frozen=True, slots=True)
class BracedCalls(MarkedCalls):
    """Calls as Gemma 4 writes them, each between two marks; `quote` is around strings."""

    begin: str
    end: str
    quote: str
    prefix: str = "call:"

    @property
    def triggers(self) -> Sequence[str]:
        return (self.begin,)

    @property
    def grammar_triggers(self) -> Sequence[str]:
        return self.triggers

    def tags(self, functions: Sequence[OfferedFunction], *, is_parallel: bool) -> Sequence[Content]:
        style = {"key_end": ":", "separator": ",", "quote": self.quote}
        return [
            tag(
                f"{self.begin}{self.prefix}{f.name}{{", parameters(f.schema, style), f"}}{self.end}"
            )
            for f in functions
        ]

    def forced(self, functions: Sequence[OfferedFunction]) -> Content:
        return one_of(self.tags(functions, is_parallel=False))

    def head(self, text: str, at: int) -> Head | Undecided:
        start = match_parts(text, at, (self.prefix,))
        if isinstance(start, Undecided):
            return start
        called = match_name(text, start, end="{")
        return called if isinstance(called, Undecided) else Head(*called)

    def arguments(self, head: Head, schema: object) -> ArgumentsReader:
        return LiteralArguments(closing="}", key_end=":", quote=self.quote)

    def tail(self, text: str, *, is_last: bool) -> Tail | Undecided:
        end = first_end([match_parts(text, 0, (self.end,))], is_last=is_last, text=text)
        return Tail(end) if isinstance(end, int) else end
