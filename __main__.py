"""The `stemma` command, also as `python -m stemma`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    from .cli.parser import run_command

    return run_command(argv)


if __name__ == "__main__":
    sys.exit(main())
