"""What `--help` and `--help-all` show of the engine's flags, and the page that lists all."""

from __future__ import annotations

import re

import pytest

from stemma.__main__ import main
from stemma.cli.flag_table import PAGE, page
from stemma.flags import flags_of
from stemma.runtime.config import EngineConfig

COMMON = {
    "--model", "--dtype", "--device", "--max-model-len", "--mem-fraction", "--max-total-tokens",
    "--quantization", "--max-running-requests", "--kv-cache-dtype", "--schedule-policy",
    "--tp-size",
}  # fmt: skip
ALL = [flag.usage.split()[0] for flag in flags_of(EngineConfig)]
OWN = {"run": "--arg", "generate": "--regex", "chat": "--system", "demo": "--json",
       "serve": "--drain-s", "trace": "--svg"}  # fmt: skip

Capture = pytest.CaptureFixture[str]


def shown(capsys: Capture, *argv: str) -> list[str]:
    """The options that a help lists, and what introduces their groups."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 0
    _, _, text = capsys.readouterr().out.partition("options:")
    return re.findall(r"^  (?:-h, )?(--[a-z-]+)|^(engine: .*):$", text, re.MULTILINE)


@pytest.mark.parametrize("command", OWN)
def test_help_shows_the_commands_own_flags_and_the_engines_common_ones(
    capsys: Capture, command: str
) -> None:
    options = {option for option, _ in shown(capsys, command, "--help")}
    assert {OWN[command], "--help-all"} <= options
    assert options & set(ALL) == COMMON


@pytest.mark.parametrize("command", OWN)
def test_help_all_shows_every_flag_in_groups(capsys: Capture, command: str) -> None:
    found = shown(capsys, command, "--help-all")
    assert {OWN[command], "--help", *ALL} <= {option for option, _ in found}
    headings = {heading for _, heading in found if heading}
    assert headings == {flag.heading for flag in flags_of(EngineConfig)}


def test_the_page_of_all_flags_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m stemma.cli.flag_table --write"
