"""Prompts for what belongs between two texts: the families' tokens, and where texts go."""

from __future__ import annotations

import pytest

from stemma.server.generation.infill import InfillText, InfillTokens

QWEN = {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<|fim_middle|>": 3}
REPOSITORY = {"<|repo_name|>": 4, "<|file_sep|>": 5}


def encode(text: str) -> list[int]:
    return [1000 + ord(letter) for letter in text]


def shown(ids: list[int]) -> str:
    """Texts as they are, tokens by their number."""
    return "".join(chr(i - 1000) if i >= 1000 else f"<{i}>" for i in ids)


@pytest.mark.parametrize(
    "names",
    [
        tuple(QWEN),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        ("▁<PRE>", "▁<SUF>", "▁<MID>"),
        ("<PRE>", "<SUF>", "<MID>"),
    ],
)
def test_each_familys_tokens_stand_around_its_texts(names: tuple[str, ...]) -> None:
    tokens = InfillTokens.of(dict(zip(names, (1, 2, 3))).get)
    assert tokens is not None
    assert shown(tokens.prompt(InfillText("pre", "suf"), encode)) == "<1>pre<2>suf<3>"
    begun = InfillText("pre", "suf", beginning="mid")
    assert shown(tokens.prompt(begun, encode)) == "<1>pre<2>suf<3>mid"


def test_a_tokenizer_that_lacks_one_of_the_three_has_none() -> None:
    for missing in QWEN:
        assert InfillTokens.of({n: i for n, i in QWEN.items() if n != missing}.get) is None


def test_other_files_come_first_with_their_names_where_there_are_tokens_for_that() -> None:
    text = InfillText("pre", "suf", [("a.py", "x"), ("b.py", "y")])
    tokens = InfillTokens.of({**QWEN, **REPOSITORY}.get)
    assert tokens is not None
    expected = "<4>project\n<5>a.py\nx\n<5>b.py\ny\n<5>file\n<1>pre<2>suf<3>"
    assert shown(tokens.prompt(text, encode)) == expected
    plain = InfillTokens.of(QWEN.get)
    assert plain is not None and shown(plain.prompt(text, encode)) == "x\ny\n<1>pre<2>suf<3>"


def test_an_output_ends_with_what_ends_a_file_too() -> None:
    tokens = InfillTokens.of({**QWEN, **REPOSITORY, "<|endoftext|>": 6}.get)
    assert tokens is not None and set(tokens.ends) == {4, 5, 6}
