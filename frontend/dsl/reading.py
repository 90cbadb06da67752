"""Reading a branch: values, text and messages, waiting on a thread or in a coroutine.

Each method that waits has a twin for async functions: `aget` for `s["x"]`, `atext` for `text()`,
`adone` for `sync()`, and so on.
"""

from __future__ import annotations

import contextlib
import json
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from ...errors import InvalidProgram, ProgramError
from ..client.program import Pending, Program
from ..client.values import (
    Gathered,
    Known,
    Piece,
    Span,
    Value,
    meta_of,
    pendings_of,
    text_of,
    value_of,
)
from ..protocol import ir


class Message:
    """A chat message: its role and the pieces of its content; `fields`: JSON text of its other
    fields, or of what it was read as, with `content` in it."""

    __slots__ = ("fields", "pieces", "role")

    def __init__(
        self, role: str, pieces: list[Piece] | None = None, fields: str | None = None
    ) -> None:
        self.role = role
        self.pieces = pieces or []
        self.fields = fields

    def copy(self) -> Message:
        return Message(self.role, list(self.pieces), self.fields)

    def shown(self) -> dict[str, Any]:
        """As in OpenAI's API; all pieces are done."""
        fields = {} if self.fields is None else json.loads(self.fields)
        content = "".join(p if isinstance(p, str) else p.text for p in self.pieces)
        return {"role": self.role, "content": content, **fields}


class BranchReader:
    """The readable contents of one branch of a running program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._pieces: list[Piece] = []
        self._num_inherited = 0  # of these, from the branch that it was forked from
        self._seqs: list[int] = []  # which of its ops made each of the others
        self._vars: dict[str, Value] = {}
        self._messages: list[Message] = []

    # --- values ----------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        """The value called `name`; waits for it. Raises ProgramError, KeyError if never made."""
        found = self._lookup(name)
        self._settle(found)
        return value_of(found)

    async def aget(self, name: str) -> Any:
        """`state[name]` for async functions."""
        found = await self._lookup_async(name)
        await self._settle_async(found)
        return value_of(found)

    def get_var(self, name: str) -> Any:
        """The same as `state[name]`."""
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self._vars

    def names(self) -> list[str]:
        """Names of all values of this branch, in the order in which they were made."""
        return list(self._vars)

    def generated(self) -> list[str]:
        """Those of `names` that were generated or selected: the ones `get_meta_info` knows."""
        return [name for name, value in self._vars.items() if isinstance(value, Pending)]

    def get_meta_info(self, name: str) -> Any:
        """Meta info of `name`, as a dict; waits for it. A list of them, as the values are, for the
        samples of a gen with n > 1 and for values that a join has gathered.

        Keys: id, prompt_tokens, cached_tokens, completion_tokens, output_ids (the value's token
        ids), queue_s, time_to_first_token_s, latency_s, finish_reason ("stop" or "length");
        matched_stop, logprobs, prompt_logprobs, choice_logprobs where there are any;
        constraint_cost beside logprobs under a constraint: logprob_lost (nats, of all tokens),
        mean_logprob_lost, num_redirected, num_tokens, and with each of logprobs allowed_logprob and
        is_redirected, where the model's likeliest token was not allowed; beside
        logprobs also SGLang's words for them, input_token_logprobs, input_top_logprobs,
        output_token_logprobs and output_top_logprobs: [logprob, token id, text] of each token.
        """
        found = self._lookup(name)
        self._settle(found)
        return meta_of(name, found)

    async def aget_meta_info(self, name: str) -> Any:
        """`get_meta_info` for async functions."""
        found = await self._lookup_async(name)
        await self._settle_async(found)
        return meta_of(name, found)

    def _lookup(self, name: str) -> Value:
        """A value of this branch; a reader of a run on another thread waits until it is made."""
        if name not in self._vars and self._is_run_elsewhere():
            self._wait_until(lambda: name in self._vars)
        return self._found(name)

    async def _lookup_async(self, name: str) -> Value:
        if name not in self._vars and self._is_run_elsewhere():
            await self._wait_until_async(lambda: name in self._vars)
        return self._found(name)

    def _found(self, name: str) -> Value:
        try:
            return self._vars[name]
        except KeyError:
            if self._is_run_elsewhere():
                self._program.raise_disconnect()
            raise KeyError(f"no value called {name!r}; there are {sorted(self._vars)}") from None

    def _settle(self, found: Value) -> None:
        try:
            for pending in pendings_of(found):
                self._program.wait(pending)
        except ProgramError:
            if isinstance(found, Gathered):  # its join fails, too, and with that this branch
                with contextlib.suppress(ProgramError):
                    self._program.wait(found.join)
            raise

    async def _settle_async(self, found: Value) -> None:
        try:
            for pending in pendings_of(found):
                await self._program.wait_async(pending)
        except ProgramError:
            if isinstance(found, Gathered):
                with contextlib.suppress(ProgramError):
                    await self._program.wait_async(found.join)
            raise

    # --- text ------------------------------------------------------------------------------------

    def text(self, name: str | None = None) -> str:
        """All text of this branch, with the template's role delimiters, or that of the value
        `name`, as it was generated (the first sample's); waits for it."""
        if name is not None:
            pieces = _pieces_of(name, self._lookup(name))
            self._settle(Span(pieces, 0))
            return _generated_text(pieces)
        self._wait_for_the_runner()
        pieces = tuple(self._pieces)
        self._settle(Span(pieces, 0))
        return text_of(pieces)

    async def atext(self, name: str | None = None) -> str:
        """`text` for async functions."""
        if name is not None:
            pieces = _pieces_of(name, await self._lookup_async(name))
            await self._settle_async(Span(pieces, 0))
            return _generated_text(pieces)
        await self._wait_for_the_runner_async()
        pieces = tuple(self._pieces)
        await self._settle_async(Span(pieces, 0))
        return text_of(pieces)

    def messages(self) -> list[dict[str, Any]]:
        """The chat messages so far as `{"role", "content"}`, with `tool_calls`, `tool_call_id` and
        others that were given; waits for all of them."""
        self._wait_for_the_runner()
        for message in self._messages:
            self._settle(Span(tuple(message.pieces), 0))
        return self._all_messages()

    async def amessages(self) -> list[dict[str, Any]]:
        """`messages` for async functions."""
        await self._wait_for_the_runner_async()
        for message in self._messages:
            await self._settle_async(Span(tuple(message.pieces), 0))
        return self._all_messages()

    def _all_messages(self) -> list[dict[str, Any]]:
        return [message.shown() for message in self._messages]

    def sync(self) -> None:
        """Wait until everything appended to this branch so far is done; raises its failure, or the
        one that ended the program as a whole."""
        self._settle(Span(tuple(self._pieces), 0))
        self._program.raise_disconnect()

    async def adone(self) -> None:
        """`sync` for async functions."""
        await self._settle_async(Span(tuple(self._pieces), 0))
        self._program.raise_disconnect()

    # --- text as it comes ------------------------------------------------------------------------

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Text as it comes: of the value `var_name`, or of the whole branch until the program ends.

        Pieces arrive one by one when the program runs with `stream=True`, else op by op. Raises
        what failed; for the whole branch also in forks that were not read.
        """
        if var_name is not None:
            for piece in _pieces_of(var_name, self._lookup(var_name)):
                yield from self._chunks_of(piece)
            return
        num_done = 0
        while (current := self._wait_for_piece(num_done)) is not None:
            try:
                yield from self._chunks_of(current)
                num_done += 1
            except ProgramError:
                if self._is_run_elsewhere():
                    self._wait_until(lambda: self._resumed_at(current) is not None)
                if (num_left := self._resumed_at(current)) is None:
                    raise
                num_done = num_left
        self._program.wait_done()

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """`text_iter` for async functions.

        With `return_meta_data`, for one value only: pairs of text and meta info, the last one with
        an empty text and that of the whole value. On a runtime over ZeroMQ that of a chunk has id,
        prompt_tokens, cached_tokens, and completion_tokens so far; elsewhere it is empty.
        """
        if var_name is not None:
            for piece in _pieces_of(var_name, await self._lookup_async(var_name)):
                async for chunk, meta in self._told_chunks_of(piece):
                    yield (chunk, meta) if return_meta_data else chunk
            if return_meta_data:
                yield "", await self.aget_meta_info(var_name)
            return
        num_done = 0
        while (current := await self._wait_for_piece_async(num_done)) is not None:
            try:
                async for chunk in self._chunks_of_async(current):
                    yield chunk
                num_done += 1
            except ProgramError:
                if self._is_run_elsewhere():
                    await self._wait_until_async(lambda: self._resumed_at(current) is not None)
                if (num_left := self._resumed_at(current)) is None:
                    raise
                num_done = num_left
        await self._program.wait_done_async()

    def _chunks_of(self, piece: Piece) -> Iterator[str]:
        """Chunks of a result; all of its text at once where the program does not stream."""
        if isinstance(piece, str):
            yield piece
            return
        num_sent = 0
        while fresh := self._program.wait_chunks(piece, num_sent):
            num_sent += len(fresh)
            yield "".join(fresh)
        if not num_sent and piece.text:
            yield piece.text

    async def _chunks_of_async(self, piece: Piece) -> AsyncIterator[str]:
        async for chunk, _ in self._told_chunks_of(piece):
            yield chunk

    async def _told_chunks_of(self, piece: Piece) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Each with the meta info at its end."""
        if isinstance(piece, str):
            yield piece, {}
            return
        num_sent = 0
        while fresh := await self._program.wait_chunks_async(piece, num_sent):
            num_sent += len(fresh)
            streamed = piece.streamed
            yield "".join(fresh), {} if streamed is None else streamed.meta_at(num_sent)
        if not num_sent and piece.text:
            yield piece.text, {}

    # --- waiting for a function that runs elsewhere ---------------------------------------------

    def _is_run_elsewhere(self) -> bool:
        return self._program.is_run_elsewhere()

    def _wait_for_piece(self, index: int) -> Piece | None:
        """The branch's piece `index`, once it has one; None: it ended with fewer."""
        self._wait_until(lambda: len(self._pieces) > index)
        return next(iter(self._pieces[index : index + 1]), None)

    async def _wait_for_piece_async(self, index: int) -> Piece | None:
        await self._wait_until_async(lambda: len(self._pieces) > index)
        return next(iter(self._pieces[index : index + 1]), None)

    def _resumed_at(self, piece: Piece) -> int | None:
        """How many pieces are left before one whose op failed, once the branch went on without it;
        what was read of the others is not taken back."""
        lost = self._program.lost_with(piece) if isinstance(piece, Pending) else None
        return None if lost is None else self._num_inherited + bisect_left(self._seqs, lost.first)

    def _wait_for_the_runner(self) -> None:
        """A reader of a run on another thread waits until the function has appended everything."""
        if self._is_run_elsewhere():
            self._wait_until(lambda: False)

    async def _wait_for_the_runner_async(self) -> None:
        if self._is_run_elsewhere():
            await self._wait_until_async(lambda: False)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        program = self._program
        program.wait_until(lambda: condition() or program.is_ended or program.is_done)

    async def _wait_until_async(self, condition: Callable[[], bool]) -> None:
        program = self._program
        await program.waiters.wait_async(lambda: condition() or program.is_ended or program.is_done)


def _pieces_of(name: str, found: Value) -> tuple[Piece, ...]:
    """The pieces of one value's text. Raises InvalidProgram for the values of several branches."""
    if isinstance(found, Pending):
        return (found,)
    if isinstance(found, Known):
        return (str(found.value),)
    if isinstance(found, Span):
        return found.pieces[found.start :]
    raise InvalidProgram(f"{name!r} was gathered by a join; iterate over the branches' own")


def _generated_text(pieces: tuple[Piece, ...]) -> str:
    """Of one value, or of a span: a value's own text is without what a template put before it."""
    if len(pieces) == 1 and isinstance(pieces[0], Pending):
        value = pieces[0].value
        return str(value[0] if isinstance(value, list) else value)
    return text_of(pieces)


def messages_of(pieces: list[Piece]) -> tuple[list[Message], str | None]:
    """The messages that these pieces of a branch make, and the role of the one that is open."""
    messages: list[Message] = []
    open_role: str | None = None
    for piece in pieces:
        op = piece.op if isinstance(piece, Pending) else None
        if isinstance(op, ir.RoleBegin):
            messages.append(Message(open_role := op.role, fields=op.fields))
        elif isinstance(op, ir.RoleEnd):
            open_role = None
            messages[-1].fields = op.fields or messages[-1].fields
        elif open_role is not None:
            messages[-1].pieces.append(piece)
    return messages, open_role
