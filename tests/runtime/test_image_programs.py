"""Programs say the same behind images whatever is cached: in float64, grammars, choices, beams and
forks of each program alone in an empty cache, against many at once in pools that hold all or a
part of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_thread import serving
from image_models import make_image_model, png

import stemma as st
from stemma.frontend.client.backend import Backend

NUM_PROGRAMS = 4
PICTURES = [png(40, 50, 1), png(24, 90, 2), png(33, 33, 3)]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
NAMES = ("free", "choice", "json", "last")
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "room for all": {"max_total_tokens": 8192},
    "a third of it": {"max_total_tokens": 720, "page_size": 16, "chunked_prefill_size": 32},
}


@st.function
def story(s: st.ProgramState, number: int) -> None:
    """Images in every role, in a role's block, in forks and outside of messages."""
    drawn: dict[str, Any] = {"temperature": 0.8, "seed": number, "ignore_eos": True}
    s += st.system("Be brief. " + st.image(PICTURES[2]))
    s += st.user(
        "See " + st.image(PICTURES[number % 3]) + " and " + st.image(PICTURES[number // 2])
    )
    s += st.assistant(st.gen("free", max_tokens=5, **drawn))
    s += st.user_begin() + "Now " + st.image(PICTURES[1])
    s += st.select("choice", ["red", "green", "greenish blue"])
    s += st.user_end()
    s += st.assistant(st.gen("json", json_schema=SCHEMA, max_tokens=40, **drawn))
    forks = s.fork(2)
    for index, branch in enumerate(forks):
        branch += st.user(f"{index}" + st.image(PICTURES[index]))
        branch += st.assistant(st.gen("part", max_tokens=4, **drawn))
    forks.join()
    s += st.image(PICTURES[number % 3]) + "end "
    if number % 2:
        s += st.gen("last", beam=3, n=3, max_tokens=5)
    else:
        s += st.gen("last", regex="[a-d]{3,9}", max_tokens=9, temperature=1, seed=number)


def said_by(backend: Backend, *numbers: int) -> tuple[list[list[Any]], list[float]]:
    """The ids of each program, and the log-probabilities of all choices."""
    instances = [{"number": number} for number in numbers]
    said, logprobs = [], []
    for state in story.run_batch(instances, backend=backend):
        metas = [state.get_meta_info(name) for name in NAMES]
        last = metas[-1] if isinstance(metas[-1], list) else [metas[-1]]
        each = [*metas[:-1], *last, *state.get_meta_info("part")]
        said.append([meta["output_ids"] for meta in each])
        logprobs += metas[1]["choice_logprobs"]
    return said, logprobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_image_model(tmp_path_factory.mktemp("model"), "qwen3-vl-odd")
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[list[list[Any]], list[float]]:
    said, logprobs = [], []
    with serving(folder, max_total_tokens=8192, max_model_len=700) as backend:
        for number in range(NUM_PROGRAMS):
            backend.flush_cache()
            ids, numbers = said_by(backend, number)
            said += ids
            logprobs += numbers
    assert len({str(each) for each in said}) == NUM_PROGRAMS
    return said, logprobs


@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
def test_programs_say_the_same_alone_and_among_others(
    folder: Path, alone: tuple[list[list[Any]], list[float]], circumstance: str
) -> None:
    with serving(folder, max_model_len=700, **CIRCUMSTANCES[circumstance]) as backend:
        for _ in range(2):
            said, logprobs = said_by(backend, *range(NUM_PROGRAMS))
            assert said == alone[0] and logprobs == pytest.approx(alone[1], abs=1e-11)
        counts = backend.get_server_info()["images"]
        assert counts["encoded"] == len(PICTURES) < counts["hits"]
