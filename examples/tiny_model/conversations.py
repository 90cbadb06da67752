"""Writes held-out conversations as JSON, for benchmarks that replay what people ask.

    python conversations.py ../../bench/speculation/data/conversations.json [--samples 40]
    python conversations.py ../../bench/speculation/data/extractions.json --skills extract \
        --samples 200 --answers
    python conversations.py ../../bench/speculation/data/agents.json --skills react \
        --samples 160 --answers

For each conversation: its skill, the system's text if it has one, the user's messages, the limits
that a program sets to each reply, and what the lookup tool of an agent knows; with `--answers` also
the right replies.
"""

import argparse
import json
from pathlib import Path

from generate import samples
from samples import END

SKILLS = ("extract", "react", "chat", "classify", "extract_many", "copy")
SEED = 1711


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--samples", type=int, default=40, help="of each skill")
    parser.add_argument("--skills", nargs="+", default=SKILLS, choices=SKILLS)
    parser.add_argument("--answers", action="store_true")
    args = parser.parse_args()
    conversations = []
    for skill in args.skills:
        stream = samples({skill: 1.0}, SEED, held_out=True)
        for _ in range(args.samples):
            sample = next(stream)
            conversation = {
                "skill": skill,
                "system": sample.messages("system"),
                "user": sample.messages("user"),
                "limits": sample.limits,
                "facts": sample.facts,
            }
            if args.answers:
                replies = [each.text for each in sample.segments if each.is_generated]
                conversation["answers"] = [text for text in replies if text != END]
            conversations.append(conversation)
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in conversations)
    args.file.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
