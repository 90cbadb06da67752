"""Options that are stated once: the flag, the check and the row that a field gives."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from stemma.flags import (
    Allowed,
    Parser,
    add_flags,
    count,
    flag,
    flags_of,
    from_flags,
    integer,
    misfits,
    number,
)
from stemma.runtime.config import EngineConfig
from stemma.server.settings import ServerSettings


@dataclass(frozen=True)
class Kettle:
    litres: float = flag(1.5, "how much", number(0.5, 2), heading="water", metavar="L")
    num_cups: int | None = flag(None, "for so many", integer(1, 8))
    lid: str = flag("on", "on or off", heading="other", choices=("on", "off"))
    is_loud: bool = flag(False, "whistle")
    guests: tuple[str, ...] = flag((), "who comes; repeatable", name="--guest", is_secret=True)
    place: Path | str = flag("hob", "where (default: the hob)", Allowed("no spaces", str.isalnum))


def parser_of(record: type[Kettle | EngineConfig | ServerSettings]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_flags(parser, record)
    return parser


def test_parsed_flags_are_the_record() -> None:
    parser = parser_of(Kettle)
    assert from_flags(Kettle, parser.parse_args([])) == Kettle()
    given = ["--litres", "2", "--num-cups", "3", "--is-loud", "--guest", "a", "--guest", "b"]
    parsed = from_flags(Kettle, parser.parse_args([*given, "--lid", "off"]), place="hearth")
    assert parsed == Kettle(2.0, 3, "off", True, ("a", "b"), "hearth")
    assert from_flags(Kettle, parser.parse_args(["--guest", "c"])).guests == ("c",)
    assert "guests" not in repr(parsed)


def test_misfits_are_named_with_what_is_allowed() -> None:
    assert list(misfits(Kettle())) == []
    assert list(misfits(Kettle(litres=3, num_cups=9, lid="ajar"))) == [
        ("litres", 3, "a number in [0.5, 2]"),
        ("num_cups", 9, "an integer in [1, 8]"),
        ("lid", "ajar", "one of ('on', 'off')"),
    ]
    assert next(misfits(Kettle(num_cups=1.5)))[0] == "num_cups"  # type: ignore[arg-type]


def test_help_is_the_fields_with_their_defaults_under_their_headings() -> None:
    text = parser_of(Kettle).format_help()
    water, other = text.partition("\nother:\n")[::2]
    for line in ("--litres L ", "how much (default: 1.5)", "--num-cups N", "for so many\n"):
        assert line in water, text
    for line in ("on or off (default: on)", "whistle\n", "--guest GUESTS", "where (default: the"):
        assert line in other, text
    assert "--help-all" not in text, "where no flag is common, none is left out"


def test_rows_are_the_fields() -> None:
    rows = list(flags_of(Kettle))
    assert [row.heading for row in rows] == ["water"] * 2 + ["other"] * 4
    assert (rows[0].usage, rows[0].help) == ("--litres L", "how much (default: 1.5)")
    assert (rows[5].usage, rows[5].allowed) == ("--place", "no spaces")


@pytest.mark.parametrize("record", [EngineConfig, ServerSettings])
def test_every_default_is_allowed_and_every_field_is_a_flag(
    record: type[EngineConfig | ServerSettings],
) -> None:
    assert list(misfits(record())) == []
    args = parser_of(record).parse_args([])
    assert set(vars(args)) == {item.name for item in fields(record)}
    assert from_flags(record, args) == record()


def test_no_abbreviation_is_a_flag_and_the_nearest_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = Parser(prog="house")
    commands = parser.add_subparsers(dest="command", required=True)
    add_flags(commands.add_parser("tea"), Kettle)
    assert parser.parse_args(["tea", "--litres", "1"]).litres == 1.0
    for given, answer in (
        (["--litre", "1"], "house tea: error: unrecognized arguments: --litre 1; did you mean"),
        (["--num-cup=2"], "did you mean --num-cups?"),
        (["--zzz"], "unrecognized arguments: --zzz\n"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(["tea", *given])
        assert answer in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "two", "\u0661"])
def test_a_number_of_things_is_at_least_one(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser()
    parser.add_argument("--cups", type=count)
    assert parser.parse_args(["--cups", "12"]).cups == 12
    with pytest.raises(SystemExit):
        parser.parse_args([f"--cups={text}"])
    assert f"argument --cups: {text!r} is not allowed" in capsys.readouterr().err
