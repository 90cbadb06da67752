"""Where a checkpoint keeps its chat templates, and which one is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chats import WEATHER, make_tokenizer

from stemma.errors import InvalidRequest, ModelLoadError
from stemma.frontend.protocol.chat_message import Message
from stemma.runtime.tokenizer.chat_template import ChatTemplate, TemplateArgs
from stemma.runtime.tokenizer.template_files import find_templates
from stemma.runtime.tokenizer.tokenizer import Tokenizer
from stemma.runtime.tokenizer.whole_chat import chat_prompt

NAMED = [
    {"name": "default", "template": "default"},
    {"name": "tool_use", "template": "with {{ tools | length }}"},
    {"name": "rag", "template": "rag"},
]


def write(folder: Path, **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / {"jinja": "chat_template.jinja", "json": "chat_template.json"}.get(
            name, f"additional_chat_templates/{name}.jinja"
        )
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_files_win_over_the_configuration_and_that_over_the_processors(tmp_path: Path) -> None:
    config = {"chat_template": "configured"}
    assert find_templates(write(tmp_path, json={"chat_template": "x"}), {}) == {"default": "x"}
    assert find_templates(tmp_path, config) == {"default": "configured"}
    write(tmp_path, jinja="file", tool_use="tools", rag="rag")
    assert find_templates(tmp_path, config) == {"default": "file", "tool_use": "tools"}


def test_the_first_is_the_default_where_none_is_called_so(tmp_path: Path) -> None:
    config = {"chat_template": NAMED[1:]}
    found = find_templates(tmp_path, config)
    assert found["default"] == found["tool_use"] == NAMED[1]["template"]
    assert find_templates(tmp_path, {"chat_template": {"a": "x"}}) == {"default": "x"}


def test_one_may_be_chosen_by_name_or_as_a_file(tmp_path: Path) -> None:
    config = {"chat_template": NAMED}
    assert find_templates(tmp_path, config, "rag") == {"default": "rag"}
    own = tmp_path / "own.jinja"
    own.write_text("mine")
    assert find_templates(tmp_path, config, str(own)) == {"default": "mine"}
    with pytest.raises(InvalidRequest, match=r"chat_template='x'.*'default', 'rag', 'tool_use'"):
        find_templates(tmp_path, config, "x")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b"[" * 100_000])
def test_a_file_that_is_broken_is_a_load_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "chat_template.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"chat_template\.json"):
        find_templates(tmp_path, {})


@pytest.mark.parametrize("value", [[], {}, {"chat_template": 3}, {"chat_template": [1]}])
def test_a_processors_file_without_one_is_none(tmp_path: Path, value: object) -> None:
    assert find_templates(write(tmp_path, json=json.dumps(value)), {}) == {}


def test_with_tools_the_one_for_them_is_taken_as_in_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    num_tokens = make_tokenizer(tmp_path, "byte_level")
    path = tmp_path / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "chat_template": NAMED}
    path.write_text(json.dumps(config))
    peer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    template = ChatTemplate(tmp_path, Tokenizer(tmp_path, num_tokens))
    assert template.knows_tools
    for tools, text in (([], "default"), ([WEATHER], "with 1")):
        prompt = chat_prompt(template, [Message("user", "a")], TemplateArgs.of(tools))
        assert prompt.text == text
        chat = [{"role": "user", "content": "a"}]
        assert peer.apply_chat_template(chat, tools=tools or None, tokenize=False) == text


def test_tokens_have_their_names_in_templates(tmp_path: Path) -> None:
    num_tokens = make_tokenizer(tmp_path, "byte_level")
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["pad_token"]
    config |= {"extra_special_tokens": {"image_token": "<image>"}, "cls_token": None}
    path.write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": {"content": "<p>"}}')
    write(tmp_path, jinja="{{ bos_token }}{{ pad_token }}{{ image_token }}{{ cls_token }}|")
    template = ChatTemplate(tmp_path, Tokenizer(tmp_path, num_tokens))
    assert chat_prompt(template, [Message("user", "a")]).text == "<s><p><image>|"
