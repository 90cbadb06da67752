"""`stemma generate`: one answer to one prompt."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest
from ..frontend.dsl.expr import assistant, user
from ..frontend.dsl.function import function
from ..frontend.dsl.generation import gen
from ..frontend.dsl.state import ProgramState
from .connect import Commands, add_backend_flags, open_backend


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("generate", help="answer one prompt")
    parser.add_argument("prompt", help='the text, or "-" to read it from standard input')
    parser.add_argument("--raw", action="store_true", help="continue the text; no chat template")
    add_sampling_flags(parser)
    parser.add_argument("--min-tokens", type=int, metavar="N", help="no end before so many")
    parser.add_argument(
        "--logit-bias",
        action="append",
        metavar="ID=BIAS",
        help="added to a token's logit, in [-100, 100] (repeatable)",
    )
    add_constraint_flags(parser)
    parser.add_argument("--n", type=int, default=1, metavar="N", help="so many answers")
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
    add("--min-p", type=float, metavar="P", help="in [0, 1] (default: the model's)")
    add("--frequency-penalty", type=float, metavar="F", help="in [-2, 2] (default: 0)")
    add("--presence-penalty", type=float, metavar="F", help="in [-2, 2] (default: 0)")
    add("--repetition-penalty", type=float, metavar="F", help="in (0, 10] (default: the model's)")
    add("--stop", action="append", metavar="TEXT", help="end before this text (repeatable)")
    add("--seed", type=int, metavar="N", help="fixes all draws")


def add_constraint_flags(parser: argparse.ArgumentParser) -> None:
    """What the answer must be: at most one of these."""
    add = parser.add_mutually_exclusive_group().add_argument
    add("--regex", metavar="REGEX", help="the whole answer matches it")
    add("--json-schema", metavar="FILE|JSON", help="the answer is JSON of this schema")
    add("--ebnf", metavar="FILE", help="the answer follows this grammar (Lark's syntax or GBNF)")
    add("--choices", action="append", metavar="TEXT", help="the likeliest of these (repeatable)")


SAMPLING_FLAGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


@function
def _answer(s: ProgramState, prompt: str, is_raw: bool, options: dict[str, Any]) -> None:
    if is_raw:
        s += prompt
        s += gen("text", **options)
    else:
        s += user(prompt)
        s += assistant(gen("text", **options))


def run(args: argparse.Namespace) -> int:
    """Print the answer as it comes; several one after the other, each under its number."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    names = (*SAMPLING_FLAGS, "max_tokens", "min_tokens", "stop", "n")
    options = {name: getattr(args, name) for name in names}
    options["logit_bias"] = dict(map(_bias, args.logit_bias)) if args.logit_bias else None
    options |= _constraint(args)
    with open_backend(args) as backend:
        state = _answer.stream(
            prompt, is_raw=args.raw, options=options, seed=args.seed, backend=backend
        )
        if args.json:
            print(json.dumps(_as_json(state)))
        elif args.n == 1:
            for piece in state.text_iter("text"):
                print(piece, end="", flush=True)
            print()
        else:
            for number, text in enumerate(state["text"], 1):
                print(f"[{number}] {text}")
    return 0


def _constraint(args: argparse.Namespace) -> dict[str, Any]:
    """What gen is told of it."""
    if args.choices and args.n > 1:
        raise InvalidRequest.of("n", args.n, "1, together with choices")
    schema = args.json_schema
    if schema is not None and not schema.lstrip().startswith(("{", "true", "false")):
        schema = _read("json_schema", schema)
    ebnf = None if args.ebnf is None else _read("ebnf", args.ebnf)
    return {"regex": args.regex, "json_schema": schema, "ebnf": ebnf, "choices": args.choices}


def _read(field: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest.of(field, path, f"a file that can be read ({error})") from error


def _as_json(state: ProgramState) -> dict[str, Any]:
    """Text and counts; of several answers, a list of them."""
    text, meta = state["text"], state.get_meta_info("text")
    if isinstance(text, str):
        return {"text": text, **meta}
    return {"samples": [{"text": t, **m} for t, m in zip(text, meta, strict=True)]}


def _bias(pair: str) -> tuple[int, float]:
    token_id, _, bias = pair.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise InvalidRequest.of("logit_bias", pair, "ID=BIAS, as in 42=-100") from None
