"""Marks around contents as the checkpoint's own template writes them; templates that misbehave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import make_byte_tokenizer
from templates import CHATML, LLAMA3, MISTRAL, UNSTABLE

from stemma.errors import InvalidProgram, ModelLoadError
from stemma.runtime.tokenizer import chat_template as chat_template_module
from stemma.runtime.tokenizer.chat_template import ChatTemplate
from stemma.runtime.tokenizer.tokenizer import Tokenizer


def load(folder: Path, source: object = None, *, in_config: bool = False) -> ChatTemplate:
    make_byte_tokenizer(folder)
    if in_config:
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "chat_template": source}))
    elif source is not None:
        (folder / "chat_template.jinja").write_text(str(source))
    return ChatTemplate(folder, Tokenizer(folder, 260))


def test_llama3_marks(tmp_path: Path) -> None:
    template = load(tmp_path, LLAMA3)
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert template.delimiters(["system", "user"], open_turn=True) == [
        "<bos>" + head.format("system"),
        "<|eot_id|>" + head.format("user"),
        "<|eot_id|>" + head.format("assistant"),
    ]


def test_a_chat_is_split_into_marks_in_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for each message in all that follows took 40 s for a chat of 1,000."""
    monkeypatch.delattr(chat_template_module, "_split")
    assert load(tmp_path, LLAMA3).delimiters(["user"] * 3)[-1] == "<|eot_id|>"


def test_chatml_writes_its_default_system_prompt_before_the_first_message(tmp_path: Path) -> None:
    template = load(tmp_path, CHATML)
    default = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    assert template.delimiters(["user"]) == [default + "<|im_start|>user\n", "<|im_end|>\n"]
    assert template.delimiters(["system"]) == ["<|im_start|>system\n", "<|im_end|>\n"]


def test_mistral_marks_and_its_own_words_when_it_refuses(tmp_path: Path) -> None:
    template = load(tmp_path, MISTRAL)
    assert template.delimiters(["user", "assistant"]) == ["<bos>[INST] ", " [/INST]", "<eos>"]
    with pytest.raises(InvalidProgram, match=r"refuses the roles \[user, user\]: .*alternate"):
        template.delimiters(["user", "user"])
    assert template.delimiters(["user"]) == ["<bos>[INST] ", " [/INST]"], "a refusal spoils nothing"


def test_a_checkpoint_without_a_template_gets_labelled_turns(tmp_path: Path) -> None:
    template = load(tmp_path)
    assert template.is_fallback
    delimiters = template.delimiters(["user"], open_turn=True)
    assert delimiters == ["<bos>USER: ", "\nASSISTANT: "]


@pytest.mark.parametrize(
    "value", [CHATML, [{"name": "other", "template": "x"}, {"name": "default", "template": CHATML}]]
)
def test_a_template_may_stand_in_the_tokenizer_config(tmp_path: Path, value: object) -> None:
    template = load(tmp_path, value, in_config=True)
    assert template.delimiters(["system"]) == ["<|im_start|>system\n", "<|im_end|>\n"]


@pytest.mark.parametrize("value", [[], [3], [{"name": "x"}], 7, {}])
def test_a_senseless_value_in_the_config_is_no_template(tmp_path: Path, value: object) -> None:
    assert load(tmp_path, value, in_config=True).is_fallback


def test_the_jinja_file_wins_over_the_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(MISTRAL)
    assert load(tmp_path, CHATML, in_config=True).delimiters(["user"])[0] == "<bos>[INST] "


def test_a_template_that_is_no_jinja_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="not jinja2"):
        load(tmp_path, "{% for %}")
    with pytest.raises(ModelLoadError, match="not jinja2: maximum recursion depth"):
        load(tmp_path, "{{ " + "(" * 20_000 + " }}")


def test_a_template_file_that_is_no_text_is_a_load_error(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja"):
        load(tmp_path)


def test_a_template_that_leaves_out_a_message_is_an_error(tmp_path: Path) -> None:
    template = load(tmp_path, "{{ messages[-1].content }}")
    assert template.delimiters(["user"]) == ["", ""]
    with pytest.raises(InvalidProgram, match="leaves out message 0"):
        template.delimiters(["user", "assistant"])


def test_contents_are_never_changed_by_the_template(tmp_path: Path) -> None:
    """It gets placeholders: what it would do to a content (trim, upper case) it cannot do."""
    template = load(tmp_path, "<{{ messages[0].content | trim }}>")
    assert template.delimiters(["user"]) == ["<", ">"]


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['__builtins__'] }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{% set _ = messages.append(1) %}",
    "{{ messages.clear() }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_the_sandbox_lets_nothing_out(tmp_path: Path, source: str) -> None:
    template = load(tmp_path, "{{ messages[0].content }}|" + source)
    try:
        delimiters = template.delimiters(["user"])
    except InvalidProgram as error:
        assert "refuses the roles" in str(error)
    else:
        assert delimiters == ["", "|"], "an attribute that is not there prints as nothing"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ 1 // 0 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages | tojson(indent=messages) }}{{ nothing.at.all }}",
        "{{ raise_exception('no') }}",
        "{{ strftime_now(3) }}",
    ],
)
def test_a_template_that_fails_or_never_ends_is_an_error_of_the_program(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template_module, "_MAX_RENDERED_CHARS", 100_000)
    template = load(tmp_path, "{{ messages[0].content }}" + source)
    with pytest.raises(InvalidProgram, match="refuses the roles"):
        template.delimiters(["user"])


def test_an_unstable_template_is_not_prefix_stable(tmp_path: Path) -> None:
    """What test_transcript relies on."""
    template = load(tmp_path, UNSTABLE)
    assert template.delimiters(["user"]) == ["<user*>", "</user>"]
    assert template.delimiters(["user", "user"]) == ["<user>", "</user><user*>", "</user>"]
