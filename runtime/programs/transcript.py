"""The tokens of one branch: text, generated ids and chat marks, in the order they were appended.

Token identity: ids are never tokenized again. A text segment is tokenized alone; what a model
generated stays the ids it generated. Marks of the chat template are appended when the rendering of
k messages is a prefix of that of k + 1 (nearly always); else the marks are laid anew around the
same contents, and the radix tree finds out how much of the branch it still has.

    marks     <|begin|><|user|>      <|end|><|assistant|>       <|end|>
    contents                   Hello                     Hi!
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ...errors import InvalidProgram
from ..chat_template import ChatTemplate
from ..tokenizer import Tokenizer

_ROLE = re.compile(r"[a-z][a-z_-]{0,31}")


@dataclass(slots=True)
class _Run:
    """Ids with the text they stand for; if it lies within a mark, then after `mark_chars` of it."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    text: list[str] = field(default_factory=list)
    mark_chars: int = 0

    def append(self, ids: Iterable[int], text: str) -> None:
        self.ids.extend(ids)
        self.text.append(text)

    def copy(self) -> _Run:
        return _Run(self.ids[:], self.text[:], self.mark_chars)


@dataclass(frozen=True, slots=True)
class Marked:
    """What a role appended to the branch's text; with `replace`, the whole text so far."""

    text: str
    replace: bool = False


class Transcript:
    """Ids of a branch, growing; `copy` gives a fork its own.

    Invariant: `ids` is the raw prefix, then mark, content, mark, content, ... with text that was
    appended outside of any message (`_loose`) within the mark between its neighbours, where the
    message before it ended.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, tools: tuple[Any, ...] = ()
    ) -> None:
        """`tools`: what the template is told of, in OpenAI's format."""
        self._tokenizer = tokenizer
        self._template = template
        self._tools = tools
        self.ids = array("i")
        self.content_start = 0  # where the open message's content begins in `ids`
        self._raw = _Run()
        self._roles: list[str] = []
        self._marks: list[str] = []
        self._contents: list[_Run] = []
        self._loose: dict[int, _Run] = {}
        self._is_open = False

    def copy(self) -> Transcript:
        """An independent transcript with the same content."""
        twin = Transcript(self._tokenizer, self._template, self._tools)
        twin.ids = self.ids[:]
        twin.content_start = self.content_start
        twin._raw = self._raw.copy()
        twin._roles = self._roles[:]
        twin._marks = self._marks[:]
        twin._contents = [run.copy() for run in self._contents]
        twin._loose = {index: run.copy() for index, run in self._loose.items()}
        twin._is_open = self._is_open
        return twin

    @property
    def open_role(self) -> str | None:
        """The role of the message being written, or None between messages."""
        return self._roles[-1] if self._is_open else None

    def append_text(self, text: str) -> None:
        """Append a text segment, tokenized alone; the branch's first one is led by BOS."""
        self.append_ids(self._tokenizer.encode(text), text)

    def append_ids(self, ids: Iterable[int], text: str, *, has_bos: bool = False) -> None:
        """Append ids that stand for `text`; BOS leads the branch's first ones, unless they have
        it."""
        if not self.ids and not self._roles and not has_bos:
            bos = self._tokenizer.bos_ids
            self._raw.append(bos, "")
            self.ids.extend(bos)
        ids = list(ids)
        self._current_run().append(ids, text)
        self.ids.extend(ids)

    def begin_role(self, role: str) -> Marked:
        """Open a message. Raises InvalidProgram if one is open or the template refuses."""
        if self._is_open:
            raise InvalidProgram(f"{role} message begun inside a {self._roles[-1]} message")
        if not _ROLE.fullmatch(role):  # it goes into marks, where special tokens are recognised
            raise InvalidProgram.of("role", role, "a word such as system, user or assistant")
        if role == "assistant":
            marks = self._rendered(self._roles, open_turn=True)
        else:
            marks = self._rendered([*self._roles, role])[:-1]
        marked = self._lay(marks)
        self._roles.append(role)
        self._contents.append(_Run())
        self._is_open = True
        self.content_start = len(self.ids)
        return marked

    def end_role(self) -> Marked:
        """Close the open message. Raises InvalidProgram if none is."""
        if not self._is_open:
            raise InvalidProgram("no message is open")
        self._is_open = False
        self._marks.append("")
        return self._lay(self._rendered(self._roles))

    def _rendered(self, roles: list[str], *, open_turn: bool = False) -> list[str]:
        """The template's marks, without its BOS where raw text has brought one."""
        marks = self._template.marks(roles, open_turn=open_turn, tools=self._tools)
        if not self._raw.ids:
            return marks
        return [marks[0].removeprefix(self._tokenizer.bos_token), *marks[1:]]

    def _current_run(self) -> _Run:
        if self._is_open:
            return self._contents[-1]
        if self._roles:
            place = _Run(mark_chars=len(self._marks[-1]))
            return self._loose.setdefault(len(self._roles), place)
        return self._raw

    def _lay(self, marks: list[str]) -> Marked:
        """Make `marks` the branch's marks: by appending if that suffices, else anew."""
        old = self._marks or [""]
        self._marks = list(marks)
        if marks[:-1] == old[:-1] and marks[-1].startswith(old[-1]):
            fresh = marks[-1][len(old[-1]) :]
            self.ids.extend(self._tokenizer.encode_marks(fresh))
            return Marked(fresh)
        return Marked(self._rebuild(), replace=True)

    def _rebuild(self) -> str:
        encode, whole = self._tokenizer.encode_marks, self._raw.copy()
        for index, mark in enumerate(self._marks):
            loose = self._loose.get(index, _Run(mark_chars=len(mark)))
            before, after = mark[: loose.mark_chars], mark[loose.mark_chars :]
            whole.append(encode(before), before)
            whole.append(loose.ids, "".join(loose.text))
            whole.append(encode(after), after)
            for content in self._contents[index : index + 1]:
                whole.append(content.ids, "".join(content.text))
        self.ids = whole.ids
        return "".join(whole.text)
