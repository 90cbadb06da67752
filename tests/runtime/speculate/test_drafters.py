"""What `--speculate` comes to on a machine without a C++ compiler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import stemma as st
from stemma.runtime.speculate.drafters import make_drafting
from stemma.runtime.speculate.native.bindings import library
from stemma.runtime.speculate.prediction import PredictionDrafter


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    library.cache_clear()
    yield
    library.cache_clear()


def test_an_engine_left_to_choose_drafts_from_predictions_alone() -> None:
    drafting = make_drafting("auto", 8, is_cpu=True)
    assert drafting is not None
    assert [type(drafter) for drafter in drafting.drafters] == [PredictionDrafter]


@pytest.mark.parametrize("speculate", ["suffix", "ngram,prediction", "siblings"])
def test_a_drafter_that_needs_one_is_refused_by_name(speculate: str) -> None:
    with pytest.raises(st.InvalidRequest, match=r"speculate.*no-such-compiler"):
        make_drafting(speculate, 8, is_cpu=True)


def test_predictions_and_grammars_need_none() -> None:
    drafting = make_drafting("prediction,grammar", 8, is_cpu=True)
    assert drafting is not None and drafting.under_grammars
