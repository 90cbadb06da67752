"""`python -m stemma.runtime.tokenizer.encoder_worker FOLDER`: encodes very long texts.

Started and read by `encoder_process.py`; exchanges frames over standard input and output. A text
may trigger its tokenizer's worst case: an unhandled alarm ends the process then. When its parent
ends, its input ends, and so does it.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from pathlib import Path

from ...constrained.serving.frames import read_frame, write_frame
from ...errors import InvalidRequest
from .encoder_process import ERROR, IDS, LIMIT_S, MAX_TOKENS
from .tokenizer import encoded, plain_tokenizer


def main() -> int:
    """Encode until standard input ends."""
    tokenizer = plain_tokenizer(Path(sys.argv[1]) / "tokenizer.json")
    with contextlib.suppress(BrokenPipeError):  # the engine has died, and nobody reads replies
        while (question := read_frame(sys.stdin.buffer)) is not None:
            (max_tokens,) = MAX_TOKENS.unpack_from(question)
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
            try:
                ids = encoded(tokenizer, question[MAX_TOKENS.size :].decode(), max_tokens)
                reply = IDS + ids.tobytes()
            except InvalidRequest as error:
                reply = ERROR + json.dumps([type(error).__name__, str(error)]).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            write_frame(sys.stdout.buffer, reply)
    return 0


if __name__ == "__main__":
    sys.exit(main())
