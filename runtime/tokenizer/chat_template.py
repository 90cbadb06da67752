"""The model's chat template: which role delimiters surround the messages of a conversation.

The template (jinja2, sandboxed) is rendered with a placeholder in place of each content, and split
at the placeholders. This yields the delimiters between contents, and contents are never tokenized
again. A template that changes contents (say, drops earlier reasoning) therefore cannot do so here.

Other client input (tool calls of earlier turns, tools, variables) is rendered into the delimiters,
in which special tokens are recognised. It must not create any: wherever such text contains a
special token, or ends like the beginning of one, a seam is inserted, and delimiters are tokenized
piece by piece between seams.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...errors import InvalidProgram, ModelLoadError
from .tokenizer import STRUCTURE_MARKS, Tokenizer

_MAX_RENDERED_CHARS = 4 * 1024 * 1024  # guess: far above 10,000 messages' delimiters
_MAX_CACHED_CHARS = 8 * 1024 * 1024
_MAX_VARIABLES = 64  # how many `describe` lists
_SWITCHES = ("enable_thinking", "thinking")

# Texts that identify the format in which a template asks the model to write tool calls.
_FORMAT_TOKENS = (
    *STRUCTURE_MARKS,
    "ipython",
    "<function=",
    "<arg_key>",
    "tool_calls",
    "reasoning_content",
)

# How to pass messages with fields: (arguments as objects, else as text; stand-in for no content).
_VARIANTS = ((True, None), (False, None), (True, ""), (False, ""))

_CALL = {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": "{}"}}

# Used when a checkpoint has no template: plain labelled turns (a base model's usual prompt).
_FALLBACK = (
    "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A message without its content. `fields`: JSON text of its other fields for the template."""

    role: str
    fields: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    has_content: bool = True  # False: the whole message is part of the delimiters

    @classmethod
    def of(cls, role: str, fields: str | None) -> Turn:
        """Raises InvalidProgram for fields that are not an object, or that set role or content."""
        if fields is None:
            return cls(role)
        try:
            values = json.loads(fields)
        except (ValueError, RecursionError) as error:
            raise InvalidProgram(f"fields: not JSON: {error}", "fields") from error
        if not isinstance(values, dict) or "role" in values or values.get("content") is not None:
            allowed = "an object without role and content, or with a content of null"
            raise InvalidProgram.of("fields", fields[:100], allowed)
        has_content = "content" not in values
        if not has_content and role != "assistant":
            raise InvalidProgram.of("fields", fields[:100], "without content, but for assistant")
        return cls(role, fields, values, has_content)

    def without_content(self) -> Turn:
        """The same turn, written wholly into the delimiters."""
        return Turn(self.role, self.fields, self.values, has_content=False)


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
    """Renders the delimiters of a list of messages; thread-safe. Raises ModelLoadError for a
    template that is not jinja2."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        source = _find_template(folder, tokenizer.config)
        self.is_fallback = source is None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        environment.filters["tojson"] = _to_json
        self._source = source or _FALLBACK
        try:
            self._template = environment.from_string(self._source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelLoadError(f"{folder}: the chat template is not jinja2: {error}") from error
        self._tokenizer = tokenizer
        self._variables = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        self._reads = jinja2.meta.find_undeclared_variables(environment.parse(self._source))
        self.knows_tools = "tools" in self._reads
        secret = secrets.randbits(64)  # private-use characters and a number that no text can guess
        self._placeholder = f"\ue000{secret}-{{index}}\ue001"
        self._any_placeholder = re.compile(f"\ue000{secret}-([0-9]+)\ue001")
        self._seam = f"\ue002{secret}\ue001"
        self._guard = _Guard(tokenizer.special_texts, self._seam)
        self._cache: dict[tuple[object, ...], list[str]] = {}
        self._variants: Sequence[tuple[bool, str | None]] = _VARIANTS
        self._guarded_turns: dict[tuple[Turn, bool], dict[str, Any]] = {}
        self._guarded_args: dict[bytes, dict[str, Any]] = {}
        self._num_cached_chars = 0

    @property
    def source(self) -> str:
        """The template's jinja2."""
        return self._source

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
            delimiters = self._render(turns, open_turn, args)
            self._make_room(1024 + sum(map(len, delimiters)))
            self._cache[key] = delimiters
        return delimiters

    def encode(self, delimiter: str) -> list[int]:
        """Ids of a delimiter, or of a part of one."""
        encode = self._tokenizer.encode_delimiters
        return [i for piece in delimiter.split(self._seam) for i in encode(piece)]

    def shown(self, delimiter: str) -> str:
        """A delimiter as text."""
        return delimiter.replace(self._seam, "")

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

    def describe(self) -> dict[str, Any]:
        """What an HTTP server needs to parse the model's output: the structure tokens that the
        template mentions or the tokenizer has (with their ids, if so), the variables that the
        template reads, and its generation prompts (after a user's message, after a tool's result)
        for each setting that switches reasoning on or off."""
        ids = self._tokenizer.structure_tokens
        markers = [m for m in _FORMAT_TOKENS if m in ids or m in self._source]
        return {
            "marks": {marker: ids.get(marker) for marker in markers},
            "variables": sorted(self._reads)[:_MAX_VARIABLES],
            "generation_prompts": [
                [variables, *self._generation_prompts(TemplateArgs.of((), variables))]
                for variables in ({}, *({n: on} for n in _SWITCHES for on in (False, True)))
                if self._reads.issuperset(variables)
            ],
        }

    def _generation_prompts(self, args: TemplateArgs) -> tuple[str, str]:
        prompt = self.shown(self.around_answer(args)[0])
        calls = Turn.of("assistant", json.dumps({"content": None, "tool_calls": [_CALL]}))
        result = Turn.of("tool", json.dumps({"tool_call_id": _CALL["id"], "name": "f"}))
        try:
            closed = self.delimiters(["user", calls, result], args=args)[-1]
            opened = self.delimiters(["user", calls, result], open_turn=True, args=args)[-1]
        except InvalidProgram:
            return prompt, prompt
        return prompt, self.shown(opened.removeprefix(closed))

    def _render(self, turns: Sequence[Turn], open_turn: bool, args: TemplateArgs) -> list[str]:
        """Passes calls' arguments as objects, and a missing content as None; where the template
        fails on these, as JSON text, or ""."""
        slots = [self._placeholder.format(index=i) for i in range(len(turns))]
        has_fields = any(turn.fields for turn in turns)
        variants = self._variants if has_fields else _VARIANTS[:1]
        failure: Exception | None = None
        for variant in tuple(variants):
            as_objects, nothing = variant
            try:
                messages = [
                    self._message(turn, slot if turn.has_content else nothing, as_objects)
                    for turn, slot in zip(turns, slots, strict=True)
                ]
                text = self._rendered(messages, open_turn, args)
            except Exception as error:  # a template is a program: it can raise anything
                failure = failure or error
                continue
            if has_fields:  # this variant is tried first from now on
                self._variants = sorted(self._variants, key=lambda other: other != variant)
            kept = {i: slot for i, slot in enumerate(slots) if turns[i].has_content}
            parts = self._any_placeholder.split(text)
            if list(map(int, parts[1::2])) == list(kept):
                return parts[::2]
            return _split(text, kept)
        shown = ", ".join(turn.role for turn in turns)
        message = f"the chat template refuses the roles [{shown}]: {failure}"
        raise InvalidProgram(self.shown(message)) from failure

    def _message(self, turn: Turn, content: str | None, as_objects: bool) -> dict[str, Any]:
        """The message as the template sees it; the template cannot change it."""
        key = turn, as_objects
        values = self._guarded_turns.get(key, {})
        if turn.fields is not None and not values:
            values = dict(turn.values)
            if as_objects and isinstance(calls := values.get("tool_calls"), list):
                values["tool_calls"] = [_with_object(call) for call in calls]
            values = self._guard.guarded(values)
            self._make_room(4 * len(turn.fields))  # guess: size of the values beside their text
            self._guarded_turns[key] = values
        return {**values, "role": turn.role, "content": content}

    def _rendered(self, messages: list[dict[str, Any]], open_turn: bool, args: TemplateArgs) -> str:
        values = self._guarded_args.get(args.key)
        if values is None:
            tools = self._guard.guarded(list(args.tools)) or None
            values = {**self._guard.guarded(dict(args.variables)), "tools": tools}
            self._make_room(4 * args.num_chars)
            self._guarded_args[args.key] = values
        pieces = self._template.generate(
            **{
                **values,
                **self._variables,
                "messages": messages,
                "add_generation_prompt": open_turn,
            }
        )
        return _joined(pieces)

    def _make_room(self, num_chars: int) -> None:
        """Keep the caches below a bound: drop everything once it is reached."""
        self._num_cached_chars += num_chars
        if self._num_cached_chars > _MAX_CACHED_CHARS:
            self._cache.clear()
            self._guarded_turns.clear()
            self._guarded_args.clear()
            self._num_cached_chars = num_chars


class _Guard:
    """Inserts seams into clients' texts, so that they produce no special token."""

    def __init__(self, special_texts: Iterable[str], seam: str) -> None:
        """Ignores letter case: a template may change it."""
        self._seam = seam
        texts = [text for text in special_texts if len(text) > 1]
        delimiters = [text for text in texts if not text[0].isalnum()]
        starts = sorted({text[:n] for text in delimiters for n in range(1, len(text))}, key=len)
        either = "|".join(map(re.escape, texts))
        beginning = "|".join(map(re.escape, reversed(starts)))
        self._inner = re.compile(f"(?=(?:{either}))(.)", re.I | re.S) if texts else None
        self._last = re.compile(f"(?:{beginning})\\Z", re.I) if delimiters else None
        self._longest = max(map(len, texts), default=0)

    def guarded(self, value: Any) -> Any:
        """A JSON value with all its texts guarded."""
        if isinstance(value, str):
            return self._guarded_text(value)
        if isinstance(value, list):
            return [self.guarded(item) for item in value]
        if isinstance(value, dict):
            return {self._guarded_name(name): self.guarded(item) for name, item in value.items()}
        return value

    def _guarded_name(self, name: str) -> str:
        """Leaves identifiers as they are: a template looks things up by them."""
        return name if name.isidentifier() else self._guarded_text(name)

    def _guarded_text(self, text: str) -> str:
        if self._inner is not None:
            text = self._inner.sub(lambda found: found[1] + self._seam, text)
        start = max(0, len(text) - self._longest)
        ends_in_one = self._last is not None and self._last.search(text, start)
        return text + self._seam if ends_in_one else text


def _with_object(call: Any) -> Any:
    """A call with its arguments as an object, if they are the JSON text of one."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    try:
        arguments = json.loads(function.get("arguments", ""))
    except (ValueError, TypeError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _joined(pieces: Iterable[str]) -> str:
    """The rendered text; gives up once it is longer than any delimiters can be."""
    text = ""
    for piece in pieces:
        text += piece
        if len(text) > _MAX_RENDERED_CHARS:
            raise jinja2.TemplateError(f"it wrote more than {_MAX_RENDERED_CHARS} characters")
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


def _find_template(folder: Path, config: dict[str, Any]) -> str | None:
    """`chat_template.jinja` wins over tokenizer_config.json, as in transformers."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"{path}: not UTF-8: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        entries = [entry for entry in template if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: object, **options: Any) -> str:
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, **options)
