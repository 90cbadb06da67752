"""Tools that a model calls: what it is told of them, and its arguments."""

from __future__ import annotations

import asyncio
import enum
import functools
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pydantic
import pytest

import stemma as st


class Unit(enum.Enum):
    CELSIUS = "C"
    FAHRENHEIT = "F"


class Place(pydantic.BaseModel):
    city: str
    title: str = ""


@dataclass
class Span:
    days: int


def placed(user: int, place: str, days: int = 1) -> str:
    """What a user has of a place."""
    return f"{user} {place} {days}"


def test_what_a_partial_has_given_is_not_the_models_to_choose() -> None:
    tool = st.tool(functools.partial(placed, user=7))
    told = tool.definition["function"]
    assert (told["name"], told["description"]) == ("placed", "What a user has of a place.")
    assert list(told["parameters"]["properties"]) == ["place", "days"]
    assert tool.invoke('{"place": "Ulm"}') == "7 Ulm 1"
    with pytest.raises(st.InvalidRequest, match="user: Extra inputs"):
        tool.invoke('{"place": "Ulm", "user": 8}')


class Account:
    def __init__(self) -> None:
        self.balance = 10

    @st.tool
    def pay(self, amount: int) -> int:
        """Pay from the account."""
        self.balance -= amount
        return self.balance


def test_a_method_is_a_tool_of_its_object() -> None:
    account = Account()
    assert list(account.pay.parameters["properties"]) == ["amount"]
    assert account.pay.invoke('{"amount": 4}') == 6 and account.pay(1) == 5
    assert account.pay.name == "pay" and Account().balance == 10
    assert Account.pay is Account.__dict__["pay"]


def test_a_type_without_a_signature_is_refused() -> None:
    with pytest.raises(st.InvalidProgram, match="tool int: no signature"):
        st.tool(int).definition  # noqa: B018


@st.tool
def weather(
    place: Place,
    unit: Unit = Unit.CELSIUS,
    span: Span | None = None,
    mode: Annotated[Literal["short", "long"], "how much to say"] = "short",
    json: bool = False,
) -> str:
    """Weather of a place.

    It is that of today.

    Args:
        place: where.
        unit: of temperatures
    """
    assert isinstance(place, Place) and isinstance(unit, Unit)
    assert span is None or isinstance(span, Span)
    return f"{place.city} {unit.value} {span} {mode} {json}"


def test_a_model_is_told_of_a_function_by_its_signature_and_docstring() -> None:
    function = weather.definition["function"]
    assert weather.definition["type"] == "function" and function["name"] == "weather"
    assert function["description"] == "Weather of a place.\n\nIt is that of today."
    properties = function["parameters"]["properties"]
    assert list(properties) == ["place", "unit", "span", "mode", "json"]
    assert properties["place"]["description"] == "where."
    assert properties["mode"]["description"] == "how much to say"
    assert properties["mode"]["enum"] == ["short", "long"]
    assert function["parameters"]["required"] == ["place"]
    place = function["parameters"]["$defs"]["Place"]
    assert list(place["properties"]) == ["city", "title"], "a property may be called title"
    assert "title" not in place and "title" not in place["properties"]["city"]
    assert function["parameters"]["additionalProperties"] is False


def test_arguments_come_as_the_annotations_say() -> None:
    assert weather.invoke('{"place":{"city":"Ulm"}}') == "Ulm C None short False"
    text = '{"place":{"city":"Ulm"},"unit":"F","span":{"days":2},"mode":"long","json":true}'
    assert weather.invoke(text) == "Ulm F Span(days=2) long True"
    assert weather(Place(city="Rome")) == "Rome C None short False"

    @st.tool
    def clock() -> str:
        return "noon"

    assert clock.definition["function"] == {
        "name": "clock",
        "description": "",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    }
    assert clock.invoke("") == clock.invoke("{}") == "noon"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "place: Field required"),
        ('{"place":{"city":"Ulm"},"unit":"K"}', "unit: Input should be 'C' or 'F'"),
        ('{"place":{"city":"Ulm"},"colour":"red"}', "colour: Extra inputs are not permitted"),
        ('{"place":{"ci', "Invalid JSON"),
        ("[]", "Input should be an object"),
        ("[" * 10_000, "Invalid JSON"),
    ],
)
def test_arguments_that_it_does_not_take_are_refused_by_name(text: str, problem: str) -> None:
    with pytest.raises(st.InvalidRequest) as raised:
        weather.invoke(text)
    assert problem in str(raised.value)


def untyped(city):  # type: ignore[no-untyped-def]
    return city


def variadic(*cities: str) -> int:
    return len(cities)


def unknown(lock: NoSuchType) -> None:  # type: ignore[name-defined]  # noqa: F821
    del lock


def opaque(lock: asyncio.Lock) -> None:
    del lock


@pytest.mark.parametrize(
    ("fn", "problem"),
    [
        (untyped, "tool untyped: city='no annotation' is not allowed"),
        (variadic, "tool variadic=.*cities.* is not allowed; allowed: parameters with names"),
        (unknown, "tool unknown: an annotation cannot be read: name 'NoSuchType'"),
        (opaque, "tool opaque: its parameters are no JSON"),
        (lambda: 1, "tool='<lambda>' is not allowed"),
    ],
)
def test_a_function_of_which_no_model_can_be_told_is_refused_by_parameter(
    fn: Any, problem: str
) -> None:
    with pytest.raises(st.InvalidProgram, match=problem):
        st.tool(fn).definition  # noqa: B018


def test_what_a_program_calls_itself_may_be_any_function() -> None:
    assert st.tool(variadic)("a", "b") == 2


def test_the_time_that_calls_take_is_what_a_pause_expects() -> None:
    @st.tool
    def quick() -> None: ...

    @st.tool(expected_s=3)
    def told() -> None: ...

    @st.tool
    async def later() -> int:
        return 1

    assert quick.expected_s is None and told.expected_s == 3 and later.expected_s is None
    quick()
    told()
    assert asyncio.run(later()) == 1 == asyncio.run(later.invoke("{}"))
    assert quick.expected_s is not None and 0 <= quick.expected_s < 1
    assert told.expected_s == 3 and later.expected_s is not None


@pytest.mark.parametrize(
    ("tools", "options"),
    [
        ([], {}),
        (weather, {}),
        ([weather, weather], {}),
        ([1], {}),
        ([weather], {"max_turns": 0}),
        ([weather], {"max_turns": 1.5}),
        ([weather], {"on_error": "hide"}),
        ([weather], {"n": 2}),
        ([weather], {"json_schema": {}}),
    ],
)
def test_a_loop_that_cannot_be_is_refused_at_once(tools: Any, options: Any) -> None:
    with pytest.raises(st.InvalidProgram):
        st.tool_loop(tools, **options)
