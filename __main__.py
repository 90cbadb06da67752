"""The `stemma` command, also as `python -m stemma`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status, 130 where it was interrupted, be it while it loads."""
    try:
        from .cli.parser import run_command

        return run_command(argv)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
