"""Whole chats under templates in the manner of real ones: the token ids are transformers'."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from chats import CHATS, CONTINUED, KINDS, TEMPLATES, WEATHER, make_tokenizer, parts, said

from stemma.errors import InvalidProgram
from stemma.frontend.protocol.chat_message import Message
from stemma.runtime.tokenizer import tokenizer as tokenizer_module
from stemma.runtime.tokenizer.chat_template import ChatTemplate, TemplateArgs
from stemma.runtime.tokenizer.tokenizer import Tokenizer
from stemma.runtime.tokenizer.whole_chat import chat_prompt

# Where this differs from transformers on purpose, and why.
IN_PARTS = {"parts", "system_parts"}  # a template that knows no lists gets their text
NO_TEXT = {"called", "called_and_said", "two_calls"}  # and one that wants a content gets one


class Peer:
    """transformers' tokenizer of a folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def ids(
        self, source: str, messages: Sequence[dict[str, Any]], tools: Sequence[Any], **more: Any
    ) -> list[int] | None:
        """None where it refuses."""
        chat = json.loads(json.dumps(messages))
        for message in chat:
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        try:
            found: list[int] = self._tokenizer.apply_chat_template(
                chat, tools=list(tools) or None, chat_template=source, return_dict=False, **more
            )
        except Exception:
            return None
        return found


def message_of(given: dict[str, Any]) -> Message:
    """As the server makes it of a client's."""
    fields = {name: v for name, v in given.items() if name not in ("role", "content")}
    content, lengths = given["content"], ()
    if content is None:
        content, fields["content"] = "", None
    elif isinstance(content, list):
        texts = [part["text"] for part in content]
        content, lengths = "".join(texts), tuple(map(len, texts))
    return Message(given["role"], content, json.dumps(fields) if fields else None, lengths)


def ids_of(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], tools: Sequence[Any] = ()
) -> list[int] | None:
    """None where it refuses."""
    try:
        args = TemplateArgs.of(tools)
        return chat_prompt(template, [*map(message_of, messages)], args).ids.tolist()
    except InvalidProgram:
        return None


@pytest.fixture(scope="module", params=KINDS)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Tokenizer, Peer]]:
    folder = tmp_path_factory.mktemp(request.param)
    num_tokens = make_tokenizer(folder, request.param)
    tokenizer = Tokenizer(folder, num_tokens)
    yield tokenizer, Peer(folder)
    tokenizer.close()


def load(folder: Path, tokenizer: Tokenizer, source: str) -> ChatTemplate:
    (folder / "chat_template.jinja").write_text(source)
    return ChatTemplate(folder, tokenizer)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_ids_of_a_whole_chat_are_those_of_transformers(
    world: tuple[Tokenizer, Peer], tmp_path: Path, name: str
) -> None:
    tokenizer, peer = world
    template = load(tmp_path, tokenizer, TEMPLATES[name])
    num_rendered = 0
    for label, messages in {**CHATS, **CONTINUED}.items():
        is_continued = label in CONTINUED
        how = {
            "add_generation_prompt": not is_continued,
            "continue_final_message": is_continued,
            "sanitize_control_tokens": label == "markup",  # clients' text makes no special token
        }
        for tools in ((), (WEATHER,)):
            theirs = peer.ids(TEMPLATES[name], messages, tools, **how)
            ours = ids_of(template, messages, tools)
            num_rendered += ours is not None
            if label in IN_PARTS and ours != theirs:
                flat = [{**m, "content": "".join(p["text"] for p in m["content"])}
                        for m in messages]  # fmt: skip
                theirs = peer.ids(TEMPLATES[name], flat, tools, **how)
            if label in NO_TEXT and theirs is None and ours is not None:
                continue
            assert ours == theirs, (label, tools)
    assert num_rendered >= 28, "about half of them"


def test_a_template_that_opens_the_answer_otherwise_goes_on_behind_its_own_words(
    world: tuple[Tokenizer, Peer], tmp_path: Path
) -> None:
    """transformers refuses to go on with a message that the template changes."""
    tokenizer, peer = world
    thought = [said("user", "1+1?"), said("assistant", "<think>\nOne\n</think>\n\nIt")]
    source = TEMPLATES["deepseek_r1"]
    assert peer.ids(source, thought, (), continue_final_message=True) is None
    prompt = chat_prompt(load(tmp_path, tokenizer, source), [*map(message_of, thought)])
    assert prompt.text.endswith("<|User|>1+1?<|Assistant|><think>\n" + thought[1]["content"])


@pytest.mark.parametrize("name", ["qwen25_tools", "mistral_v1", "phi3", "llama2"])
def test_long_texts_are_looked_up_and_the_ids_are_the_same(
    world: tuple[Tokenizer, Peer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Sections between special tokens are tokenized alone."""
    tokenizer, peer = world
    template = load(tmp_path, tokenizer, TEMPLATES[name])
    long = [said("user", "A  tree is a\n plant." * 3), said("assistant", " Yes.\n" * 9),
            said("user", "\n\ndo it " * 5)]  # fmt: skip
    for num_chars in (1, 8, 40):
        monkeypatch.setattr(tokenizer_module, "LONG_CHARS", num_chars)
        for messages in (long, CHATS["system_turns"], CHATS["blanks"], CHATS["unicode"]):
            expected = peer.ids(TEMPLATES[name], messages, (), add_generation_prompt=True)
            assert ids_of(template, messages) == expected


def test_a_generated_turn_keeps_its_ids_and_all_else_is_as_in_transformers(
    world: tuple[Tokenizer, Peer], tmp_path: Path
) -> None:
    tokenizer, peer = world
    template = load(tmp_path, tokenizer, TEMPLATES["chatml_default_system"])
    first = chat_prompt(template, [Message("user", "Hi")])
    letters = [i for letter in "Hello" for i in tokenizer.encode_inner(letter)]
    known = first.ids + type(first.ids)("i", letters)

    def find(digest: bytes, written: str, behind: Sequence[str]) -> Any:
        is_it = digest == first.digest and written.startswith("Hello")
        return ("Hello", known) if is_it and written.startswith(tuple(behind), 5) else None

    chat = [said("user", "Hi"), said("assistant", "Hello"), said("user", "do it")]
    given = [*map(message_of, chat)]
    prompt = chat_prompt(template, given, find_turn=find)
    assert prompt.ids[: len(known)] == known
    how = {"add_generation_prompt": True}
    theirs = peer.ids(TEMPLATES["chatml_default_system"], chat, (), **how) or []
    num_behind = len(prompt.ids) - len(known)
    if "<|im_end|>" in tokenizer.special_texts:
        assert prompt.ids[len(known) :].tolist() == theirs[-num_behind:]
    assert tokenizer.decode(prompt.ids, skip_special=False) == tokenizer.decode(
        theirs, skip_special=False
    )
    changed = [given[0], Message("assistant", "Hello!"), given[2]]
    plain = chat_prompt(template, changed, find_turn=find)
    assert plain.ids == chat_prompt(template, changed).ids


def test_a_refusal_has_the_templates_own_words(
    world: tuple[Tokenizer, Peer], tmp_path: Path
) -> None:
    template = load(tmp_path, world[0], TEMPLATES["gemma2"])
    with pytest.raises(InvalidProgram, match="System role not supported") as refused:
        chat_prompt(template, [Message("system", "a"), Message("user", "b")])
    assert refused.value.field == "messages"


def test_a_list_of_parts_reaches_templates_that_know_lists(
    world: tuple[Tokenizer, Peer], tmp_path: Path
) -> None:
    counting = (
        "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
    )
    template = load(tmp_path, world[0], counting)
    chat = [message_of(said("user", parts("a", "", "b")))]
    assert chat_prompt(template, chat).text == "<a><><b>"


def test_no_message_is_no_chat(world: tuple[Tokenizer, Peer], tmp_path: Path) -> None:
    template = load(tmp_path, world[0], TEMPLATES["internlm"])
    for messages in ([], [Message("assistant", "")]):
        with pytest.raises(InvalidProgram, match="messages"):
            chat_prompt(template, messages)
