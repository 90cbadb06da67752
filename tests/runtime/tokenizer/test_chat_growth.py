"""Marks of long conversations: guessed from short ones, and right before anything is generated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from templates import HERMES_TOOLS, LLAMA3_TOOLS, MISTRAL_TOOLS

from stemma.runtime.tokenizer.chat_growth import MIN_TURNS
from stemma.runtime.tokenizer.chat_template import ChatTemplate
from stemma.runtime.tokenizer.tokenizer import Tokenizer
from stemma.runtime.tokenizer.transcript import Transcript

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COUNTED = (  # no message reads as its neighbours have it
    "{% for m in messages %}{{ messages|length }}/{{ loop.index }} {{ m.role }}: {{ m.content }};"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
NUMBERED = (  # it reads so near to its neighbours only
    "{% for m in messages %}{{ loop.index }} {{ m.role }}: {{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
EARLY = (  # only the last user's message is written in full words
    "{% for m in messages %}{% if m.role == 'user' and not loop.last %}u{% else %}{{ m.role }}"
    "{% endif %}: {{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def load(tmp_path: Path, byte_tokenizer: Tokenizer) -> Callable[[str], ChatTemplate]:
    def load(source: str) -> ChatTemplate:
        (tmp_path / "chat_template.jinja").write_text(source)
        return ChatTemplate(tmp_path, byte_tokenizer)

    return load


def roles(num_rounds: int) -> list[str]:
    return ["system", *["user", "assistant"] * num_rounds, "user"]


def said(transcript: Transcript, roles: list[str]) -> Transcript:
    for number, role in enumerate(roles):
        transcript.begin_role(role)
        transcript.append_text(f"{role} {number}")
        transcript.end_role()
    transcript.begin_role("assistant")
    return transcript


@pytest.mark.parametrize(
    "source",
    [CHATML, COUNTED, NUMBERED, EARLY, HERMES_TOOLS, LLAMA3_TOOLS, MISTRAL_TOOLS],
    ids=["chatml", "counted", "numbered", "early", "hermes", "llama3", "mistral"],
)
@given(num_rounds=st.integers(1, 12))
@settings(
    max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_what_is_generated_from_is_what_the_template_writes(
    load: Any, byte_tokenizer: Tokenizer, source: str, num_rounds: int
) -> None:
    messages = roles(num_rounds)[source == MISTRAL_TOOLS :]
    guessed = said(Transcript(byte_tokenizer, load(source)), messages)
    guessed.settle()
    sure = Transcript(byte_tokenizer, load(source))
    sure._can_guess = False
    assert guessed.ids == said(sure, messages).ids


def test_a_wrong_guess_is_told_anew(load: Any, byte_tokenizer: Tokenizer) -> None:
    transcript = said(Transcript(byte_tokenizer, load(NUMBERED)), roles(9))
    change = transcript.settle()
    assert change is not None and change.replace
    assert change.text.endswith("19 assistant: assistant 18;20 user: user 19;assistant: ")
    assert transcript.settle() is None
    transcript.append_text("answer")
    transcript.end_role()
    assert byte_tokenizer.decode(transcript.ids.tolist()).endswith("21 assistant: answer;")


def test_renderings_do_not_grow_with_the_conversation(
    load: Any, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = load(CHATML)
    rendered: list[int] = []
    render = template._rendered

    def counted(messages: list[Any], *args: Any) -> str:
        rendered.append(len(messages))
        return str(render(messages, *args))

    monkeypatch.setattr(template, "_rendered", counted)
    transcript = said(Transcript(byte_tokenizer, template), roles(500))
    assert transcript.settle() is None
    assert sorted(rendered)[-2] <= 2 * MIN_TURNS and max(rendered) == 1002
