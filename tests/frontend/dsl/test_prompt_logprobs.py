"""Log probabilities of a prompt and of choices: the same on a cached prefix as on a cold one, and
the same as another implementation's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import stemma as st
from stemma.errors import ProgramError
from stemma.frontend.dsl.expr import GenExpr

PROMPT = "The river runs to the sea. The sea is "


def scored(start: int | None, num_top: int = 0) -> GenExpr:
    """A gen of three tokens that asks for its prompt's log probabilities from `start` on."""
    given = st.gen("x", 3, temperature=0, logprobs=num_top, ignore_eos=True)
    assert isinstance(given, GenExpr)
    return dataclasses.replace(given, params=dataclasses.replace(given.params, logprob_start=start))


@st.function
def ask(s: st.ProgramState, prompt: str, start: int | None, num_top: int = 0) -> None:
    s += prompt
    s += scored(start, num_top)


@pytest.fixture(scope="module")
def all_logprobs(checkpoint: Path) -> torch.Tensor:
    """log p(token | the prompt's tokens up to i), [tokens, vocabulary], by transformers."""
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([list(PROMPT.encode())])).logits[0]
    return torch.log_softmax(logits, dim=-1)


@pytest.fixture(scope="module")
def reference(all_logprobs: torch.Tensor) -> list[float]:
    """log p(token i | the tokens before it) for i >= 1."""
    ids = list(PROMPT.encode())
    return [float(all_logprobs[i - 1, ids[i]]) for i in range(1, len(ids))]


@pytest.mark.parametrize("start", [0, 1, 7, len(PROMPT) - 1, len(PROMPT)])
def test_prompt_logprobs_are_right_cold_and_on_a_cached_prefix(
    engine: st.Engine, reference: list[float], start: int
) -> None:
    engine.flush_cache()
    cold = ask.run(PROMPT, start, backend=engine).get_meta_info("x")
    warm = ask.run(PROMPT, start, backend=engine).get_meta_info("x")
    assert warm["cached_tokens"] == len(PROMPT) - 1, "the gen itself is served from the cache"
    for rows in (cold["prompt_logprobs"], warm["prompt_logprobs"]):
        assert [row["token_id"] for row in rows] == list(PROMPT.encode()[start:])
        values = [row["logprob"] for row in rows]
        if start == 0:
            assert values.pop(0) is None, "nothing comes before the first token"
        assert values == pytest.approx(reference[max(start, 1) - 1 :], abs=2e-4)


def test_the_likeliest_tokens_are_told_beside_each_of_the_prompt(
    engine: st.Engine, all_logprobs: torch.Tensor
) -> None:
    for num_top in (0, 1, 3):
        meta = ask.run(PROMPT, 0, num_top, backend=engine).get_meta_info("x")
        first, *rows = meta["prompt_logprobs"]
        assert first["top"] == [] and all(len(row["top"]) == num_top for row in rows)
        for row, logprobs in zip(rows, all_logprobs, strict=False):
            values, ids = logprobs.topk(num_top)
            assert [top["token_id"] for top in row["top"]] == ids.tolist()
            told = [top["logprob"] for top in row["top"]]
            assert told == pytest.approx(values.tolist(), abs=2e-4)


def test_asking_for_prompt_logprobs_changes_no_output(engine: st.Engine) -> None:
    engine.flush_cache()
    plain = ask.run(PROMPT, None, backend=engine)["x"]
    engine.flush_cache()
    assert ask.run(PROMPT, 0, backend=engine)["x"] == plain


def test_select_scores_the_same_on_a_cached_prefix(engine: st.Engine) -> None:
    @st.function
    def choose(s: st.ProgramState) -> None:
        s += PROMPT
        s += st.select("c", ["wide", "deep and cold", "deep"])

    engine.flush_cache()
    cold = choose.run(backend=engine).get_meta_info("c")
    warm = choose.run(backend=engine).get_meta_info("c")
    assert warm["cached_tokens"] > cold["cached_tokens"]
    assert warm["choice_logprobs"] == pytest.approx(cold["choice_logprobs"], abs=1e-5)


def test_a_start_beyond_the_prompt_is_refused(engine: st.Engine) -> None:
    with pytest.raises(ProgramError, match=r"logprob_start=3 .* in \[0, 2\]"):
        ask.run("ab", 3, backend=engine)
