"""Programs of the kinds that the embedded model knows, for a draft to learn from.

    stemma train-draft --programs draft_programs.py --out ../../runtime/checkpoint/assets/stemma-tiny-draft

Samples of the training mix, not of the held-out names; as programs, and as plain replies.
"""

import os

from generate import samples
from programs import run

SKILLS = ("extract", "react", "chat", "classify", "extract_many", "copy", "tips", "yes_no_stated")
NUM_EACH = int(os.environ.get("NUM_EACH", "400"))
SEED = 20261128


def main() -> None:
    for skill in SKILLS:
        stream = samples({skill: 1.0}, SEED)
        run([next(stream) for _ in range(NUM_EACH)], as_program=True, engine=None)


if __name__ == "__main__":
    main()
