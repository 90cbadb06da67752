"""What made the embedded model: the generator is seeded, its held-out side is held out, and the
segments of a sample tokenize as the runtime will."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import stemma as st
from stemma.runtime.config import EMBEDDED_MODEL

FOLDER = Path(st.__file__).parent / "examples" / "tiny_model"


def generated(*args: str) -> str:
    command = [sys.executable, "generate.py", *args]
    return subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("skill", ["react", "extract", "chat"])
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
