"""The tokens of one branch: text, generated ids and role delimiters, in the order of appending.

Token identity: ids are never tokenized again. A text segment is tokenized alone; generated ids stay
as they were generated. Delimiters of the chat template are appended when the rendering of k
messages is a prefix of that of k + 1 (nearly always); else new delimiters are put around the same
contents, and the radix tree finds how much of the branch is still cached.

    marks     <|begin|><|user|>      <|end|><|assistant|>       <|end|>
    contents                   Hello                     Hi!

An assistant's turn may be read as tool calls, which the template writes into a delimiter; the turn
keeps the very ids that were generated.

A whole chat, as clients of the OpenAI API send it, begins a branch otherwise: see `whole_chat`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import InvalidProgram
from ...frontend.protocol.chat_message import Message
from .chat_growth import MIN_TURNS, grown_marks
from .chat_template import NO_TEMPLATE_ARGS, ChatTemplate, TemplateArgs
from .template_message import ROLE, Turn
from .tokenizer import Tokenizer
from .whole_chat import FindTurn, chat_prompt

FindReplay = Callable[["array[int]", str], "array[int] | None"]
"""(prompt ids, text) -> the ids that a model generated after the prompt as this text, if known."""


@dataclass(slots=True)
class _Run:
    """Ids with the text they stand for."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    text: list[str] = field(default_factory=list)

    def append(self, ids: Iterable[int], text: str) -> None:
        self.ids.extend(ids)
        self.text.append(text)

    def copy(self) -> _Run:
        return _Run(self.ids[:], self.text[:])


@dataclass(frozen=True, slots=True)
class TextChange:
    """The text that an operation appended to the branch; with `replace`, the whole text so far."""

    text: str
    replace: bool = False


class Transcript:
    """Ids of a branch, growing; `copy` gives a fork its own.

    Invariant: `ids` is the raw prefix, then delimiter, content, delimiter, content, ... Text that
    was appended outside of any message (`_loose`) is within the delimiter between its neighbours,
    where the message before it ended. A message without content is part of a delimiter, and a whole
    chat of the raw prefix.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, args: TemplateArgs = NO_TEMPLATE_ARGS
    ) -> None:
        """`args`: the template's input besides messages."""
        self._tokenizer = tokenizer
        self._template = template
        self._args = args
        self.ids = array("i")
        self.content_start = 0  # where the open message's content begins in `ids`
        self._raw = _Run()
        self._chat: tuple[int, bytes] | None = None  # its last token, and its text's digest
        self._turns: list[Turn] = []
        self._delimiters: list[str] = []
        self._contents: list[_Run] = []
        self._loose: dict[tuple[int, int], _Run] = {}  # by (delimiter, characters of it before)
        self._is_open = False
        self._prompt: tuple[array[int], str] | None = None  # of the open turn, if replayable
        self._closed: tuple[int, list[str]] = 0, []  # delimiters of the first n turns, all closed
        self._is_guessed = False  # `_delimiters` were not rendered as a whole
        self._can_guess = True
        self._refusal: InvalidProgram | None = None  # of the messages so far: others must follow

    def copy(self) -> Transcript:
        """An independent transcript with the same content."""
        twin = Transcript(self._tokenizer, self._template, self._args)
        twin.ids = self.ids[:]
        twin.content_start = self.content_start
        twin._raw = self._raw.copy()
        twin._turns = self._turns[:]
        twin._delimiters = self._delimiters[:]
        twin._contents = [run.copy() for run in self._contents]
        twin._loose = {place: run.copy() for place, run in self._loose.items()}
        twin._is_open = self._is_open
        twin._prompt = self._prompt
        twin._closed = self._closed
        twin._is_guessed = self._is_guessed
        twin._can_guess = self._can_guess
        twin._chat = self._chat
        twin._refusal = self._refusal
        return twin

    @property
    def open_role(self) -> str | None:
        """The role of the message being written, or None between messages."""
        return self._turns[-1].role if self._is_open else None

    @property
    def chat_digest(self) -> bytes | None:
        """Of the text of a whole chat, as long as nothing else is on the branch."""
        is_alone = self._chat is not None and self._chat[0] == len(self.ids)
        return self._chat[1] if self._chat is not None and is_alone else None

    @property
    def num_guessed_turns(self) -> int:
        """How many messages `settle` would render."""
        return len(self._turns) if self._is_guessed else 0

    @property
    def num_unwritten_chars(self) -> int:
        """Of the template's arguments, as JSON, which the first message writes."""
        return 0 if self._turns else self._args.num_chars

    def begin_with_chat(self, messages: Sequence[Message], find_turn: FindTurn) -> TextChange:
        """Begin the branch with a whole chat and an opened assistant's turn. Raises InvalidProgram
        if the branch has begun already, or the template refuses."""
        if self.ids or self._turns:
            raise InvalidProgram("a whole chat is the beginning of its branch")
        prompt = chat_prompt(self._template, messages, self._args, find_turn=find_turn)
        self._raw.append(prompt.ids, prompt.text)
        self.ids.extend(prompt.ids)
        self._chat = len(self.ids), prompt.digest
        return TextChange(prompt.text)

    def append_text(self, text: str) -> None:
        """Append a text segment, tokenized alone; the branch's first one begins with BOS."""
        self.append_ids(self._tokenizer.encode_array(text), text)

    def append_ids(self, ids: Iterable[int], text: str, *, has_bos: bool = False) -> None:
        """Append ids that stand for `text`. BOS is put before the branch's first ones, unless they
        have it. Content that the template leaves out of its message is dropped."""
        if self._is_open and not self._turns[-1].has_content:
            if text and not self._turns[-1].drops_content:
                raise InvalidProgram("text within a message that was begun as one without content")
            return
        if not self.ids and not self._turns and not has_bos:
            bos = self._tokenizer.bos_ids
            self._raw.append(bos, "")
            self.ids.extend(bos)
        ids = ids if isinstance(ids, array) else array("i", ids)
        self._current_run().append(ids, text)
        self.ids.extend(ids)

    def begin_role(self, role: str, fields: str | None = None) -> TextChange:
        """Open a message; `fields`: JSON text of its fields besides role and content.

        Raises InvalidProgram if one is open or the template refuses.
        """
        if self._is_open:
            raise InvalidProgram(f"{role} message begun inside a {self._turns[-1].role} message")
        if not ROLE.fullmatch(role):  # it goes into delimiters, which may hold special tokens
            raise InvalidProgram.of("role", role, "a word such as system, user or assistant")
        turn = self._fitting(Turn.of(role, fields))
        self._prompt = None
        delimiters = None
        if turn.fields is not None and role == "assistant":
            self._prompt = self._prompt_here()
        elif role == "assistant":
            delimiters = self._rendered(self._turns, open_turn=True)
        if delimiters is None and turn.has_content:
            delimiters = self._rendered_so_far([*self._turns, turn])[:-1]
        change = TextChange("") if delimiters is None else self._lay(delimiters)
        self._turns.append(turn)
        if turn.has_content:
            self._contents.append(_Run())
        self._is_open = True
        self.content_start = len(self.ids)
        return change

    def end_role(self, find_replay: FindReplay | None = None) -> TextChange:
        """Close the open message. Raises InvalidProgram if there is none."""
        if not self._is_open:
            raise InvalidProgram("no message is open")
        delimiters = self._rendered_so_far(self._turns)
        self._is_open = False
        self._closed = len(self._turns), delimiters
        if self._turns[-1].has_content:
            self._delimiters = [*self._delimiters, ""]
        change = self._lay(delimiters)
        if self._prompt is not None and find_replay is not None:
            self._reuse(find_replay, *self._prompt)
        return change

    def end_role_as(self, fields: str) -> TextChange:
        """Close the open assistant's message as what it was read as: `fields` has `content` and
        `tool_calls` as JSON. Its ids stay those that were generated; the template sees the fields.
        Where it refuses them the message is closed as the text that it is. Raises InvalidProgram.
        """
        if self.open_role != "assistant" or self._turns[-1].fields is not None:
            raise InvalidProgram("fields: no message of an assistant that was generated is open")
        content, rest = _content_and_rest(fields)
        turn = Turn.of("assistant", rest)
        try:
            self._rendered([*self._turns[:-1], turn])
        except InvalidProgram:
            return self.end_role()
        prompt, said = self.ids[: self.content_start], self._contents[-1].ids
        self._forget_message()
        self.begin_role("assistant", rest)
        if turn.has_content:
            self.append_text(content or "")
        self._prompt = prompt, self._prompt[1] if self._prompt else ""
        self.end_role(lambda *_: said)
        if self.ids[: len(prompt) + len(said)] == prompt + said:
            return TextChange(self._template.shown(self._template.around_answer(self._args)[1]))
        return TextChange(self._rebuild(), replace=True)

    def use_tools(self, tools: str) -> TextChange:
        """Tell the template of these tools, a list as JSON, from the first message on. Raises
        InvalidProgram where it knows none, or within a message."""
        if self._is_open:
            raise InvalidProgram("tools: told between messages, not in one", "tools")
        if not self._template.knows_tools:
            raise InvalidProgram("tools: the model's chat template knows none", "tools")
        self._args = TemplateArgs.of(_listed(tools), self._args.variables)
        self._is_guessed = False
        if not self._turns:
            return TextChange("")
        self._closed = 0, []
        delimiters = self._rendered_so_far(self._turns)
        self._closed = len(self._turns), delimiters
        return self._lay(delimiters)

    def drop_message(self) -> None:
        """Undo the open message. Raises InvalidProgram if there is none."""
        if not self._is_open:
            raise InvalidProgram("no message is open")
        self._forget_message()
        self._rebuild()

    def require_content(self) -> None:
        """Raises InvalidProgram in a message without content: nothing can be generated there."""
        if self._is_open and not self._turns[-1].has_content:
            raise InvalidProgram("nothing can be generated in a message without content")

    def settle(self) -> TextChange | None:
        """Replace guessed delimiters by those of a whole rendering; call before generating. Returns
        the text now, where it changed. Raises InvalidProgram, also where other messages must
        follow first."""
        if self._refusal is not None:
            raise self._refusal
        if not self._is_guessed:
            return None
        self._is_guessed = False
        self._can_guess, could_guess = False, self._can_guess
        turns = self._turns
        if not self._is_open:
            delimiters = self._rendered(turns)
            self._closed = len(turns), delimiters
        elif turns[-1].role == "assistant" and turns[-1].fields is None:
            delimiters = self._rendered(turns[:-1], open_turn=True)
        else:
            delimiters = self._rendered(turns)[:-1]
        if delimiters == self._delimiters:
            self._can_guess = could_guess
            return None
        change = self._lay(delimiters)
        if self._is_open and turns[-1].has_content:
            self.content_start = len(self.ids) - len(self._contents[-1].ids)
        return change

    def _forget_message(self) -> None:
        """The open message was never begun; `ids` still has it."""
        if self._turns.pop().has_content:
            self._contents.pop()
        self._is_open, self._prompt = False, None
        self._delimiters = list(self._closed[1]) if self._turns else []
        self._is_guessed = bool(self._turns)  # they may have been guessed when it was closed

    def _fitting(self, turn: Turn) -> Turn:
        """The turn; without content for an assistant's turn whose content the template omits."""
        if turn.role != "assistant" or turn.fields is None or not turn.has_content:
            return turn
        try:
            self._rendered([*self._turns, turn])
        except InvalidProgram as error:
            if error.field != f"messages.{len(self._turns)}.content":
                raise
            return turn.without_content()
        return turn

    def _prompt_here(self) -> tuple[array[int], str]:
        """The ids here with a generation prompt appended, and the delimiter that ends with this
        prompt."""
        prompt, _ = self._template.around_answer(self._args)
        delimiter = (self._delimiters or [""])[-1]
        return self.ids + array("i", self._template.encode(prompt)), delimiter + prompt

    def _reuse(self, find_replay: FindReplay, prompt: array[int], prompt_mark: str) -> None:
        """Replace the ids of the turn just closed by those that were generated, if its text is the
        same. `prompt`: the ids that it was generated from."""
        _, end = self._template.around_answer(self._args)
        whole = self._delimiters[-1]
        if self._turns[-1].has_content:
            whole = self._delimiters[-2] + "".join(self._contents[-1].text) + whole
        if not whole.startswith(prompt_mark) or not whole.endswith(end):
            return
        written = whole[len(prompt_mark) :].removesuffix(end)
        known = find_replay(prompt, self._template.shown(written))
        if known is not None:
            self.ids = prompt + known + array("i", self._template.encode(end))

    def _rendered_so_far(self, turns: list[Turn]) -> list[str]:
        """Also where the template wants a user's message first. What it writes behind a last
        message that waits for one is left open."""
        try:
            delimiters = self._rendered(turns)
        except InvalidProgram as refusal:
            if any(turn.role == "user" for turn in turns):
                raise
            try:
                delimiters = [*self._rendered([*turns, Turn("user")])[:-2], ""]
            except InvalidProgram:
                raise refusal from None
            self._refusal = refusal
        return delimiters

    def _rendered(self, turns: list[Turn], *, open_turn: bool = False) -> list[str]:
        """The template's delimiters, without its BOS where raw text comes before them."""
        self._refusal = None
        before = turns if open_turn else turns[:-1]
        if self._can_guess and len(before) > MIN_TURNS and len(before) == self._closed[0]:
            turn = None if open_turn else turns[-1]
            guess = grown_marks(self._template, before, self._closed[1], turn, self._args)
            if guess is not None:
                self._is_guessed = True
                return guess
        delimiters = self._template.delimiters(turns, open_turn=open_turn, args=self._args)
        if not self._raw.ids:
            return delimiters
        return [delimiters[0].removeprefix(self._tokenizer.bos_token), *delimiters[1:]]

    def _current_run(self) -> _Run:
        if self._is_open:
            return self._contents[-1]
        if self._turns:
            place = len(self._contents), len(self._delimiters[-1])
            return self._loose.setdefault(place, _Run())
        return self._raw

    def _lay(self, delimiters: list[str]) -> TextChange:
        """Make `delimiters` the branch's: by appending if that suffices, else by rebuilding."""
        old = self._delimiters or [""]
        self._delimiters = list(delimiters)
        if delimiters[:-1] == old[:-1] and delimiters[-1].startswith(old[-1]):
            fresh = delimiters[-1][len(old[-1]) :]
            self.ids.extend(self._template.encode(fresh, goes_on=bool(self.ids)))
            return TextChange(self._template.shown(fresh))
        return TextChange(self._rebuild(), replace=True)

    def _rebuild(self) -> str:
        whole = self._raw.copy()

        def append_written(text: str) -> None:
            whole.append(self._template.encode(text, goes_on=bool(whole.ids)), text)

        for index, delimiter in enumerate(self._delimiters):
            begin = 0
            for end in sorted(chars for place, chars in self._loose if place == index):
                loose = self._loose[index, end]
                append_written(delimiter[begin:end])
                whole.append(loose.ids, "".join(loose.text))
                begin = end
            append_written(delimiter[begin:])
            for content in self._contents[index : index + 1]:
                whole.append(content.ids, "".join(content.text))
        self.ids = whole.ids
        return self._template.shown("".join(whole.text))


def _content_and_rest(fields: str) -> tuple[str | None, str]:
    """A message's content, and its other fields as `Turn.of` reads them."""
    values = _parsed("fields", fields)
    if not isinstance(values, dict) or not isinstance(values.get("content"), str | None):
        raise InvalidProgram.of("fields", fields[:100], "an object whose content is a text or null")
    content = values.pop("content", None)
    return content, json.dumps(values if content else {**values, "content": None})


def _listed(tools: str) -> list[Any]:
    values = _parsed("tools", tools)
    if not isinstance(values, list) or not all(isinstance(each, dict) for each in values):
        raise InvalidProgram.of("tools", tools[:100], "a list of objects")
    return values


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidProgram(f"{name}: not JSON: {error}", name) from error
