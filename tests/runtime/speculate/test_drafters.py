"""Which drafters an engine gets for what `--speculate` names, with a compiler and without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import stemma as st
from stemma.runtime.speculate.drafters import make_drafting
from stemma.runtime.speculate.native.bindings import library
from stemma.runtime.speculate.prediction import PredictionDrafter
from stemma.runtime.speculate.suffix import SuffixDrafter


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    library.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    yield
    library.cache_clear()


def test_the_engine_chooses_nothing_on_a_gpu_and_all_that_pays_on_a_cpu() -> None:
    assert make_drafting("auto", 8, is_cpu=False) is None
    drafting = make_drafting("auto", 8, is_cpu=True)
    assert drafting is not None and drafting.under_grammars
    assert PredictionDrafter in map(type, drafting.drafters)


@pytest.mark.parametrize(("speculate", "max_tokens"), [("off", 8), ("suffix", 0)])
def test_nothing_is_guessed_where_that_is_asked_for(speculate: str, max_tokens: int) -> None:
    assert make_drafting(speculate, max_tokens, is_cpu=True) is None


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_engine_guesses_from_predictions_alone() -> None:
    drafting = make_drafting("auto", 8, is_cpu=True)
    assert drafting is not None
    assert [type(drafter) for drafter in drafting.drafters] == [PredictionDrafter]
    with pytest.raises(st.InvalidRequest, match=r"off or prediction.*no-such-compiler"):
        make_drafting("prediction,ngram", 8, is_cpu=True)


def test_names_of_one_kind_share_a_drafter() -> None:
    drafting = make_drafting("suffix,siblings,ngram", 8, is_cpu=True)
    assert drafting is not None and not drafting.under_grammars
    assert [type(drafter) for drafter in drafting.drafters] == [SuffixDrafter]
