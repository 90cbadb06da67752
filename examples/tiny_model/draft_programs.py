"""Programs of the kinds that the embedded model knows, for a draft to learn from.

    stemma train-draft --programs draft_programs.py --out stemma-tiny-draft --max-minutes 20

Samples of the training mix, not of the held-out names, so that what the draft is measured by later
is new to it.
"""

from generate import samples
from programs import run

SKILLS = ("extract", "react", "chat", "classify", "extract_many", "copy", "tips", "yes_no_stated")
NUM_EACH = 150
SEED = 20261128


def main() -> None:
    for skill in SKILLS:
        stream = samples({skill: 1.0}, SEED)
        run([next(stream) for _ in range(NUM_EACH)], as_program=True, engine=None)


if __name__ == "__main__":
    main()
