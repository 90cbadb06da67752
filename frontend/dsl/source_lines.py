"""The source line of the author's that made an op: the nearest caller outside this package."""

from __future__ import annotations

import os
from types import CodeType, FrameType

_PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MAX_CODES = 4096  # programs that create functions without end must not fill memory

# By a code object's id: the object, so that its id is not reused, and "file:line" by instruction;
# None for code of this package. Threads may race: they write the same.
_known: dict[int, tuple[CodeType, dict[int, str] | None]] = {}


def source_line(frame: FrameType | None) -> str | None:
    """ "file:line" of `frame`, or of its nearest caller outside this package."""
    while frame is not None:
        code = frame.f_code
        found = _known.get(id(code))
        if found is None:
            found = _remember(code)
        lines = found[1]
        if lines is not None:
            line = lines.get(frame.f_lasti)
            if line is None:
                line = lines[frame.f_lasti] = f"{code.co_filename}:{frame.f_lineno}"
            return line
        frame = frame.f_back
    return None


def _remember(code: CodeType) -> tuple[CodeType, dict[int, str] | None]:
    if len(_known) >= _MAX_CODES:
        _known.clear()
    is_ours = code.co_filename.startswith(_PACKAGE_DIR)
    found = _known[id(code)] = (code, None if is_ours else {})
    return found
