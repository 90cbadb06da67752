"""Regular expressions of an adapter's config, matched against module names within a time limit.

They are written by the adapter's author, for the backtracking matcher of Python's `re`, which may
take exponential time and holds the interpreter's lock meanwhile. So a separate process matches
them: this file, run as a script, which imports nothing of the library (10 ms).
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Sequence

MAX_PATTERN_CHARS = 4096
LIMIT_S = 2  # of CPU time, for the patterns of a field: a thousand times the usual
_GRACE_S = 8  # on a busy machine
_INVALID = (re.error, OverflowError, RecursionError)


class PatternError(ValueError):
    """The message says what is wrong with a pattern."""


def match_patterns(
    patterns: Sequence[str],
    names: Sequence[str],
    around: tuple[str, str] | None = None,
    group: int = 0,
) -> list[dict[str, str]]:
    """For each pattern the names that it matches, with the group's text.

    A pattern must match the whole name; or, with the text `around` it, the name's beginning. Raises
    PatternError for an invalid regular expression, or one too long or too costly.
    """
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN_CHARS:
            raise PatternError(f"at most {MAX_PATTERN_CHARS} characters, not {len(pattern)}")
    if not patterns:
        return []
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", __file__],
            input=json.dumps([list(patterns), list(names), around, group]).encode(),
            capture_output=True,
            timeout=LIMIT_S + _GRACE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode:  # the kernel kills it at its limit
        raise PatternError(f"matching takes more than {LIMIT_S} s")
    answer: str | list[dict[str, str]] = json.loads(done.stdout)
    if isinstance(answer, str):
        raise PatternError(answer)
    return answer


def _main() -> int:
    """Read a job; print the matches, or a text that says what is wrong."""
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
    patterns, names, around, group = json.load(sys.stdin)
    try:
        print(json.dumps([_found(pattern, names, around, group) for pattern in patterns]))
    except _INVALID as error:
        print(json.dumps(str(error)))
    return 0


def _found(
    pattern: str, names: Sequence[str], around: Sequence[str] | None, group: int
) -> dict[str, str]:
    match = re.compile(pattern).fullmatch
    if around is not None:
        match = re.compile(f"{around[0]}{pattern}{around[1]}").match
    return {name: found[group] for name in names if (found := match(name))}


if __name__ == "__main__":
    sys.exit(_main())
