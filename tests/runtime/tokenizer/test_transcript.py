"""The ids of a branch: text, marks and generated ids in order, whatever the template does."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import BOS_ID, EOS_ID, make_byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import CHATML, LLAMA3, MISTRAL, UNSTABLE

from stemma.errors import InvalidProgram
from stemma.runtime.tokenizer.chat_template import ChatTemplate
from stemma.runtime.tokenizer.tokenizer import Tokenizer
from stemma.runtime.tokenizer.transcript import Transcript

TEMPLATES = {"llama3": LLAMA3, "chatml": CHATML, "mistral": MISTRAL, "unstable": UNSTABLE}


@pytest.fixture(scope="module")
def templates(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Tokenizer, ChatTemplate]]:
    found = {}
    for name, source in TEMPLATES.items():
        folder = make_byte_tokenizer(tmp_path_factory.mktemp(name))
        (folder / "chat_template.jinja").write_text(source)
        tokenizer = Tokenizer(folder, 260)
        found[name] = tokenizer, ChatTemplate(folder, tokenizer)
    return found


def text_of(transcript: Transcript, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(transcript.ids, skip_special=False)


Templates = dict[str, tuple[Tokenizer, ChatTemplate]]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "llama3",
            "<bos><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHo<|eot_id|>",
        ),
        (
            "chatml",
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n",
        ),
        ("mistral", "<bos>[INST] Hi [/INST]Ho<eos>"),
        ("unstable", "<user>Hi</user><assistant*>Ho</assistant>"),
    ],
)
def test_a_turn_reads_as_the_template_renders_it(
    templates: Templates, name: str, text: str
) -> None:
    tokenizer, template = templates[name]
    transcript = Transcript(tokenizer, template)
    replaced = []
    for role, content in (("user", "Hi"), ("assistant", "Ho")):
        replaced.append(transcript.begin_role(role).replace)
        transcript.append_text(content)
        replaced.append(transcript.end_role().replace)
    assert text_of(transcript, tokenizer) == text
    assert any(replaced) == (name == "unstable")
    assert (transcript.ids[0] == BOS_ID) == text.startswith("<bos>"), "BOS is one special token"
    assert (transcript.ids[-1] == EOS_ID) == text.endswith("<eos>")


def test_the_marked_text_adds_up_to_the_branch(templates: Templates) -> None:
    """What the client shows is what the model reads."""
    for tokenizer, template in templates.values():
        transcript = Transcript(tokenizer, template)
        text = ""
        for role, content in (("user", "one"), ("assistant", "two"), ("user", "three")):
            for change in (transcript.begin_role(role), None, transcript.end_role):
                if change is None:
                    transcript.append_text(content)
                    text += content
                    continue
                change = change() if callable(change) else change
                text = change.text if change.replace else text + change.text
        assert text == text_of(transcript, tokenizer)


def test_what_a_model_generated_keeps_its_ids_when_the_marks_are_laid_anew(
    templates: Templates,
) -> None:
    tokenizer, template = templates["unstable"]
    transcript = Transcript(tokenizer, template)
    transcript.begin_role("user")
    transcript.append_text("Hi")
    transcript.end_role()
    transcript.begin_role("assistant")
    generated = [7, 7, 200, 9]  # nothing that encode() would make of this text
    transcript.append_ids(generated, "said")
    before = transcript.copy()
    change = transcript.end_role()
    assert change.replace and change.text == "<user>Hi</user><assistant*>said</assistant>"
    expected = [
        *tokenizer.encode_rendered("<user>Hi</user><assistant*>"),
        *generated,
        *tokenizer.encode_rendered("</assistant>"),
    ]
    assert list(transcript.ids) == expected
    assert before.open_role == "assistant" and transcript.open_role is None
    assert list(before.ids[-4:]) == generated, "a copy is independent"


@pytest.mark.parametrize("name", ["chatml", "unstable"])
def test_text_between_messages_stays_where_it_was_written(templates: Templates, name: str) -> None:
    tokenizer, template = templates[name]
    transcript = Transcript(tokenizer, template)
    transcript.append_text("raw ")
    for role in ("user", "assistant", "user"):
        transcript.begin_role(role)
        transcript.append_text(f"[{role}]")
        transcript.end_role()
        transcript.append_text("loose ")
        transcript.append_text("text ")
    text = text_of(transcript, tokenizer)
    ends = {"chatml": "<|im_end|>\n", "unstable": ">"}[name]
    assert text.startswith("raw ")
    assert text.count(f"{ends}loose text <") == 2 and text.endswith(f"{ends}loose text ")


def test_wrong_nesting_is_an_error(templates: Templates) -> None:
    transcript = Transcript(*templates["chatml"])
    with pytest.raises(InvalidProgram, match="no message is open"):
        transcript.end_role()
    transcript.begin_role("user")
    with pytest.raises(InvalidProgram, match="assistant message begun inside a user message"):
        transcript.begin_role("assistant")


def test_a_refused_role_changes_nothing(templates: Templates) -> None:
    transcript = Transcript(*templates["mistral"])
    transcript.begin_role("user")
    transcript.append_text("a")
    transcript.end_role()
    ids = transcript.ids[:]
    with pytest.raises(InvalidProgram, match="alternate"):
        transcript.begin_role("user")
    assert transcript.ids == ids and transcript.open_role is None
    transcript.begin_role("assistant")


STEPS = st.lists(
    st.sampled_from(["user", "assistant", "system", "end", "text", "ids", "fork"]), max_size=14
)


@settings(max_examples=150)
@given(name=st.sampled_from(["llama3", "chatml", "unstable"]), steps=STEPS)
def test_appended_or_laid_anew_the_branch_is_the_same(
    templates: Templates, name: str, steps: list[str]
) -> None:
    """Appending step by step gives what laying all marks anew around the same contents gives."""
    tokenizer, template = templates[name]
    transcript = Transcript(tokenizer, template)
    text = ""
    for step in steps:
        change = None
        if step == "text":
            transcript.append_text("é ")
            text += "é "
        elif step == "ids":
            transcript.append_ids([104, 105], "hi")
            text += "hi"
        elif step == "fork":
            transcript = transcript.copy()
        elif step == "end" and transcript.open_role:
            change = transcript.end_role()
        elif step != "end" and not transcript.open_role:
            change = transcript.begin_role(step)
        if change is not None:
            text = change.text if change.replace else text + change.text
    assert text_of(transcript, tokenizer) == text
    ids = transcript.ids[:]
    assert transcript._rebuild() == text
    assert transcript.ids == ids


def test_a_role_cannot_smuggle_in_special_tokens(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    transcript = Transcript(byte_tokenizer, ChatTemplate(tmp_path, byte_tokenizer))
    with pytest.raises(InvalidProgram, match="role="):
        transcript.begin_role("user<eos>")


def test_raw_text_before_a_role_is_followed_by_no_bos(
    byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    transcript = Transcript(byte_tokenizer, ChatTemplate(tmp_path, byte_tokenizer))
    transcript.append_text("raw")
    transcript.begin_role("user")
    assert len(transcript.ids) > 3 and BOS_ID not in transcript.ids[1:]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("num_before", [0, 1, 2, 7])
def test_a_message_that_is_dropped_leaves_what_was_before_it(
    templates: Templates, name: str, num_before: int
) -> None:
    tokenizer, template = templates[name]
    dropped, plain = Transcript(tokenizer, template), Transcript(tokenizer, template)
    roles = ["user", "assistant"] * 4
    for transcript in (dropped, plain):
        for role in roles[:num_before]:
            transcript.begin_role(role)
            transcript.append_text(f"said by {role}")
            transcript.end_role()
    dropped.begin_role(roles[num_before])
    dropped.append_text("gone")
    dropped.drop_message()
    assert dropped.open_role is None and dropped.ids == plain.ids
    for transcript in (dropped, plain):
        transcript.begin_role(roles[num_before])
        transcript.append_text("stays")
        transcript.settle()
    assert dropped.ids == plain.ids
    for transcript in (dropped, plain):
        transcript.end_role()
    assert dropped.ids == plain.ids


def test_a_message_is_dropped_only_while_it_is_open(templates: Templates) -> None:
    with pytest.raises(InvalidProgram, match="no message is open"):
        Transcript(*templates["chatml"]).drop_message()


SYSTEM_NEEDS_USER = {
    "refused": "{% if messages[-1].role == 'system' %}{{ raise_exception('whom?') }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}",
    "left out": "{% if messages[0].role == 'system' %}{% set head = messages[0].content + '\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set head = '' %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ head if loop.first }}{{ m.content }}</>{% endfor %}",
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("refused", "<system>Be.</><user>Hi</>"),
        ("left out", "<user>Be.\nHi</>"),
    ],
)
def test_a_system_message_may_wait_for_the_users(
    byte_tokenizer: Tokenizer, tmp_path: Path, name: str, text: str
) -> None:
    """The template refuses it alone, or writes it within the user's."""
    (tmp_path / "chat_template.jinja").write_text(SYSTEM_NEEDS_USER[name])
    transcript = Transcript(byte_tokenizer, ChatTemplate(tmp_path, byte_tokenizer))
    told = ""
    for role, content in (("system", "Be."), ("user", "Hi")):
        change = transcript.begin_role(role)
        transcript.append_text(content)
        told += change.text + content
        if role == "user":
            assert transcript.settle() is None
        else:
            with pytest.raises(InvalidProgram, match=r"whom\?|leaves out message 0"):
                transcript.settle()
        change = transcript.end_role()
        told += change.text
        assert not change.replace
    assert text_of(transcript, byte_tokenizer) == told == text
