"""What made the embedded model: the generator is seeded, its held-out side is held out, and the
segments of a sample tokenize as the runtime will."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from safetensors.torch import load_file

import stemma as st
from stemma.frontend.chat_format.chat_format import ChatFormat
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.runtime.tokenizer.chat_template import ChatTemplate, TemplateArgs
from stemma.runtime.tokenizer.tokenizer import Tokenizer
from stemma.runtime.tokenizer.transcript import Transcript
from stemma.server.api.openai.chat_messages import ChatMessage, fitting

FOLDER = Path(st.__file__).parent / "examples" / "tiny_model"


def generated(*args: str) -> str:
    command = [sys.executable, "generate.py", *args]
    return subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "skill", ["react", "extract", "chat", "classify", "yes_no", "tips", "tools"]
)
def test_the_same_seed_gives_the_same_samples_and_another_seed_others(skill: str) -> None:
    flags = ("--skill", skill, "--samples", "3")
    first = generated(*flags, "--seed", "1")
    assert first == generated(*flags, "--seed", "1")
    assert first != generated(*flags, "--seed", "2")
    assert first != generated(*flags, "--seed", "1", "--held-out")


def test_names_of_held_out_samples_are_never_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    world = __import__("world")
    makers = [world.World(random.Random(seed), held_out=seed == 1) for seed in (0, 1)]
    seen, held_out = ({maker.city() for _ in range(1000)} for maker in makers)
    assert len(held_out) > 200 and not seen & held_out


def test_no_first_message_of_tips_and_no_classified_text_is_in_both_training_and_held_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = drawn(monkeypatch)
    for skill, num_lines in (("tips", 3), ("classify", 1)):
        seen, held_out = (
            {
                tuple(sample.messages("user")[0].split("\n")[:num_lines])
                for sample in stream(skill, 400, is_held_out)
            }
            for is_held_out in (False, True)
        )
        assert len(held_out) > 300 and not seen & held_out


def test_a_choice_is_among_those_that_its_question_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for skill in ("classify", "yes_no"):
        for sample in drawn(monkeypatch)(skill, 200, True):
            questions, replies = sample.messages("user"), sample.messages("assistant")
            for question, reply, limits in zip(questions, replies, sample.limits, strict=True):
                assert reply in limits["choices"]
                asked = question.split("\n")[-1].lower()
                assert all(choice in asked for choice in limits["choices"])


def test_a_no_is_often_to_a_value_that_the_text_tells_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, misleading = [], 0
    for sample in drawn(monkeypatch)("yes_no", 300, True):
        text, question = sample.messages("user")[0].split("\n")
        answers.append(sample.messages("assistant")[0])
        told = text.removeprefix("Text: ").rstrip(".").replace(".", "").split()
        words = question.removesuffix(" Answer yes or no.").rstrip("?").split()
        misleading += answers[-1] == "no" and words[-1] in told
    assert 100 < answers.count("yes") < 200 and misleading > 30


def test_the_schema_of_an_extraction_admits_its_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for sample in drawn(monkeypatch)("extract_many", 100, True):
        for reply, limits in zip(sample.messages("assistant"), sample.limits, strict=True):
            jsonschema.validate(json.loads(reply), limits.get("json_schema", {"type": "object"}))


def test_a_call_fits_the_schema_of_a_tool_that_the_model_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    num_calls, num_texts = 0, 0
    for sample in drawn(monkeypatch)("tools", 200, True):
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in sample.tools}
        for message in sample.dialogue:
            num_texts += message["role"] == "assistant" and message["content"] is not None
            for call in message.get("tool_calls", ()):
                arguments = json.loads(call["function"]["arguments"])
                schema = schemas[call["function"]["name"]]
                jsonschema.validate(arguments, schema)
                assert list(arguments) == [key for key in schema["properties"] if key in arguments]
                num_calls += 1
    assert num_calls > 200 and num_texts > 200


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Tokenizer, ChatTemplate]:
    """The embedded model's tokenizer, with the chat template that is exported."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for path in EMBEDDED_MODEL.glob("*.json"):
        shutil.copy(path, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(__import__("export").CHAT_TEMPLATE)
    tokenizer = Tokenizer(tmp_path, 4096)
    return tokenizer, ChatTemplate(tmp_path, tokenizer)


@pytest.mark.parametrize("is_held_out", [False, True])
def test_a_conversation_with_tools_has_the_ids_that_the_runtime_gives_it(
    monkeypatch: pytest.MonkeyPatch,
    exported: tuple[Tokenizer, ChatTemplate],
    is_held_out: bool,
) -> None:
    samples = drawn(monkeypatch)("tools", 100, is_held_out)
    encoder = __import__("tokenizer").Encoder.load(EMBEDDED_MODEL / "tokenizer.json")
    tokenizer, template = exported
    knowing = ChatFormat(knows_tools=True, knows_calls=True)
    for sample in samples:
        transcript = Transcript(tokenizer, template, TemplateArgs.of(sample.tools))
        messages = [ChatMessage(**m).plain(n) for n, m in enumerate(sample.dialogue)]
        for message in fitting(messages, knowing):
            transcript.begin_role(message.role, message.fields)
            transcript.append_text(message.content)
            transcript.end_role()
        transcript.settle()
        ids, _ = encoder.encode_sample(sample)
        assert list(transcript.ids) == ids[: len(transcript.ids)]
        is_whole = sample.dialogue[-1]["role"] == "assistant"  # else a forced call comes behind
        assert is_whole == (len(ids) == len(transcript.ids))


def test_without_tools_the_chat_template_writes_roles_and_contents_alone(
    exported: tuple[Tokenizer, ChatTemplate],
) -> None:
    _, template = exported
    assert template.knows_tools
    messages = ["system", "user", "assistant", "user"]
    marks = [f"<|end|><|{role}|>" for role in messages[1:]]
    assert template.delimiters(messages, open_turn=True) == [
        "<|begin|><|system|>", *marks, "<|end|><|assistant|>",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (None, "f()"),
        ({"type": "object"}, "f()"),
        ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, "f(a:integer)"),
        ({"properties": {"a": {"enum": [1, "b"]}, "b": True}}, "f(a?:1|b,b?)"),
        ({"properties": {"a": {"anyOf": [{"type": "number"}, {"type": "null"}], "title": "A",
                               "default": None}}}, "f(a?:number)"),
        ({"properties": {"a": {"type": ["boolean", "null"]}}, "required": ["a"]}, "f(a:boolean)"),
        ({"properties": {"<|end|>": {"type": "string"}}, "required": []}, "f(<|end|>?)"),
    ],
)  # fmt: skip
def test_the_chat_template_tells_a_tool_in_one_line_whatever_its_schema_is(
    exported: tuple[Tokenizer, ChatTemplate], schema: Any, told: str
) -> None:
    _, template = exported
    function = {"name": "f", "description": " Does it.\n\nArgs: ...", "parameters": schema}
    tools = [{"type": "function", "function": {k: v for k, v in function.items() if v}}]
    first = template.delimiters(["system", "user"], args=TemplateArgs.of(tools))[1]
    assert template.shown(first) == f"\n\nTools:\n{told} Does it.<|end|><|user|>"
    assert template.encode(first).count(2) == 1  # a name's special token is none


def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, bool], list[Any]]:
    """The samples of a skill: so many, held-out or not."""
    monkeypatch.syspath_prepend(str(FOLDER))
    generate = __import__("generate")
    return lambda skill, count, is_held_out: list(
        itertools.islice(generate.samples({skill: 1.0}, 3, is_held_out), count)
    )


def test_the_tokenizer_keeps_names_apart_from_spaces_and_digits_from_each_other() -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 4096
    in_text = tokenizer.encode(" Lisbon", add_special_tokens=False).ids
    in_json = tokenizer.encode('"Lisbon"', add_special_tokens=False).ids
    assert in_text[1:] == in_json[1:-1]
    assert len(tokenizer.encode("1234", add_special_tokens=False).ids) == 4
    parts = ["Action: calculator[48*17]", "\nObservation: 816\n", "Thought: I know"]
    alone = [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False).ids]
    assert alone == tokenizer.encode("".join(parts), add_special_tokens=False).ids


def test_training_that_begins_from_exported_weights_begins_with_these(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    model = __import__("model")
    shipped = load_file(EMBEDDED_MODEL / "model.safetensors")
    llama = model.Llama(model.Config())
    model.load_hugging_face_state(llama, shipped)
    again = model.hugging_face_state(llama)
    assert set(again) == set(shipped)
    assert all(again[name].equal(tensor) for name, tensor in shipped.items())


def test_the_shipped_template_is_the_one_that_is_exported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    config = json.loads((EMBEDDED_MODEL / "tokenizer_config.json").read_text())
    assert config["chat_template"] == __import__("export").CHAT_TEMPLATE


def test_the_shipped_checkpoint_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in EMBEDDED_MODEL.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
            "generation_config.json"} <= set(files)  # fmt: skip
    assert sum(files.values()) <= 25_000_000
