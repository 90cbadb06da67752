"""The model's chat template, rendered in two ways.

Of a chat that a client sends whole, `write` renders the text, as transformers does. Of a program's
messages, `delimiters` has what surrounds their contents, which then are tokenized alone: the
template is rendered with a placeholder in place of each, and split there. A template that changes
contents (trims them, drops earlier reasoning) cannot do so in a program.

Text of clients must create no special token, see `client_text`.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from ...errors import InvalidProgram, ModelLoadError
from ...frontend.chat_format.registry import FORMAT_MARKS, STRUCTURE_MARKS
from ...frontend.protocol.chat_message import Message
from .client_text import ClientTextGuard
from .template_files import DEFAULT, TOOL_USE, find_templates
from .template_message import NOTHING, Arguments, TemplateMessage, Turn
from .template_sandbox import template_sandbox, to_json
from .tokenizer import Tokenizer

_MAX_RENDERED_CHARS = 4 * 1024 * 1024  # beside contents; guess: far above 10,000 messages'
_MAX_CACHED_CHARS = 8 * 1024 * 1024
_MAX_VARIABLES = 64  # how many `describe` lists
_SWITCHES = ("enable_thinking", "thinking")
_MARKS = (*FORMAT_MARKS, "tool_calls", "reasoning_content")

_READS_THINKING = re.compile(r"""\.thinking\b|\[['"]thinking['"]\]|['"]thinking['"] in """)

# Messages with calls: (their arguments, stand-in for no content). The first is transformers'; the
# others are for templates that fail over it.
_FORMS: tuple[tuple[Arguments, ...], ...] = (("objects", "texts"), ("held texts",))
_VARIANTS = tuple(
    (form, nothing) for forms in _FORMS for nothing in (NOTHING, None, "") for form in forms
)

_CALL = {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_CALLED = (
    Message("user", ""),
    Message("assistant", "", json.dumps({"content": None, "tool_calls": [_CALL]})),
    Message("tool", "", json.dumps({"tool_call_id": _CALL["id"], "name": "f"})),
)

# Used when a checkpoint has no template: plain labelled turns (a base model's usual prompt).
_FALLBACK = (
    "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)


@dataclass(frozen=True, slots=True)
class TemplateArgs:
    """A template's input besides messages: tools in OpenAI's format, and template variables."""

    tools: tuple[Any, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    key: bytes = b""  # equal for equal arguments
    num_chars: int = 0  # length of all of it as JSON

    @classmethod
    def of(cls, tools: Sequence[Any], variables: Mapping[str, Any] | None = None) -> TemplateArgs:
        """From JSON values."""
        whole = json.dumps([list(tools), variables or {}], sort_keys=True).encode()
        key = hashlib.blake2b(whole, digest_size=16).digest()
        return cls(tuple(tools), variables or {}, key, len(whole))


NO_TEMPLATE_ARGS = TemplateArgs()


class ChatTemplate:
    """Renders messages; thread-safe. Raises ModelLoadError for a template that is not jinja2,
    InvalidRequest for a `chosen` one that is not there."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        chosen: str | None = None,
        *,
        image_token: str | None = None,
    ) -> None:
        """`chosen`: name or file of the template to use for everything; `image_token`: by which it
        stands in for an image, where the model reads them."""
        sources = find_templates(folder, tokenizer.config, chosen)
        self.is_fallback = not sources
        sources = sources or {DEFAULT: _FALLBACK}
        self._default, self._source = sources[DEFAULT], "\n".join(sources.values())
        self._guard = ClientTextGuard(tokenizer.special_texts, STRUCTURE_MARKS)
        secret = secrets.randbits(64)  # private-use characters and a number that no text can guess
        self._image_token = image_token or ""
        self._image = f"\ue005{secret}\ue006"  # what the template writes in place of that token
        self._placed_image = re.compile(f"\ue005{secret}:(-[0-9]+)x([0-9]+)\ue006")
        if image_token:
            sources = {n: s.replace(image_token, self._image) for n, s in sources.items()}
        environment = template_sandbox(self._to_json)
        find_reads = jinja2.meta.find_undeclared_variables
        try:
            parsed = {name: environment.parse(source) for name, source in sources.items()}
            self._reads = frozenset().union(*map(find_reads, parsed.values()))
            self._templates = {n: environment.from_string(tree) for n, tree in parsed.items()}
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelLoadError(f"{folder}: the chat template is not jinja2: {error}") from error
        self._tokenizer = tokenizer
        self.knows_tools = "tools" in self._reads or TOOL_USE in sources
        self._placeholder = f"\ue000{secret}-{{index}}\ue001"
        self._any_placeholder = re.compile(f"\ue000{secret}-([0-9]+)\ue001")
        self._cache: dict[tuple[object, ...], list[str]] = {}
        self._guarded_args: dict[bytes, dict[str, Any]] = {}
        self._num_cached_chars = 0
        self._takes_parts = self._probe_parts()
        self._around_image = self._probe_image() if image_token else None

    # --- chats ------------------------------------------------------------------------------------

    def messages(self, messages: Sequence[Message]) -> list[TemplateMessage]:
        """A chat's messages, ready to be written; their images are by `place`. Raises
        InvalidProgram."""
        if self._around_image is None and any(message.images for message in messages):
            raise _knows_no_images()
        guarded, takes_parts = self._guard.guarded, self._takes_parts
        return [
            TemplateMessage(message, index, guarded, takes_parts=takes_parts)
            for index, message in enumerate(messages)
        ]

    def write(
        self,
        messages: Sequence[TemplateMessage],
        *,
        open_turn: bool = False,
        args: TemplateArgs = NO_TEMPLATE_ARGS,
    ) -> str:
        """The whole text of a chat, with the guard's marks in it; with `open_turn` it ends with a
        generation prompt. Raises InvalidProgram with the template's own message."""
        failure: Exception | None = None
        has_variants = any(message.has_variants for message in messages)
        for arguments, nothing in _VARIANTS if has_variants else _VARIANTS[:1]:
            try:
                values = [m.values(arguments=arguments, nothing=nothing) for m in messages]
                text = self._rendered(values, open_turn, args)
            except Exception as error:  # a template is a program: it can raise anything
                failure = failure or error
            else:
                return self._with_images(text, [slot for m in messages for slot in m.images])
        raise self._refusal([message.role for message in messages], failure) from failure

    def write_continued(
        self, messages: Sequence[TemplateMessage], args: TemplateArgs = NO_TEMPLATE_ARGS
    ) -> str:
        """The text of a chat up to the end of its last content, which goes on. Where the template
        does not write that content as it is, it is put behind a generation prompt. Raises
        InvalidProgram."""
        last = messages[-1]
        end = self._placeholder.format(index="end")
        content: str = last.content[-1]["text"] if isinstance(last.content, list) else last.content
        text = self.write([*messages[:-1], last.followed_by(end + " ")], args=args)
        before, found, after = text.rpartition(end)
        if found and content.strip() in before:
            return before if after.startswith(" ") else before.rstrip()
        return self.write(messages[:-1], open_turn=True, args=args) + content

    def encode(self, text: str, *, goes_on: bool = True) -> array[int]:
        """Ids of a rendered text, or of a part of one: the template's special tokens are
        recognised, clients' are not. `goes_on`: it is behind other text."""
        if not self._image_token:
            return self._encoded(text, goes_on)
        parts = self._placed_image.split(text)
        ids = self._encoded(parts[0], goes_on)
        for token_id, num_tokens, part in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            ids.extend(array("i", [int(token_id)]) * int(num_tokens))
            ids.extend(self._encoded(part, True))
        return ids

    def _encoded(self, text: str, goes_on: bool) -> array[int]:
        ids = array("i")
        for piece, is_plain in self._guard.pieces(text):
            if is_plain:
                ids.extend(self._tokenizer.encode_inner(piece))
            else:
                ids.extend(self._tokenizer.encode_rendered(piece, goes_on=goes_on))
            goes_on = True
        return ids

    def shown(self, text: str) -> str:
        """A rendered text, or a part of one, as it reads."""
        text = self._guard.shown(text)
        return self._placed_image.sub(self._image_token, text) if self._image_token else text

    # --- images -----------------------------------------------------------------------------------

    def place(self, token_id: int, num_tokens: int) -> str:
        """What stands for an image in a rendered text: `encode` makes of it so many tokens."""
        return f"{self._image[:-1]}:{token_id}x{num_tokens}{self._image[-1]}"

    def image_text(self, token_id: int, num_tokens: int) -> str:
        """An image as the template writes it within a user's message. Raises InvalidProgram."""
        if self._around_image is None:
            raise _knows_no_images()
        return self._around_image.replace(self._image, self.place(token_id, num_tokens))

    def _with_images(self, text: str, placed: Sequence[str]) -> str:
        """The rendered text with the images in place of the template's stand-ins."""
        if not placed:
            return text
        parts = text.split(self._image)
        if len(parts) != len(placed) + 1:
            written = f"{len(parts) - 1} of {len(placed)} images"
            raise InvalidProgram(f"the chat template writes {written}", "messages")
        return parts[0] + "".join(map("".join, zip(placed, parts[1:], strict=True)))

    def _probe_image(self) -> str | None:
        """How the template writes an image between two texts, with the stand-in; None: it knows no
        images."""
        first, last = (self._placeholder.format(index=index) for index in range(2))
        texts = ({"type": "text", "text": slot} for slot in (first, last))
        parts = [next(texts), {"type": "image"}, next(texts)]
        try:
            text = self._rendered([{"role": "user", "content": parts}], False, NO_TEMPLATE_ARGS)
        except Exception:  # a template is a program: it can raise anything
            return None
        between = text.partition(first)[2].partition(last)[0]
        return between if between.count(self._image) == 1 and last in text else None

    # --- programs' messages -----------------------------------------------------------------------

    @property
    def source(self) -> str:
        """The jinja2 of the template that is used without tools."""
        return self._default

    def delimiters(
        self,
        messages: Sequence[str | Turn],
        *,
        open_turn: bool = False,
        args: TemplateArgs = NO_TEMPLATE_ARGS,
    ) -> list[str]:
        """The texts before the first content, between contents, and after the last: one more than
        there are contents.

        A plain role is a message without fields. With `open_turn` a generation prompt (an opened
        assistant's turn) ends the last text. Raises InvalidProgram with the template's own message
        when it refuses these messages; `field` names a message whose content is left out.
        """
        turns = tuple(Turn(m) if isinstance(m, str) else m for m in messages)
        if not args.variables and not self.knows_tools:
            args = NO_TEMPLATE_ARGS
        key = (turns, open_turn, args.key)
        delimiters = self._cache.get(key)
        if delimiters is None:
            delimiters = self._delimiters(turns, open_turn, args)
            self._make_room(1024 + sum(map(len, delimiters)))
            self._cache[key] = delimiters
        return delimiters

    def around_answer(self, args: TemplateArgs = NO_TEMPLATE_ARGS) -> tuple[str, str]:
        """The generation prompt and the text after an answer, as in a short conversation; "" where
        the template refuses that."""
        try:
            closed = self.delimiters(["user"], args=args)[-1]
            opened = self.delimiters(["user"], open_turn=True, args=args)[-1]
            after = self.delimiters(["user", "assistant"], args=args)[-1]
            return opened.removeprefix(closed), after
        except InvalidProgram:
            return "", ""

    def behind_answers(self, args: TemplateArgs = NO_TEMPLATE_ARGS) -> Sequence[str]:
        """What may be behind an answer: at the end of a chat, and before a user's message."""
        found = [self.around_answer(args)[1]]
        with suppress(InvalidProgram):
            found.append(self.delimiters(["user", "assistant", "user"], args=args)[2])
        return [text for text in found if text]

    def describe(self) -> dict[str, Any]:
        """What an HTTP server needs to parse the model's output: the marks of formats that the
        template has or the tokenizer (with their ids, if so), which of them the template has, the
        variables that it reads, and its generation prompts (after a user's message, after a tool's
        result) for each setting that switches reasoning on or off."""
        ids = self._tokenizer.structure_tokens
        written = [mark for mark in _MARKS if mark in self._source]
        markers = [mark for mark in _MARKS if mark in ids or mark in written]
        if "reasoning_content" not in markers and _READS_THINKING.search(self._source):
            markers.append("reasoning_content")
        return {
            "marks": {marker: ids.get(marker) for marker in markers},
            "written_marks": written,
            "takes_one_call": self._takes_one_call(),
            "variables": sorted(self._reads)[:_MAX_VARIABLES],
            "generation_prompts": [
                [variables, *self._generation_prompts(TemplateArgs.of((), variables))]
                for variables in ({}, *({n: on} for n in _SWITCHES for on in (False, True)))
                if self._reads.issuperset(variables)
            ],
        }

    # --- within -----------------------------------------------------------------------------------

    def _takes_one_call(self) -> bool:
        """Whether the template fails over a message with several calls."""
        asked, called, told = _CALLED
        calls = [_CALL, {**_CALL, "id": "call67890"}]
        both = json.dumps({"content": None, "tool_calls": calls})
        other = json.dumps({"tool_call_id": calls[1]["id"], "name": "f"})
        several = (asked, called._replace(fields=both), told, told._replace(fields=other))
        try:
            self.write(self.messages(_CALLED))
        except InvalidProgram:
            return False
        try:
            self.write(self.messages(several))
        except InvalidProgram:
            return True
        return False

    def _generation_prompts(self, args: TemplateArgs) -> tuple[str, str]:
        prompt = self.shown(self.around_answer(args)[0])
        messages = self.messages(_CALLED)
        try:
            closed = self.write(messages, args=args)
            opened = self.write(messages, open_turn=True, args=args)
        except InvalidProgram:
            return prompt, prompt
        return prompt, self.shown(opened.removeprefix(closed))

    def _delimiters(self, turns: Sequence[Turn], open_turn: bool, args: TemplateArgs) -> list[str]:
        slots = {
            index: self._placeholder.format(index=index)
            for index, turn in enumerate(turns)
            if turn.has_content
        }
        plain = self.messages([Message(turn.role, "", turn.fields) for turn in turns])
        held = [message.holding(slots.get(i, NOTHING)) for i, message in enumerate(plain)]
        text = self.write(held, open_turn=open_turn, args=args)
        parts = self._any_placeholder.split(text)
        if list(map(int, parts[1::2])) == list(slots):
            return parts[::2]
        return _split(text, slots)

    def _refusal(self, roles: Sequence[str], failure: Exception | None) -> InvalidProgram:
        shown = ", ".join(roles[:64]) + (", ..." if len(roles) > 64 else "")
        message = f"the chat template refuses the roles [{shown}]: {failure}"
        return InvalidProgram(self.shown(message), "messages")

    def _rendered(self, messages: list[dict[str, Any]], open_turn: bool, args: TemplateArgs) -> str:
        template = self._templates.get(TOOL_USE) if args.tools else None
        most = _MAX_RENDERED_CHARS + 2 * sum(_num_chars(message) for message in messages)
        pieces = (template or self._templates[DEFAULT]).generate(
            **{
                **self._values_of(args),
                **self._tokenizer.named_tokens,
                "messages": messages,
                "add_generation_prompt": open_turn,
            }
        )
        return _joined(pieces, most)

    def _values_of(self, args: TemplateArgs) -> dict[str, Any]:
        values = self._guarded_args.get(args.key)
        if values is None:
            tools = self._guard.guarded(list(args.tools)) or None
            variables = self._guard.guarded(dict(args.variables))
            values = {"documents": None, **variables, "tools": tools}
            self._make_room(4 * args.num_chars)
            self._guarded_args[args.key] = values
        return values

    def _to_json(self, value: object, **options: Any) -> str:
        text = to_json(value, **options)
        return self._guard.unescaped(text) if options.get("ensure_ascii") else text

    def _probe_parts(self) -> bool:
        """Whether the template writes a content that is a list of parts."""
        slots = [self._placeholder.format(index=index) for index in range(2)]
        parts = [{"type": "text", "text": slot} for slot in slots]
        try:
            text = self._rendered([{"role": "user", "content": parts}], False, NO_TEMPLATE_ARGS)
        except Exception:  # a template is a program: it can raise anything
            return False
        return all(slot in text for slot in slots) and "'text'" not in text

    def _make_room(self, num_chars: int) -> None:
        """Keep the caches below a bound: drop everything once it is reached."""
        self._num_cached_chars += num_chars
        if self._num_cached_chars > _MAX_CACHED_CHARS:
            self._cache.clear()
            self._guarded_args.clear()
            self._num_cached_chars = num_chars


def _knows_no_images() -> InvalidProgram:
    return InvalidProgram("image: the model's chat template knows none", "image")


def _num_chars(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    if isinstance(content, list):
        return sum(len(part.get("text", "")) for part in content)
    return len(content or "")


def _joined(pieces: Iterable[str], most: int) -> str:
    """The rendered text; gives up once it is longer than it can be."""
    text = ""
    for piece in pieces:
        text += piece
        if len(text) > most:
            raise jinja2.TemplateError(f"it wrote more than {most} characters")
    return text


def _split(text: str, slots: Mapping[int, str]) -> list[str]:
    """Split at `slots`, by message index; each must appear exactly once and in order, or
    InvalidProgram is raised."""
    delimiters = []
    for index, slot in slots.items():
        before, found, text = text.partition(slot)
        if not found:
            field = f"messages.{index}.content"
            raise InvalidProgram(f"the chat template leaves out message {index}", field)
        if slot in text:
            raise InvalidProgram(f"the chat template writes message {index} twice")
        delimiters.append(before)
    return [*delimiters, text]
