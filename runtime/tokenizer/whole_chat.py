"""A chat that a client sends whole, as token ids: those that transformers gives its messages.

One thing may differ. A client sends a model's earlier turn back as text, and that text, tokenized
again, is often other tokens than were generated: their KV would not be found. So the ids of a chat
up to the end of a generated turn are remembered by what was written there, and what is behind is
tokenized as it goes on:

    prompt of turn n     |<user>Hi</s><assistant>|
    its output                                   |Hel|lo|
    prompt of turn n+1   |<user>Hi</s><assistant>Hello|</s><user>...
                         \\------ remembered -----/\\-- tokenized --

Where a template writes history otherwise than it was generated (trimmed, without its reasoning),
the texts differ, and the turn is tokenized as the template writes it now.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...errors import InvalidProgram
from ...frontend.protocol.chat_message import Message
from .chat_template import NO_TEMPLATE_ARGS, ChatTemplate, TemplateArgs
from .template_message import TemplateMessage

_EMPTY_ANSWER = Message("assistant", "")
_MAX_TURNS_TRIED = 4  # of the last ones: each is a rendering

FindTurn = Callable[[bytes, str, Sequence[str]], "tuple[str, array[int]] | None"]
"""(digest of a prompt, what is written behind it now, what may be behind an answer) -> the answer
that was generated to this prompt and stands there, and the ids of both, if they are known."""


class ChatPrompt(NamedTuple):
    """What a chat becomes; `digest`: of its text."""

    ids: array[int]
    text: str
    digest: bytes


def chat_prompt(
    template: ChatTemplate,
    messages: Sequence[Message],
    args: TemplateArgs = NO_TEMPLATE_ARGS,
    *,
    opens_turn: bool = True,
    find_turn: FindTurn | None = None,
) -> ChatPrompt:
    """`opens_turn` adds the generation prompt. In place of that a last message of the assistant's
    is left open; one that is empty stands for the generation prompt.

    Raises InvalidProgram, with the template's own message where it refuses, and InvalidRequest for
    a text that cannot be tokenized.
    """
    is_begun = opens_turn and bool(messages) and messages[-1].role == "assistant"
    is_continued = is_begun and messages[-1] != _EMPTY_ANSWER
    messages = messages[:-1] if is_begun and not is_continued else messages
    if not messages:
        raise InvalidProgram.of("messages", [], "at least one message, and not of nothing")
    written = template.messages(messages)
    if is_continued:
        text = template.write_continued(written, args)
    else:
        text = template.write(written, open_turn=opens_turn, args=args)
    known = None
    if find_turn is not None:
        answers = [i for i, m in enumerate(messages) if m.role == "assistant" and i > 0]
        earlier = answers[:-1] if is_continued else answers
        tried = [written[:i] for i in reversed(earlier[-_MAX_TURNS_TRIED:])]
        known = _known_beginning(template, tried, text, args, find_turn)
    if known is None:
        ids = template.encode(text, goes_on=False)
    else:
        ids = known[1] + template.encode(text[known[0] :])
    return ChatPrompt(ids, template.shown(text), _digest(text))


def _known_beginning(
    template: ChatTemplate,
    before: Sequence[Sequence[TemplateMessage]],
    text: str,
    args: TemplateArgs,
    find_turn: FindTurn,
) -> tuple[int, array[int]] | None:
    """How much of a chat's text has known ids, and these. `before`: the messages before each answer
    to try."""
    behind = template.behind_answers(args)
    for messages in before:
        try:
            prompt = template.write(messages, open_turn=True, args=args)
        except InvalidProgram:
            continue
        if text.startswith(prompt):
            found = find_turn(_digest(prompt), text[len(prompt) :], behind)
            if found is not None:
                return len(prompt) + len(found[0]), found[1]
    return None


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
