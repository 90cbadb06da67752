"""What made the embedded model: the generator is seeded, its held-out side is held out, and the
segments of a sample tokenize as the runtime will."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import stemma as st
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL

FOLDER = Path(st.__file__).parent / "examples" / "tiny_model"


def generated(*args: str) -> str:
    command = [sys.executable, "generate.py", *args]
    return subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("skill", ["react", "extract", "chat", "classify", "yes_no", "tips"])
def test_the_same_seed_gives_the_same_samples_and_another_seed_others(skill: str) -> None:
    flags = ("--skill", skill, "--samples", "3")
    first = generated(*flags, "--seed", "1")
    assert first == generated(*flags, "--seed", "1")
    assert first != generated(*flags, "--seed", "2")
    assert first != generated(*flags, "--seed", "1", "--held-out")


def test_names_of_held_out_samples_are_never_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import random

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


def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, bool], list[Any]]:
    """The samples of a skill: so many, held-out or not."""
    monkeypatch.syspath_prepend(str(FOLDER))
    generate = __import__("generate")
    return lambda skill, count, is_held_out: list(
        itertools.islice(generate.samples({skill: 1.0}, 3, is_held_out), count)
    )


def test_the_tokenizer_keeps_names_apart_from_spaces_and_digits_from_each_other() -> None:
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 4096
    in_text = tokenizer.encode(" Lisbon", add_special_tokens=False).ids
    in_json = tokenizer.encode('"Lisbon"', add_special_tokens=False).ids
    assert in_text[1:] == in_json[1:-1]
    assert len(tokenizer.encode("1234", add_special_tokens=False).ids) == 4
    parts = ["Action: calculator[48*17]", "\nObservation: 816\n", "Thought: I know"]
    alone = [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False).ids]
    assert alone == tokenizer.encode("".join(parts), add_special_tokens=False).ids


def test_the_shipped_checkpoint_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in EMBEDDED_MODEL.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
            "generation_config.json"} <= set(files)  # fmt: skip
    assert sum(files.values()) <= 25_000_000
