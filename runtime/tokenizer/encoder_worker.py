"""`python -m stemma.runtime.tokenizer.encoder_worker FOLDER`: encodes very long texts.

Started and read by `encoder_process.py`; exchanges frames over standard input and output. A text
may trigger its tokenizer's worst case: an unhandled alarm ends the process then. When its parent
ends, its input ends, and so does it.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from array import array
from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer

from ...errors import InvalidRequest
from ...piped_process import read_frame, write_frame
from .encoder_process import ERROR, HEAD, INTS, LIMIT_S
from .tokenizer import encoded, plain_tokenizer, tokens_before

# Past this growth the process is replaced: 8 MB of text leave 600 MB that nothing frees.
MAX_GROWTH_BYTES = 150 * 2**20


def main() -> int:
    """Encode until standard input ends."""
    tokenizer = plain_tokenizer(Path(sys.argv[1]) / "tokenizer.json")
    num_bytes = _resident_bytes()
    with contextlib.suppress(BrokenPipeError):  # the engine has died, and nobody reads replies
        while (question := read_frame(sys.stdin.buffer)) is not None:
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
            try:
                reply = INTS + _answer(tokenizer, question).tobytes()
            except InvalidRequest as error:
                reply = ERROR + json.dumps([type(error).__name__, str(error)]).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            write_frame(sys.stdout.buffer, reply)
            del question, reply
            if _resident_bytes() > num_bytes + MAX_GROWTH_BYTES:
                break
    return 0


def _answer(tokenizer: HfTokenizer, question: bytes) -> array[int]:
    """The text's ids; where it comes with ends, the numbers of tokens before these."""
    max_tokens, num_ends = HEAD.unpack_from(question)
    ends = array("i")
    start = HEAD.size + num_ends * ends.itemsize
    ends.frombytes(question[HEAD.size : start])
    text = question[start:].decode()
    return tokens_before(tokenizer, text, ends) if ends else encoded(tokenizer, text, max_tokens)


def _resident_bytes() -> int:
    """0 where the system does not report it (macOS)."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
