"""Clients' texts within rendered ones: what is cut, and what is not."""

from __future__ import annotations

import re

import pytest

from stemma.runtime.tokenizer.client_text import ClientTextGuard, any_of, compiled_any_of

SPECIAL = ["<s>", "</s>", "<|end|>", "[INST]", "</think>"]


@pytest.mark.parametrize(
    ("text", "before", "behind", "pieces"),
    [
        ("plain", "<s>", "</s>", [("<s>plain</s>", False)]),
        ("a </s> b", "<s>", "", [("<s>a ", False), ("</s>", True), (" b", False)]),
        ("a <", "<s>", "</s>", [("<s>a <</s>", False)]),
        ("a </", "", "s>", [("a </", False), ("s>", False)]),
        ("</S>", "", "", [("</S>", False)]),
        ("</s></s>", "", "", [("</s>", True), ("</s>", True)]),
        ("", "<s>", "</s>", [("<s></s>", False)]),
    ],
)
def test_only_what_would_be_special_is_cut_out(
    text: str, before: str, behind: str, pieces: list[tuple[str, bool]]
) -> None:
    guard = ClientTextGuard(SPECIAL, ["</think>"])
    rendered = before + guard.guarded(text) + behind
    assert guard.pieces(rendered) == pieces
    assert guard.shown(rendered) == before + text + behind


def test_an_assistants_own_words_may_have_marks_of_reasoning() -> None:
    guard = ClientTextGuard(SPECIAL, ["</think>"])
    assert guard.guarded("a</think>b", is_own_word=True) == "a</think>b"
    assert guard.guarded("a</think>b") != "a</think>b"


def test_a_mark_that_a_template_cuts_away_frees_no_token() -> None:
    guard = ClientTextGuard(SPECIAL)
    guarded = guard.guarded("</s>")
    first, last = guarded.index("<"), guarded.index(">") + 1
    for rest in (guarded[first:], guarded[:last]):
        assert guard.pieces("x" + rest + "y") == [("x", False), ("</s>", True), ("y", False)]


def test_any_of_finds_the_longest_and_survives_texts_within_texts() -> None:
    assert re.findall(any_of(["a", "ab", "abc", "b", "x"]), "abcabxa") == ["abc", "ab", "x", "a"]
    nested = ["<" + "a" * n for n in range(1, 600)]
    found = compiled_any_of(nested).match("<" + "a" * 400)
    assert found is not None and found.end() == 401
    assert ClientTextGuard(nested).guarded("x<aaa") != "x<aaa"
