"""`stemma generate`: one answer to one prompt."""

from __future__ import annotations

import argparse
import json
import sys

from ..frontend.expr import assistant, gen, user
from ..frontend.function import function
from ..frontend.state import ProgramState
from .connect import Commands, add_backend_flags, open_backend


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("generate", help="answer one prompt")
    parser.add_argument("prompt", help='the text, or "-" to read it from standard input')
    parser.add_argument("--raw", action="store_true", help="continue the text; no chat template")
    add_sampling_flags(parser)
    parser.add_argument("--json", action="store_true", help="print text and counts as JSON")
    add_backend_flags(parser)
    parser.set_defaults(run=run)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """What a gen takes."""
    add = parser.add_argument
    add("--max-tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    add("--temperature", type=float, metavar="T", help="0 is greedy (default: the model's)")
    add("--top-p", type=float, metavar="P", help="in (0, 1] (default: the model's)")
    add("--top-k", type=int, metavar="K", help=">= 1 (default: the model's)")
    add("--stop", action="append", metavar="TEXT", help="end before this text (repeatable)")
    add("--seed", type=int, metavar="N", help="fixes all draws")


@function
def _answer(s: ProgramState, prompt: str, is_raw: bool) -> None:
    if is_raw:
        s += prompt
        s += gen("text")
    else:
        s += user(prompt)
        s += assistant(gen("text"))


def run(args: argparse.Namespace) -> int:
    """Print the answer as it comes."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    sampling = {
        name: getattr(args, name)
        for name in ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed")
    }
    with open_backend(args) as backend:
        state = _answer.stream(prompt, is_raw=args.raw, backend=backend, **sampling)
        if args.json:
            text = state["text"]
            print(json.dumps({"text": text, **state.get_meta_info("text")}))
            return 0
        for piece in state.text_iter("text"):
            print(piece, end="", flush=True)
        print()
    return 0
