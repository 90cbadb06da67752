"""Numbers in programs: scalars of numpy and torch are taken, what is no number is refused at once
with its name, its value and the range."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from dsl_programs import GREEDY

import stemma as st
from stemma.frontend.dsl.expr import GenExpr
from stemma.frontend.protocol.numbers import FLAGS, RANGES

pytestmark = pytest.mark.usefixtures("no_test_hangs")

NUMBERS = {
    name: name for name in RANGES if name not in ("token_ids", "deadline_s", "logit_bias")
} | {"deadline": "deadline_s"}


def params_of(**given: Any) -> Any:
    made = st.gen("x", **given)
    assert isinstance(made, GenExpr)
    return made.params


@pytest.mark.parametrize("number", [nan, inf, -inf, np.float32(nan), torch.tensor(inf)])
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_is_refused_with_its_range(name: str, number: Any) -> None:
    field = NUMBERS[name]
    beside = {"logprobs": 1} if name == "logprob_start" else {}
    with pytest.raises(st.InvalidProgram) as caught:
        st.gen("x", **{name: number, **beside})
    shown = repr(float(number))
    expected = f"{field}={shown} is not allowed; allowed: {RANGES[field].text}"
    assert str(caught.value) == expected and caught.value.field == field


@pytest.mark.parametrize("value", [np.array([0.5]), object()], ids=["array", "object"])
@pytest.mark.parametrize("name", NUMBERS)
def test_what_cannot_be_sent_is_refused_with_its_range(name: str, value: Any) -> None:
    beside = {"logprobs": 1} if name == "logprob_start" else {}
    with pytest.raises(st.InvalidProgram) as caught:
        st.gen("x", **{name: value, **beside})
    field = NUMBERS[name]
    expected = f"{field}={value!r} is not allowed; allowed: {RANGES[field].text}"
    assert str(caught.value) == expected and caught.value.field == field


@pytest.mark.parametrize("number", [Decimal("sNaN"), Fraction(10**400)], ids=["signal", "huge"])
def test_what_no_float_can_hold_is_refused_with_its_range(number: Any) -> None:
    with pytest.raises(st.InvalidProgram, match=r"^temperature=.* a number in \[0, 10000\]$"):
        st.gen("x", temperature=number)
    with pytest.raises(st.InvalidProgram, match=r"^num_needed=.* an integer in \[1, 65536\]$"):
        st.first(number)


@pytest.mark.parametrize("value", [np.array([True]), nan, object()], ids=["array", "nan", "object"])
@pytest.mark.parametrize("name", FLAGS)
def test_what_is_neither_true_nor_false_is_refused(name: str, value: Any) -> None:
    with pytest.raises(st.InvalidProgram) as caught:
        st.gen("x", **{name: value})
    assert str(caught.value) == f"{name}={value!r} is not allowed; allowed: {FLAGS[name]}"


def test_a_bias_and_the_options_of_a_run_are_checked_alike() -> None:
    with pytest.raises(st.InvalidProgram, match=r"logit_bias=nan .* a number in \[-100, 100\]"):
        st.gen("x", logit_bias={3: nan})
    program = st.function(lambda s: None)
    with pytest.raises(st.InvalidProgram, match=r"temperature=nan .* a number in \[0, 10000\]"):
        program.run(temperature=nan, backend=None)


SCALARS: list[tuple[str, Any, Any]] = [
    ("temperature", np.float32(0.5), 0.5),
    ("temperature", torch.tensor(0.5), 0.5),
    ("temperature", np.array(0.5), 0.5),
    ("top_p", np.float64(0.5), 0.5),
    ("top_p", Fraction(1, 2), 0.5),
    ("top_p", Decimal("0.5"), 0.5),
    ("max_tokens", np.int64(4), 4),
    ("max_tokens", torch.tensor(4), 4),
    ("top_k", np.int32(4), 4),
    ("top_k", np.int64(-1), None),
    ("seed", np.uint64(2**63 - 1), 2**63 - 1),
    ("ignore_eos", np.bool_(True), True),
    ("early_stopping", np.bool_(True), True),
    ("early_stopping", "never", "never"),
    ("logit_bias", {np.int64(3): np.float32(1)}, ((3, 1.0),)),
    ("logit_bias", {3: torch.tensor(1.0)}, ((3, 1.0),)),
    ("stop_token_ids", [np.int64(3)], (3,)),
    ("stop_token_ids", np.array([3, 4]), (3, 4)),
    ("stop_token_ids", torch.tensor([3, 4]), (3, 4)),
]


@pytest.mark.parametrize(("name", "given", "number"), SCALARS)
def test_scalars_of_numpy_and_torch_are_numbers(name: str, given: Any, number: Any) -> None:
    made = getattr(params_of(**{name: given}), name)
    assert made == number and type(made) is type(number)
    items = made if isinstance(made, tuple) else ()
    for item in items:
        assert type(item) in (int, tuple)


def test_a_tensor_that_changes_is_read_each_time() -> None:
    temperature = torch.tensor(0.5)
    assert params_of(temperature=temperature).temperature == 0.5
    temperature.fill_(0.25)
    assert params_of(temperature=temperature).temperature == 0.25


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop", 3), ("stop_regex", 3), ("stop_token_ids", 3), ("stop_token_ids", [1.5]),
     ("stop_token_ids", ["3"]), ("stop_token_ids", [True]), ("stop_token_ids", [-1])],
)  # fmt: skip
def test_what_is_no_list_of_the_kind_is_refused(name: str, value: Any) -> None:
    with pytest.raises(st.InvalidProgram, match=name):
        st.gen("x", **{name: value})


@pytest.mark.usefixtures("default_engine")
def test_a_program_takes_scalars_wherever_it_takes_numbers() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.tokens(np.array([80, 81])) + st.gen("x", max_tokens=np.int64(3), **GREEDY)
        forks = s.fork(np.int64(2))
        forks += st.gen("y", max_tokens=2)
        forks.join(st.first(np.int64(1)))
        s.pin(ttl_s=np.float32(1))
        with s.pause(expected_s=torch.tensor(0.5)):
            pass
        s += st.select("z", ["a", "b"], temperature=np.float32(0))

    options = {"temperature": np.float32(0), "top_p": torch.tensor(0.5), "seed": np.int64(7)}
    texts = {program.run(**options).text() for _ in range(2)}
    assert len(texts) == 1


@pytest.mark.usefixtures("default_engine")
@pytest.mark.parametrize("value", [True, "0.5", [0.5]])
def test_what_is_no_number_at_all_is_refused_by_name(value: Any) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "a" + st.gen("x", max_tokens=2, temperature=value)

    with pytest.raises(st.ProgramError, match=r"temperature=.* allowed: a number in \[0, 10000\]"):
        program.run()
    for call in (
        lambda: program.run(seed=value),
        lambda: st.select("x", ["a"], temperature=value),
        lambda: st.first(value),
    ):
        with pytest.raises(st.InvalidProgram, match="allowed"):
            call()
