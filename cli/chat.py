"""`stemma chat`: a conversation in the terminal. Ctrl-C stops the answer, not the program."""

from __future__ import annotations

import argparse
import sys

from ..errors import StemmaError
from ..frontend.client.backend import Backend
from ..frontend.dsl.expr import assistant, role, user
from ..frontend.dsl.function import open_program
from ..frontend.dsl.generation import gen
from ..frontend.dsl.state import ProgramState
from ..frontend.protocol.ir import GenParams
from .connect import Commands, add_backend_flags, open_backend
from .generate import SAMPLING_FLAGS, add_sampling_flags

HELP = "/reset starts over, /system TEXT sets the system message, /exit (or Ctrl-D) leaves"


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("chat", help="talk with the model in the terminal")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--stats", action="store_true", help="show token counts after each answer")
    add_sampling_flags(parser)
    add_backend_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read, answer, repeat."""
    with open_backend(args) as backend:
        conversation = Conversation(backend, args)
        print(f"{backend.channel.info['model']}. {HELP}", file=sys.stderr)
        while True:
            try:
                if not _obey(conversation, input("> ").strip()):
                    return 0
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:  # at the prompt, or just before or after an answer
                print()


def _obey(conversation: Conversation, line: str) -> bool:
    """Carry out one line; False to leave."""
    if line == "/exit":
        return False
    if line == "/reset":
        conversation.reset()
    elif line.startswith("/system"):
        conversation.reset(system=line.removeprefix("/system").strip() or None)
    elif line.startswith("/"):
        print(HELP, file=sys.stderr)
    elif line:
        conversation.answer(line)
    return True


class Conversation:
    """One running program that grows turn by turn; begun anew from its text after Ctrl-C."""

    def __init__(self, backend: Backend, args: argparse.Namespace) -> None:
        self._backend = backend
        self._args = args
        self._system: str | None = args.system
        self._turns: list[tuple[str, str]] = []
        self._state = self._open()

    def reset(self, system: str | None = None) -> None:
        """Forget the conversation."""
        self._state.cancel()
        self._system = system or self._system
        self._turns = []
        self._state = self._open()

    def answer(self, text: str) -> None:
        """One turn, printed as it comes."""
        name = f"turn{len(self._turns)}"
        state, said = self._state, ""
        try:
            state += user(text) + assistant(gen(name, self._args.max_tokens))
            for piece in state.text_iter(name):
                print(piece, end="", flush=True)
                said += piece
            print()
            self._turns.append((text, said))
            if self._args.stats:
                self._print_stats(name)
        except (KeyboardInterrupt, StemmaError) as error:
            print(" [stopped]" if isinstance(error, KeyboardInterrupt) else f"error: {error}")
            if said:
                self._turns.append((text, said))
            state.cancel()
            self._state = self._open()

    def _open(self) -> ProgramState:
        args = self._args
        defaults = GenParams(
            **{name: getattr(args, name) for name in SAMPLING_FLAGS},
            stop=tuple(args.stop) if args.stop else None,
        )
        state = open_program(self._backend, seed=args.seed or 0, stream=True, defaults=defaults)
        if self._system:
            state += role("system", self._system)
        for question, reply in self._turns:
            state += user(question) + assistant(reply)
        return state

    def _print_stats(self, name: str) -> None:
        meta = self._state.get_meta_info(name)
        first_ms, all_ms = meta["time_to_first_token_s"] * 1000, meta["latency_s"] * 1000
        print(
            f"[{meta['prompt_tokens']} prompt tokens, {meta['cached_tokens']} cached, "
            f"{meta['completion_tokens']} generated; first after {first_ms:.0f} ms, "
            f"all after {all_ms:.0f} ms]",
            file=sys.stderr,
        )
