"""`st.tool_loop`: the model calls tools until it answers.

assistant  {call}{call}   the model's own format, read here or by the endpoint
(pause)                   the calls run side by side; the branch's KV is kept meanwhile. Those of
                          pure tools may have begun before, see early.py
tool       result         one message a call, errors too: the model may try otherwise
tool       result
assistant  answer
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import json
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

from ...errors import InvalidProgram, InvalidRequest, MaxTurnsExceeded
from ..chat_format.call_grammar import calls_constraint, tools_text
from ..chat_format.chat_format import UNKNOWN_FORMAT, ChatFormat
from ..chat_format.reading import ReadMessage, ToolCall, read_message
from ..chat_format.tool_format import OfferedFunction
from ..client.early_calls import EarlyCall, EarlyCalls, LikelyCall
from ..protocol.numbers import MAX_INT, Range
from .beside_loop import run_beside
from .early import expected_s, likely_call, take_early, wait_early, wait_early_async
from .expr import GenExpr, RoleBeginExpr, RoleEndExpr, ToolsExpr, role
from .generation import gen
from .scopes import PauseScope
from .source_lines import source_line
from .state import ProgramState
from .tool import Tool

DEFAULT_MAX_TURNS = 8
DEFAULT_MAX_TOKENS = 512  # of a turn: a call's arguments may be long
_TURNS = Range(1, MAX_INT, is_whole=True)

OnError = Literal["tell", "raise"]


class ToolLoop:
    """A model's turns with tools: `loop(s)` runs them on a branch and returns the answer's text;
    await it in an async function.

    Appended are the assistant's messages, as they were generated, and each result as a message of
    role "tool". The answer is also `s[name]`, as the model wrote it.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        name: str,
        max_turns: int,
        on_error: OnError,
        gen_options: dict[str, Any],
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._name = name
        self._max_turns = max_turns
        self._on_error = on_error
        self._gen_options = gen_options

    def __call__(self, s: ProgramState) -> Any:
        """The answer's text; in an async function an awaitable of it.

        Raises MaxTurnsExceeded, InvalidProgram where a tool's parameters cannot be told, what a
        tool raises with on_error="raise", and ProgramError where the model knows no tools.
        """
        if not isinstance(s, ProgramState):
            raise InvalidProgram.of("s", s, "the program's state, as in tool_loop(tools)(s)")
        steps = self._steps(s, source_line(sys._getframe(1)))
        is_async = s._program.loop_thread is not None
        return self._run_async(s, steps) if is_async else self._run(s, steps)

    def _run(self, s: ProgramState, steps: _Steps) -> str:
        reply: Any = None
        with contextlib.closing(steps):
            while True:
                try:
                    wanted = steps.send(reply)
                except StopIteration as done:
                    return str(done.value)
                if wanted is None:
                    reply = s[self._name], s.get_meta_info(self._name)
                else:
                    reply = self._results(s._program.early_calls, wanted)

    async def _run_async(self, s: ProgramState, steps: _Steps) -> str:
        reply: Any = None
        with contextlib.closing(steps):
            while True:
                try:
                    wanted = steps.send(reply)
                except StopIteration as done:
                    return str(done.value)
                if wanted is None:
                    reply = await s.aget(self._name), await s.aget_meta_info(self._name)
                else:
                    calls = s._program.early_calls
                    results = [self._result_async(calls, call) for call in wanted]
                    reply = await asyncio.gather(*results)

    def _steps(self, s: ProgramState, source: str | None) -> _Steps:
        """Yields None where it needs the turn's text and meta info, and calls where it needs their
        results; returns the answer."""
        chat_format = _format_of(s)
        asked = self._asked(chat_format)
        s._append(ToolsExpr(self._definitions), source)
        for turn in range(1, self._max_turns + 1):
            s._append(RoleBeginExpr("assistant"), source)
            s._append(self._ahead(asked, chat_format, after_tool=turn > 1), source)
            text, meta = yield None
            read = self._read(text, meta, chat_format, after_tool=turn > 1)
            s._append(RoleEndExpr("assistant", _fields(read)), source)
            if not read.calls:
                return read.content
            if turn == self._max_turns:
                break
            wanted = [_Wanted(call, self._early(s, call)) for call in read.calls]
            with self._pause(s, wanted, source):
                results = yield wanted
            for call, result in zip(read.calls, results, strict=True):
                s._append(role("tool", result, tool_call_id=call.id, name=call.name), source)
        raise MaxTurnsExceeded(self._max_turns, [call.name for call in read.calls])

    @functools.cached_property
    def _definitions(self) -> str:
        """Made once, not for each program that runs the loop."""
        return tools_text([tool.definition for tool in self._tools.values()])

    def _asked(self, chat_format: ChatFormat | None) -> GenExpr:
        asked = gen(self._name, **{"max_tokens": DEFAULT_MAX_TOKENS, **self._gen_options})
        assert isinstance(asked, GenExpr)
        taught = None if chat_format is None else chat_format.tool_format
        if taught is None:
            return asked
        offered = [OfferedFunction(tool.name, tool.parameters) for tool in self._tools.values()]
        constraint = calls_constraint(taught, offered)
        return GenExpr(asked.name, replace(asked.params, constraint=constraint))

    def _ahead(
        self, asked: GenExpr, chat_format: ChatFormat | None, *, after_tool: bool
    ) -> GenExpr:
        """A turn's gen, of which pure tools are told what it probably will call."""
        if chat_format is None or not any(tool.is_pure for tool in self._tools.values()):
            return asked
        read = functools.partial(self._likely_calls, chat_format, after_tool)
        return replace(asked, params=replace(asked.params, foretell=True), ahead=read)

    def _likely_calls(
        self, chat_format: ChatFormat, after_tool: bool, text: str
    ) -> Iterator[LikelyCall]:
        """Of pure tools, if the turn says this. Raises InvalidRequest for other arguments than
        they take."""
        for call in self._read(text, {}, chat_format, after_tool=after_tool).calls:
            tool = self._tools.get(call.name)
            if tool is not None and tool.is_pure:
                yield likely_call(tool, (), tool.arguments(call.arguments))

    def _read(
        self, text: str, meta: dict[str, Any], chat_format: ChatFormat | None, *, after_tool: bool
    ) -> ReadMessage:
        if chat_format is not None:
            schemas = {tool.name: tool.parameters for tool in self._tools.values()}
            return read_message(text, chat_format, schemas, after_tool=after_tool)
        calls = [
            ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in meta.get("tool_calls") or ()
        ]
        return ReadMessage(text, tuple(calls))

    # --- calls ------------------------------------------------------------------------------------

    def _early(self, s: ProgramState, call: ToolCall) -> EarlyCall | None:
        """The same call, if it has begun already."""
        calls, tool = s._program.early_calls, self._tools.get(call.name)
        if tool is None or not calls or not tool.is_pure:
            return None
        try:
            return take_early(calls, tool, (), tool.arguments(call.arguments))
        except InvalidRequest:  # the model is told of it
            return None

    def _pause(
        self, s: ProgramState, wanted: Sequence[_Wanted], source: str | None
    ) -> PauseScope[ProgramState]:
        """All run side by side, so it takes as long as the longest."""
        called = [each for each in wanted if each.call.name in self._tools]
        times = [expected_s(self._tools[each.call.name], each.early) for each in called]
        known = [time_s for time_s in times if time_s is not None]
        label = "+".join(dict.fromkeys(each.call.name for each in wanted))
        return PauseScope(s, max(known, default=None), label, source)

    def _results(self, calls: EarlyCalls, wanted: Sequence[_Wanted]) -> list[str]:
        if len(wanted) == 1 and not self._is_async(wanted[0].call):
            return [self._result(calls, wanted[0])]
        with ThreadPoolExecutor(len(wanted), thread_name_prefix="stemma-tool") as threads:
            runs = [contextvars.copy_context().run for _ in wanted]
            works = [
                threads.submit(run, self._result, calls, each) for run, each in zip(runs, wanted)
            ]
            return [work.result() for work in works]

    def _result(self, calls: EarlyCalls, wanted: _Wanted) -> str:
        call = wanted.call
        if self._is_async(call):
            return asyncio.run(self._result_async(calls, wanted))
        with self._told() as told:
            known = wait_early(calls, wanted.early)
            told.take(self._tool(call).invoke(call.arguments) if known is None else known[0])
        return told.text

    async def _result_async(self, calls: EarlyCalls, wanted: _Wanted) -> str:
        call = wanted.call
        with self._told() as told:
            tool = self._tool(call)
            known = await wait_early_async(calls, wanted.early)
            if known is not None:
                told.take(known[0])
            elif tool.is_async:
                told.take(await tool.invoke(call.arguments))
            else:
                told.take(await run_beside(tool.invoke, call.arguments))
        return told.text

    def _is_async(self, call: ToolCall) -> bool:
        return call.name in self._tools and self._tools[call.name].is_async

    def _tool(self, call: ToolCall) -> Tool:
        if call.name not in self._tools:
            raise InvalidRequest.of("tool", call.name, f"one of {sorted(self._tools)}")
        return self._tools[call.name]

    def _told(self) -> _Told:
        return _Told(raises=self._on_error == "raise")


class _Wanted(NamedTuple):
    """A call that a turn makes, and the same one, if it has begun before."""

    call: ToolCall
    early: EarlyCall | None


_Steps = Generator[Sequence[_Wanted] | None, Any, str]


class _Told:
    """What the model is told of a call: its result, or the error that ends the block."""

    def __init__(self, *, raises: bool) -> None:
        self._raises = raises
        self.text = ""

    def take(self, value: object) -> None:
        """A text as it is, anything else as JSON, or as Python shows it."""
        if isinstance(value, str):
            self.text = _sendable(value)
            return
        import pydantic_core

        try:
            self.text = pydantic_core.to_json(value).decode()
        except pydantic_core.PydanticSerializationError:
            self.text = _sendable(str(value))

    def __enter__(self) -> _Told:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> bool:
        if not isinstance(error, Exception) or self._raises:
            return False
        named = "" if isinstance(error, InvalidRequest) else f"{type(error).__name__}: "
        self.text = _sendable(f"error: {named}{error}")
        return True


def _sendable(text: str) -> str:
    """Without lone surrogates, as names of files and badly decoded pages have them."""
    return text.encode("utf-8", "replace").decode()


def tool_loop(
    tools: Sequence[Tool | Callable[..., Any]],
    *,
    max_turns: int = DEFAULT_MAX_TURNS,
    on_error: OnError = "tell",
    name: str = "answer",
    **gen_options: Any,
) -> ToolLoop:
    """Have the model call these tools until it answers: `answer = st.tool_loop([search])(s)`.

    Args:
        tools: of `st.tool`, or functions with annotated parameters, with different names.
        max_turns: of the assistant, >= 1; MaxTurnsExceeded if the last one still calls.
        on_error: "tell": the model is told what a tool raised, and of arguments that it does not
            take; "raise": that is raised.
        name: of the value, see `gen`.
        gen_options: of each turn's `gen`, but for constraints and `n` (max_tokens: 512 by default).

    Raises InvalidProgram.
    """
    if isinstance(tools, str | Tool) or not isinstance(tools, Sequence) or not tools:
        raise InvalidProgram.of("tools", tools, "a list of at least one tool")
    made = [each if isinstance(each, Tool) else Tool(_function(each)) for each in tools]
    names = [each.name for each in made]
    if len(set(names)) < len(names):
        raise InvalidProgram.of("tools", names, "tools with different names")
    if on_error not in get_args(OnError):
        raise InvalidProgram.of("on_error", on_error, f"one of {get_args(OnError)}")
    for option in _NOT_OPTIONS & gen_options.keys():
        allowed = "left out: a turn is one output, a call or an answer"
        raise InvalidProgram.of(option, gen_options[option], allowed)
    return ToolLoop(
        made,
        name=name,
        max_turns=_TURNS.checked("max_turns", max_turns),
        on_error=on_error,
        gen_options=gen_options,
    )


_NOT_OPTIONS = frozenset(
    (
        "ahead",
        "beam",
        "choices",
        "dtype",
        "ebnf",
        "json_schema",
        "n",
        "regex",
        "structural_tag",
        "type",
    )
)


def _function(given: object) -> Callable[..., Any]:
    if not callable(given):
        raise InvalidProgram.of("tools", given, "functions, or what st.tool made of them")
    return given


def _format_of(s: ProgramState) -> ChatFormat | None:
    """How the model writes calls; None where an endpoint reads them. Raises InvalidProgram where it
    is told of tools and writes calls in a format that is not known."""
    info = s._program.info
    if "chat_format" not in info:
        return None
    chat_format = ChatFormat.of(info, "auto", "auto")
    if chat_format.is_unknown:
        raise InvalidProgram(f"tools: {UNKNOWN_FORMAT}", "tools")
    return chat_format


def _fields(read: ReadMessage) -> str | None:
    """What the message was read as; None: it is its text."""
    if not read.calls:
        return None
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in read.calls
    ]
    fields: dict[str, Any] = {"content": read.content or None, "tool_calls": calls}
    if read.reasoning:
        fields["reasoning_content"] = read.reasoning
    return json.dumps(fields, ensure_ascii=False)
