"""The model's chat template: which marks stand around the messages of a conversation.

The template (jinja2, sandboxed) is rendered with a placeholder in place of each content, and cut at
the placeholders. So the runtime learns the marks between contents and never re-tokenizes a content.
A template that changes contents (say, drops earlier reasoning) therefore cannot do so here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import InvalidProgram, ModelLoadError
from .tokenizer import Tokenizer

_PLACEHOLDER = "\ue000{index}\ue001"  # private-use characters: no template writes them

_MAX_RENDERED_CHARS = 4 * 1024 * 1024  # guess: far above 10,000 messages' marks

# Used when a checkpoint has no template: plain labelled turns (a base model's usual prompt).
_FALLBACK = (
    "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)


class ChatTemplate:
    """Renders marks for a list of roles. Raises ModelLoadError for a template that is no jinja2."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        source = _find_template(folder, tokenizer.config)
        self.is_fallback = source is None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source or _FALLBACK)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"{folder}: the chat template is not jinja2: {error}") from error
        self._variables = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        variables = jinja2.meta.find_undeclared_variables(environment.parse(source or _FALLBACK))
        self.knows_tools = "tools" in variables
        self._cache: dict[tuple[tuple[str, ...], bool], list[str]] = {}

    def marks(
        self, roles: Sequence[str], *, open_turn: bool = False, tools: Sequence[Any] = ()
    ) -> list[str]:
        """`len(roles) + 1` texts: before the first content, between contents, after the last.

        With `open_turn` a generation prompt (an opened assistant's turn) ends the last of them;
        `tools`, in OpenAI's format, are told to a template that knows them.
        Raises InvalidProgram with the template's own words when it refuses these roles.
        """
        if tools and self.knows_tools:
            return self._render(tuple(roles), open_turn, tools)
        key = (tuple(roles), open_turn)
        if key not in self._cache:
            if len(self._cache) > 1024:
                self._cache.clear()
            self._cache[key] = self._render(key[0], open_turn)
        return self._cache[key]

    def _render(
        self, roles: tuple[str, ...], open_turn: bool, tools: Sequence[Any] = ()
    ) -> list[str]:
        slots = [_PLACEHOLDER.format(index=i) for i in range(len(roles))]
        messages = [{"role": r, "content": slot} for r, slot in zip(roles, slots, strict=True)]
        try:
            pieces = self._template.generate(
                messages=messages,
                add_generation_prompt=open_turn,
                tools=list(tools) or None,
                **self._variables,
            )
            text = _joined(pieces)
        except Exception as error:  # a template is a program: it can raise anything
            shown = ", ".join(roles)
            raise InvalidProgram(
                f"the chat template refuses the roles [{shown}]: {error}"
            ) from error
        return _split(text, slots)


def _joined(pieces: Iterable[str]) -> str:
    """The rendering, given up once it is longer than any marks can be."""
    text = ""
    for piece in pieces:
        text += piece
        if len(text) > _MAX_RENDERED_CHARS:
            raise jinja2.TemplateError(f"it wrote more than {_MAX_RENDERED_CHARS} characters")
    return text


def _split(text: str, slots: Sequence[str]) -> list[str]:
    marks = []
    for index, slot in enumerate(slots):
        before, found, text = text.partition(slot)
        if not found:
            raise InvalidProgram(f"the chat template leaves out message {index}")
        marks.append(before)
    return [*marks, text]


def _find_template(folder: Path, config: dict[str, Any]) -> str | None:
    """`chat_template.jinja` wins over tokenizer_config.json, as in transformers."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"{path}: not UTF-8: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        entries = [entry for entry in template if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: object, **options: Any) -> str:
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, **options)
