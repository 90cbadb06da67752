"""Options that are stated once: a dataclass's field is its flag, its check and its row in a table.

    @dataclass(frozen=True)
    class Settings:
        port: int = flag(8000, "0: any that is free", integer(0, 65_535))

gives `Settings().port`, `--port N` with "0: any that is free (default: 8000)" as its help, the
values that `misfits` finds, and what `flags_of` tells. It knows no option, and imports nothing of
the house, so that the engine, the server and the commands can all state theirs here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")
Value = TypeVar("Value")

_KEY = "flag"  # in a field's metadata


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a field's value may be, in words and as a test; None too, where it is the default."""

    text: str
    holds: Callable[[Any], object]


def integer(low: int, high: int) -> Allowed:
    """From `low` to `high`, both among them."""
    text = f"an integer in [{low}, {high}]"
    return Allowed(text, lambda value: isinstance(value, int) and low <= value <= high)


def number(low: float, high: float) -> Allowed:
    """From `low` to `high`, both among them."""
    return Allowed(f"a number in [{low:g}, {high:g}]", lambda value: low <= value <= high)


@dataclass(frozen=True, slots=True)
class Flag:
    """What a field says of itself beside its name, its type and its default."""

    help: str  # argparse's; the default is added where it does not name one
    allowed: Allowed | None
    name: str | None  # None: the field's
    heading: str | None  # over this flag and those after it
    is_common: bool  # shown by `--help`, see `add_flags`
    options: dict[str, Any]  # for argparse


def flag(
    default: Value,
    help: str,
    allowed: Allowed | None = None,
    *,
    name: str | None = None,
    heading: str | None = None,
    is_common: bool = False,
    is_secret: bool = False,
    **options: Any,
) -> Value:
    """A dataclass's field that is a flag. `options` are argparse's own (metavar, choices, type,
    nargs); its type and action follow from the field's type otherwise. is_secret: not in `repr`."""
    if "choices" in options:
        allowed = Allowed(f"one of {options['choices']}", options["choices"].__contains__)
    made = Flag(help, allowed, name, heading, is_common, options)
    return field(default=default, repr=not is_secret, metadata={_KEY: made})


def misfits(record: DataclassInstance) -> Iterator[tuple[str, object, str]]:
    """Of each field whose value is not allowed: its name, the value, what is allowed."""
    for item in fields(record):
        value, allowed = getattr(record, item.name), item.metadata[_KEY].allowed
        is_unset = value is None and item.default is None
        if allowed is not None and not is_unset and not allowed.holds(value):
            yield item.name, value, allowed.text


@dataclass(frozen=True, slots=True)
class FlagText:
    """A flag as a reader sees it."""

    usage: str  # "--page-size N"
    heading: str
    help: str
    allowed: str
    is_common: bool


def flags_of(record: type[DataclassInstance]) -> Iterator[FlagText]:
    """All of them, in the order of the fields."""
    heading = ""
    for item, own, options in _fields(record):
        heading = own.heading or heading
        usage = f"{_name(own, item.name)} {options.get('metavar', '')}".rstrip()
        text = _help(own, item.default) % {"default": item.default}
        yield FlagText(usage, heading, text, own.allowed.text if own.allowed else "", own.is_common)


def add_flags(
    parser: argparse.ArgumentParser,
    record: type[DataclassInstance],
    **changed: Mapping[str, Any],
) -> None:
    """A flag of each field, under their headings. Where some are common, `--help` shows these
    alone, and `--help-all`, which is added with them, shows all. `changed`: by field argparse's
    options in which this parser differs."""
    group: argparse._ActionsContainer = parser
    rare: dict[argparse.Action, str] = {}
    for item, own, options in _fields(record):
        if own.heading:
            group = parser.add_argument_group(own.heading)
        options = {**options, "help": _help(own, item.default), **changed.get(item.name, {})}
        action = group.add_argument(_name(own, item.name), dest=item.name, **options)
        if not own.is_common:
            rare[action] = options["help"]
    if 0 < len(rare) < len(fields(record)):
        parser.add_argument("--help-all", action=_HelpAll, hidden=rare)


class Parser(argparse.ArgumentParser):
    """Takes flags by their whole names only: what abbreviates one today may name another tomorrow.
    For one that it does not know it names the nearest; so do the parsers of its commands."""

    before_parsing: Callable[[Sequence[str]], None] | None = None
    """Gets the words once they are to be parsed: adds what costs too much to have ready."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if self.before_parsing is not None:
            self.before_parsing(args or ())
        known, rest = super().parse_known_args(args, namespace)
        for flag in (word.partition("=")[0] for word in rest if word.startswith("--")):
            near = get_close_matches(flag, self._option_string_actions, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return known, rest


def count(text: str) -> int:
    """An argument's `type`: a number of things, at least one."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: an integer >= 1")
    return int(text)


def from_flags(record: type[Record], args: argparse.Namespace, **given: object) -> Record:
    """The record of what was parsed; `given` goes before."""
    values = {item.name: getattr(args, item.name) for item in fields(record)} | given
    return record(**{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})


class _HelpAll(argparse.Action):
    """`--help-all`: the help with the flags that `--help` leaves out."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, hidden: dict[argparse.Action, str]
    ) -> None:
        text = f"show all flags, {len(hidden)} of which --help leaves out, and exit"
        super().__init__(option_strings, argparse.SUPPRESS, 0, default=argparse.SUPPRESS, help=text)
        self.hidden = hidden
        for action in hidden:
            action.help = argparse.SUPPRESS

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for action, text in self.hidden.items():
            action.help = text
        parser.print_help()
        parser.exit()


def _fields(
    record: type[DataclassInstance],
) -> Iterator[tuple[Field[Any], Flag, dict[str, Any]]]:
    """Each field, what it says of itself, and what argparse is to know."""
    kinds = get_type_hints(record)
    for item in fields(record):
        own: Flag = item.metadata[_KEY]
        yield item, own, _options(kinds[item.name], item.default) | own.options


def _name(own: Flag, field_name: str) -> str:
    return own.name or "--" + field_name.replace("_", "-")


def _help(own: Flag, default: object) -> str:
    """With the default, unless the text names one or there is none to speak of."""
    if "default:" in own.help or default is None or default is False or default == ():
        return own.help
    return f"{own.help} (default: %(default){'g' if isinstance(default, float) else 's'})"


def _options(kind: Any, default: Any) -> dict[str, Any]:
    """argparse's, of a field's type and default."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if bool in kinds:
        return {"action": "store_true"}
    if get_origin(kind) is tuple:
        return {"action": "append", "default": list(default)}
    if int in kinds:
        return {"default": default, "type": int, "metavar": "N"}
    parse = next((each for each in (float, Path) if each in kinds and str not in kinds), None)
    return {"default": default, "type": parse}
