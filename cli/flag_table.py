"""`docs/serve/flags.md`, from the flags themselves: `python -m stemma.cli.flag_table [--write]`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from ..cluster.settings import ClusterSettings
from ..flags import FlagText, flags_of
from ..runtime.config import EngineConfig
from ..server.settings import ServerSettings

PAGE = Path(__file__).parents[1] / "docs" / "serve" / "flags.md"

_INTRO = """\
# All flags

Written by `python -m stemma.cli.flag_table --write`; a test holds it to the flags.

`stemma run`, `generate`, `chat`, `demo`, `trace` and `serve` take the engine's flags, of which
`--help` shows those in bold and `--help-all` all. `st.Engine` takes the same by name, as in
`st.Engine(page_size=16)`. `stemma serve` alone takes those under the other headings.
"""


def page() -> str:
    """Its text: a table under each heading of `--help-all`."""
    flags = [*flags_of(EngineConfig), *flags_of(ServerSettings), *flags_of(ClusterSettings)]
    groups = groupby(flags, key=lambda flag: flag.heading)
    return "\n".join([_INTRO, *(_table(heading, group) for heading, group in groups)])


def _table(heading: str, flags: Iterable[FlagText]) -> str:
    rows = "".join(f"{_row(flag)}\n" for flag in flags)
    return f"## {heading}\n\n| Flag | What | Allowed |\n| --- | --- | --- |\n{rows}"


def _row(flag: FlagText) -> str:
    name = f"**`{flag.usage}`**" if flag.is_common else f"`{flag.usage}`"
    return f"| {name} | {flag.help} | {flag.allowed} |".replace("<", "&lt;")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
